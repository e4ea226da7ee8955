"""ONNX to a backend's engine."""
