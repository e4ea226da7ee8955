"""Simulated NVIDIA GPUs: CUDA's driver, kernels and TensorRT's runtime, for machines that have none.

``driver/`` is a ``libcuda.so.1``: NVIDIA's own cuda-python and NVRTC run on it. ``ptx.py`` makes C++ of the kernels
that NVRTC compiled. ``tensorrt.py`` stands in for the package tensorrt. All of them hold the code that they run to
the rules of CUDA and TensorRT, and remember what broke one. A process that has started them has GPUs until it ends,
so these tests run in a process of their own: ``scripts/test tests/gpu_simulator``.
"""
