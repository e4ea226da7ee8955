"""Packed tensors of other tools to the one format of ``weights.packed``."""
