"""Memory and time of a training step, predicted with no GPU."""
