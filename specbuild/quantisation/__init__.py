"""Weights in few bits: how they are made, read from checkpoints and put into the graph."""
