"""GPU and CPU primitives."""
