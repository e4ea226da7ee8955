"""``specbuild convert``."""
