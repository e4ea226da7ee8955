"""Logits to a token: parameters, distributions, penalties and acceptance."""
