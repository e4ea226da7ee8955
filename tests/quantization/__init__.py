"""Calibration and rounding."""
