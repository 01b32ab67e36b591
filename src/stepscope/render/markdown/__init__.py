"""Reports and comparisons as Markdown: for a pull request."""
