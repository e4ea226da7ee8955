"""Our calls of TensorRT, checked by mypy against stubs of its real Python bindings.

- ``installed`` fetches bindings from PyPI and lets them import without TensorRT and without a GPU.
- ``stubs`` makes a stub of each build, and lets mypy read copies of our source with it.
"""
