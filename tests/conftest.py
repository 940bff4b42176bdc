"""One thread per worker, and property tests that are the same on every run."""

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():  # before the first import of triton
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
settings.register_profile(
    "house", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("house")
