"""One rank's account, and all ranks side by side."""
