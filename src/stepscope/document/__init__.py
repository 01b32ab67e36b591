"""Results as documents: facts, tables, charts and findings, built once per topic."""
