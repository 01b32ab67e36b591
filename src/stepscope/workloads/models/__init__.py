"""The five reference model families, one file each."""
