"""Draft, verify, accept. ``loop`` is the algorithm, top down."""
