"""What specbuild writes, and how it is known again."""
