"""ONNX checkpoint to an engine that ONNX Runtime runs on CUDA."""
