"""Fixtures that several packages' tests share."""

import os

# Before torch is loaded, here and in every process a test starts: tests run side by side, and OpenMP's threads of one
# would spin while they wait for the cores that the others' have.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import os

# Before anything imports Triton: the GPU kernels' tests run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.checkpoints import checkpoint, mini_checkpoint, tiny_checkpoint
from tests.servers import any_place, own_server, place, redis_url, valkey_url

__all__ = [
    "any_place",
    "checkpoint",
    "mini_checkpoint",
    "own_server",
    "place",
    "redis_url",
    "tiny_checkpoint",
    "valkey_url",
]
