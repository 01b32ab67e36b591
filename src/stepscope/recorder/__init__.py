"""Records a training run from inside its process: needs torch and the standard library, nothing else."""
