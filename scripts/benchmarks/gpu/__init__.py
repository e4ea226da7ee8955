"""Measurements on a GPU, one module for each subject, for ``scripts/gpu_check.py``."""
