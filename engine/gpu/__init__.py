"""How a request runs on a GPU: fixed buffers, captured graphs, kept image states. Read `runner` first.

What is computed is `engine.model`'s; here is only when, into which memory, and what is not computed twice.
"""

from engine.gpu.runner import DEFAULT_IMAGE_CACHE_BYTES, GpuRunner

__all__ = ["DEFAULT_IMAGE_CACHE_BYTES", "GpuRunner"]
