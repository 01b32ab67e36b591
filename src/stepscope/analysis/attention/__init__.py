"""Attention calls: backend, shape, mask, module, and why a call did not run on flash."""
