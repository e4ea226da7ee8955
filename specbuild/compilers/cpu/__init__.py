"""ONNX to an engine of ONNX Runtime for the CPU, with specrun's own operators."""
