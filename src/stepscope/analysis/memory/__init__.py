"""What fills the memory: allocations, owners, the peak, growth, leaks."""
