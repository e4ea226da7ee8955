"""Distributions, random numbers and acceptance."""
