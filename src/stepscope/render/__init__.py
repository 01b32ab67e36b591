"""Renders documents: terminal, notebook, HTML, Markdown, CSV, PNG. Computes nothing."""
