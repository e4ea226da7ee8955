"""ONNX to ONNX: one module for each change of a graph."""
