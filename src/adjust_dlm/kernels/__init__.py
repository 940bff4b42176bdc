"""Triton kernels, each beside the torch form that it is tested against. Nothing here is imported without a card."""
