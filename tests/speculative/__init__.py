"""Draft, verify, accept."""
