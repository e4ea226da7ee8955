"""Quantized checkpoints of other tools: which weights they hold, and how these are unpacked."""
