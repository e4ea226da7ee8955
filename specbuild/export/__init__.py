"""Export transformers models to ONNX: exporter.py is the way in, the rest is what it puts in place."""
