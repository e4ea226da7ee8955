"""Speed and exactness of a pair: ``specrun bench`` and ``specrun verify``."""
