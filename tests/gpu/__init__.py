"""The path on GPUs, beside the host's."""
