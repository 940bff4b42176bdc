"""Triton kernels, each beside the torch form that it is tested against. Nothing here is imported without a card."""

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None  # it comes with torch for CUDA on Linux, not everywhere
