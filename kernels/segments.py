"""How the token rows of one pass are packed: a shared prefix, then every question's suffix, one after another.

Linear layers need not know; the convolution, the delta rule and attention do, because each suffix continues from the
prefix's end and never sees the other suffixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Segments:
    """The packing of a pass's rows.

    `prefix_tokens` may be 0, when all that is shared comes as an initial state. `suffix_tokens` holds each suffix's
    length; it may be empty, when only the state at the prefix's end is wanted.
    """

    prefix_tokens: int
    suffix_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.prefix_tokens >= 0, f"a prefix of {self.prefix_tokens} tokens"
        assert all(tokens > 0 for tokens in self.suffix_tokens), f"suffixes of {self.suffix_tokens} tokens"
        assert self.tokens > 0, "a pass needs at least one token"

    @property
    def tokens(self) -> int:
        """T, the rows of the whole pass."""
        return self.prefix_tokens + sum(self.suffix_tokens)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each suffix begins, and the pass's end: one more than there are suffixes."""
        return tuple(accumulate(self.suffix_tokens, initial=self.prefix_tokens))

    @property
    def prefix(self) -> slice:
        """The prefix's rows."""
        return slice(0, self.prefix_tokens)

    @property
    def suffixes(self) -> Sequence[slice]:
        """Each suffix's rows."""
        return [slice(start, end) for start, end in pairwise(self.offsets)]

    @property
    def last_rows(self) -> tuple[int, ...]:
        """The row of each suffix's last token: the only rows that are read out."""
        return tuple(end - 1 for end in self.offsets[1:])
