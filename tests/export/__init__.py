"""torch to ONNX."""
