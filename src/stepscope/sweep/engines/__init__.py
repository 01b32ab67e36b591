"""Where the processes of a sweep run: this machine, a Ray cluster or Slurm."""
