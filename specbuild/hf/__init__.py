"""What a Hugging Face checkpoint is: where it comes from, what it holds, and what cannot be converted."""
