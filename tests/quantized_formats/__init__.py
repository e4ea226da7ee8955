"""Other tools' quantized checkpoints."""
