"""Ranks on the CPU: processes that compute one model together and talk by MPI.

``backend.py`` is what the rest of specrun sees, in the process that decodes. It starts the ranks (``group.py``), owns
the memory of their caches (``shared_memory.py``) and tells them each pass. ``process.py`` is what a rank runs.
"""
