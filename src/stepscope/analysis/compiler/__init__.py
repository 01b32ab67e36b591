"""What torch.compile did: compilations, graph breaks, recompiles, compiled regions."""
