"""Calibrates and rounds weights and activations."""
