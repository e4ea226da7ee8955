"""Conversations in a terminal and in files."""
