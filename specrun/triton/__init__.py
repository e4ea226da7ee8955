"""Triton Inference Server: a model repository, and its Python model. Only Triton's process can import ``backend``."""
