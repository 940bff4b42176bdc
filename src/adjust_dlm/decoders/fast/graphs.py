"""CUDA graphs of functions that read and write fixed buffers."""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
MOST_GRAPHS = 512  # captured functions kept; the one not used for longest goes first


class Graphs:
    """Runs functions: each is captured when its key is first seen, and replayed from then on.

    All graphs share one memory pool, since they never run at the same time and leave nothing in it: what has to last
    lies in buffers of their callers. On the CPU, and once a capture has failed, functions are simply called.

    Attributes:
        captures: how many functions were captured so far.
        reserved: bytes that the process has more from the card's memory than before these captures.
        works: whether functions are captured: on CUDA, until one of them cannot be.
    """

    def __init__(self, device: torch.device) -> None:
        self.captures = self.reserved = 0
        self._device, self.works = device, device.type == "cuda"
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        if self.works:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def run(self, key: Hashable, function: Callable[[], None], buffers: Callable[[], list[Tensor]]) -> None:
        """Runs the function, or its graph.

        Args:
            key: what the function does; a function with the same key does the same to the same buffers.
            function: free of host synchronisation; a first run does it several times.
            buffers: all that it writes and that must look as if it had run once.
        """
        if not self.works:
            function()
            return
        if key not in self._graphs:
            graph = self._capture(key, function, buffers())
            if graph is None:
                function()
                return
            self._graphs[key] = graph
            self._evict()
        self._graphs.move_to_end(key)
        self._graphs[key].replay()

    def items(self) -> list[tuple[Any, Any]]:
        """Keys and graphs, the one not used for longest first."""
        return list(self._graphs.items())

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Forgets the graphs whose keys are unwanted."""
        for key in [key for key in self._graphs if unwanted(key)]:
            del self._graphs[key]
        if self.works and not self._graphs:  # torch refuses captures in a pool whose graphs are all gone
            self._pool = torch.cuda.graph_pool_handle()

    def _evict(self) -> None:
        while len(self._graphs) > MOST_GRAPHS:
            key, _ = self._graphs.popitem(last=False)
            logger.info("dropped the captured %s: %d graphs are kept at most", key, MOST_GRAPHS)

    def _capture(self, key: Hashable, function: Callable[[], None], buffers: list[Tensor]) -> Any:
        """A graph of the function; None, and never another try, where it cannot be captured.

        Raises:
            RuntimeError: what the function itself raises, or no memory is left.
        """
        before_bytes = torch.cuda.memory_reserved(self._device)
        saved = [buffer.clone() for buffer in buffers]
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            function()  # loads and compiles kernels, makes workspaces: none of that can be captured
            for buffer, before in zip(buffers, saved, strict=True):
                buffer.copy_(before)
            self._stream.synchronize()
        del saved
        self._make_room()
        collects = gc.isenabled()
        gc.disable()  # a graph that is collected during a capture spoils it
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    function()  # is recorded: nothing runs, no buffer changes
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            if torch.OutOfMemoryError in (type(error), type(error.__context__)):
                raise  # without graphs it would not fit either
            self.works = False
            torch.cuda.synchronize(self._device)
            reason = " ".join(str(error).split())[:200]
            logger.warning("CUDA graphs are off for this base: %s cannot be captured (%s)", key, reason)
            return None
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self.captures += 1
        self.reserved += max(0, torch.cuda.memory_reserved(self._device) - before_bytes)
        logger.debug("captured %s, number %d", key, self.captures)
        return graph

    def _make_room(self) -> None:
        """Memory that is cached cannot be given back during a capture: a large part of what is left goes back now."""
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        if cached > torch.cuda.mem_get_info(self._device)[0]:
            torch.cuda.empty_cache()
