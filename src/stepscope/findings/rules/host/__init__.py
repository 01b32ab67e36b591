"""Rules about the host: data, launches, synchronizations, stalls."""
