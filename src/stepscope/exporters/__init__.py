"""A trace for other tools: Perfetto, speedscope, CSV and Parquet."""
