"""GPU work: kernels by class and name, ops, copies, recomputation, experts."""
