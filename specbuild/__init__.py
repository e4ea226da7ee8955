"""specbuild: Hugging Face checkpoints -> ONNX checkpoints -> engines."""

from __future__ import annotations

from specrun import __version__ as __version__
