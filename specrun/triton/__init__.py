"""Triton Inference Server: a model repository, and the Python model in it. ``backend`` runs inside Triton alone."""
