"""Attention calls: backend, shape, mask, module, and why a call did not use flash attention."""
