"""A model of specrun for Triton's Python backend. ``specrun triton_repository`` puts this file into repositories.

It needs specrun in the environment of the server's Python: pip install '.[run]' in a clone. The engines lie beside
it, and ``config.pbtxt`` has the settings.
"""

from specrun.triton.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
