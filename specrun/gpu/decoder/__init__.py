"""Engines of specrun's own CUDA kernels: a decoder, five kernels a layer."""
