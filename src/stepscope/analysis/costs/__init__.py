"""FLOPs and bytes of every op, and how close kernels come to the device's limits."""
