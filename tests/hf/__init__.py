"""What a Hugging Face checkpoint is."""
