"""Fixtures that several packages' tests share."""

from tests.checkpoints import checkpoint, mini_checkpoint, tiny_checkpoint

__all__ = ["checkpoint", "mini_checkpoint", "tiny_checkpoint"]
