"""Who runs when."""
