"""What is written, and how it is known again."""
