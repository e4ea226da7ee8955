"""Files of requests."""
