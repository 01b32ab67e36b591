"""Rules about what the GPU computes."""
