"""What verbs share: output, progress, settings, number parsing."""
