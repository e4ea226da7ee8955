"""Checkpoints that come quantised: what their configurations say, and their weights as ``Packed``."""
