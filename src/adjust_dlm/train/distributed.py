"""The few collective operations that training and evaluation need; all of them do nothing on a single process."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adjust_dlm.types import require


def start() -> tuple[int, int, torch.device]:
    """(rank, world size, device) under torchrun or alone; NCCL on GPUs, gloo on CPUs."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1 and not dist.is_initialized():
        # Ranks wait while others sample a corpus or cluster features: minutes, not the default ten.
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=2))
        if device.type == "cpu":  # gloo's threads: what they ask of the interpreter after its end can abort it
            atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    return rank, world, device


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Replaces every gradient by its sum over ranks, in one flat all-reduce."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if dist.is_initialized() and grads:
        flat = total(torch.cat([g.flatten() for g in grads]))
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def total(values: Tensor) -> Tensor:
    """Sum of a tensor over ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def barrier() -> None:
    """Waits for every rank."""
    if dist.is_initialized():
        dist.barrier()


def from_all_ranks(items: list[Any]) -> list[Any]:
    """The items of every rank, on every rank."""
    if not dist.is_initialized():
        return items
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def require_same(name: str, value: Any) -> None:
    """Raises InputError unless every rank holds the same value, which it read from disk."""
    values = from_all_ranks([value])
    require(
        all(other == values[0] for other in values),
        f"{name} differs between ranks: {', '.join(map(str, values))}; all machines must see the same folders",
    )
