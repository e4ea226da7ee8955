"""How much a request may ask for: memory is laid out for it before any request comes."""

from __future__ import annotations

MAX_STOP_IDS = 64
"""Stop ids of a request, the model's own included."""
MAX_BIASES = 300
"""Tokens of a ``logit_bias``."""
MAX_LOGPROBS = 20
"""Likeliest tokens whose log-probabilities a request may ask for."""
