"""Cache memory."""
