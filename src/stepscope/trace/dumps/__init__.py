"""Dumps that PyTorch writes when something goes wrong, and the stacks in them."""
