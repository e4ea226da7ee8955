"""The repository's scripts."""
