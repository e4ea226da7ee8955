"""ONNX to ONNX."""
