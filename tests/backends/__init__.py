"""What runs an engine."""
