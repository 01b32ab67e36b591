"""What belongs to what in a trace: launch and kernel, op, module, step, phase."""
