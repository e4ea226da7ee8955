"""``specbuild quantize``."""
