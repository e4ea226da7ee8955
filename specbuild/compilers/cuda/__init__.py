"""Compiles a checkpoint for specrun's own CUDA kernels: its layers, and weights in tiles of tensor cores."""
