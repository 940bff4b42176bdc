"""Triton kernels, each beside the torch form that it is tested against. Nothing here is imported without a card."""

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None  # it comes with torch for CUDA on Linux, not everywhere


def two_powers(count: int, *, least: int = 1, most: int | None = None) -> tuple[int, int]:
    """Two powers of 2 that cover a count: the largest in it, within bounds, and what the rest takes; 0 for none."""
    head = max(least, 1 << (count.bit_length() - 1))
    head = head if most is None else min(head, most)
    return head, max(least, 1 << (count - head - 1).bit_length()) if count > head else 0
