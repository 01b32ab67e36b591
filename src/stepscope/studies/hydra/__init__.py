"""The hydra study."""
