"""specbuild: Hugging Face checkpoints -> ONNX checkpoints -> engines."""
