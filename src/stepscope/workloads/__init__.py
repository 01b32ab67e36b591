"""What can be run: reference models, ops, Hugging Face configurations and a user's own factories."""
