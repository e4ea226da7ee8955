"""Engines of specrun's own CUDA kernels: a dense decoder, five kernels a layer."""
