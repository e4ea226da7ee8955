"""Which weights of a checkpoint are quantized, and how: the configurations that other tools write."""
