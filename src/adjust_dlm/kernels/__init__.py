"""Triton kernels. Each has a plain form elsewhere that its tests compare it with."""
