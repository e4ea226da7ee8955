"""Our calls of TensorRT, checked against the signatures of its real Python bindings.

- ``installed`` fetches bindings from PyPI and lets them import without TensorRT and without a GPU.
- ``builds`` names them; ``describe`` writes down what a build of the bindings offers; ``api`` reads that.
- ``definitions``, ``values``, ``calls``, ``expressions`` and ``program`` find out from our source which objects are
  TensorRT's.
- ``uses`` checks what our source does with them.
"""
