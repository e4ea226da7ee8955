"""A benchmark as one HTML file."""
