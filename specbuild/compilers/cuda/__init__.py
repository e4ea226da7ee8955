"""ONNX to an engine of ONNX Runtime for CUDA."""
