"""Runs a program on tensors without data as if it ran on the planned device."""
