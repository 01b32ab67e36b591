"""Rules about the machine: ranks, clocks, other processes."""
