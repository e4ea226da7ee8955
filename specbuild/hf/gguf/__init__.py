"""GGUF files as Hugging Face checkpoints: configuration, tokenizer and names of tensors."""
