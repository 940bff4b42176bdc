"""Two ranks as under torchrun, of which this process is the first: it has imported all that they need."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def first_of_two(*second: str) -> Iterator[None]:
    """Inside, this process is rank 0; rank 1 is a Python with these arguments, and must end with 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in shared.items():
            patch.setenv(name, value)
        env = {**os.environ, "RANK": "1"}
        other = subprocess.Popen([sys.executable, *second], env=env, stderr=subprocess.PIPE, text=True)
        patch.setenv("RANK", "0")
        try:
            yield
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            said = other.communicate(timeout=120)[1]
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            other.kill()
            other.wait()
    assert other.returncode == 0, said
