"""torch.compile in a plan, without a device to compile for."""
