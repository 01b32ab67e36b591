"""Which dtypes a step computes in, and what is cast."""
