"""Predicts the memory and time of a training step without a GPU."""
