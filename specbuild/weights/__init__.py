"""Tensors, read a part at a time: files of safetensors, quantized weights, and where each weight comes from."""
