"""The stages of ``specbuild quantize``."""
