"""ONNX to a plan of TensorRT or TensorRT-RTX."""
