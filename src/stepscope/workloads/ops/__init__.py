"""The ops that the model families argue about, one file each."""
