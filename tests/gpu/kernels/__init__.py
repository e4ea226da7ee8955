"""A round's GPU kernels."""
