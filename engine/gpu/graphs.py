"""Captured CUDA graphs: what may be replayed instead of launched, bounded in number and bytes.

A piece of work is named by a key and is a function of nothing: its inputs lie in fixed buffers, and so does its output.
Work that has no graph yet runs as it is and is remembered, to be captured when there is time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

MAX_GRAPHS = 160
MAX_GRAPH_BYTES = 3 << 30

Work = Callable[[], None]


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    size_bytes: int


class Graphs:
    """The graphs of one device. They share one memory pool, since only one of them ever runs at a time."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.enabled = enabled
        self.failures = 0
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._captured: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._pending: OrderedDict[Hashable, Work] = OrderedDict()
        self._refused: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def size_bytes(self) -> int:
        """Device memory that the captures took."""
        return sum(captured.size_bytes for captured in self._captured.values())

    @property
    def pending(self) -> int:
        """How many pieces of work wait to be captured."""
        return len(self._pending)

    def run(self, key: Hashable, work: Work) -> None:
        """Replay the key's graph; without one, do the work and note that it may be captured."""
        captured = self._captured.get(key)
        if captured is None:
            work()
            if self.enabled and key not in self._refused:
                self._pending[key] = work
            return
        self._captured.move_to_end(key)
        captured.graph.replay()

    def capture_pending(self, most: int | None = None) -> int:
        """Capture what has run and has no graph yet, at most so many; returns how many were captured."""
        done = 0
        while self._pending and (most is None or done < most):
            key, work = self._pending.popitem(last=False)
            done += self._capture(key, work)
        return done

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self._captured.clear()
        self._pending.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _capture(self, key: Hashable, work: Work) -> bool:
        """Whether it came to a graph. A failure is logged and counted, and the work keeps running as it is."""
        before_bytes = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                work()
        except Exception as error:
            self.failures += 1
            self._refused.add(key)
            logger.warning("no CUDA graph for %s, it runs without: %s: %s", key, type(error).__name__, error)
            return False
        self._captured[key] = _Captured(graph, max(0, torch.cuda.memory_reserved(self._device) - before_bytes))
        while len(self._captured) > MAX_GRAPHS or (self.size_bytes > MAX_GRAPH_BYTES and len(self._captured) > 1):
            self._captured.popitem(last=False)
        return True
