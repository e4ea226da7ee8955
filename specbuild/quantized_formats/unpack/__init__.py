"""Packed tensors of other tools to the one form of ``weights.packed``."""
