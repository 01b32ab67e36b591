"""Memory: allocations, owners, the peak, growth, leaks."""
