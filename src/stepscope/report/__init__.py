"""Results made visible: the terminal card, JSON, HTML."""
