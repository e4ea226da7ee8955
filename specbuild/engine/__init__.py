"""The stages of ``specbuild engine``."""
