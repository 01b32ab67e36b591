"""GPU idle time by cause, phases, steps, synchronizations, replay."""
