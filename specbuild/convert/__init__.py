"""The stages of ``specbuild convert``."""
