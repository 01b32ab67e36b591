"""Links between events: launch and kernel, op, module, step, phase."""
