"""The dtypes a step computes in, and its casts."""
