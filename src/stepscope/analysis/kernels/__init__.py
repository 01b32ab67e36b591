"""What the GPU runs: kernels by class and name, ops, copies, recomputation, experts."""
