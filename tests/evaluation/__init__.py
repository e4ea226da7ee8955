"""``specrun bench`` and ``specrun verify``."""
