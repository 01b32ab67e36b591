"""Records what torch.compile does while a script runs."""
