"""A pass's packing as tables on the device, where kernels read it: `Segments` without a length in any launch.

A layout has a capacity in rows; a pass of fewer rows leaves the last ones as padding, which belongs to no sequence. So
one captured graph serves every packing that fits, and no kernel's grid depends on a question's length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from kernels.segments import Segments

Tensor = torch.Tensor

# The most suffixes of a pass. Their last rows are always read as this many, so that their products have one shape.
MAX_SUFFIXES = 8
# Tokens that one program of the chunked delta rule, and one of attention, works on.
CHUNK_TOKENS = 64
TILE_TOKENS = 128


@dataclass(frozen=True)
class Layout:
    """The tables of a pass, all int32 views of `table`, so that one copy refills them.

    `counts` is (past tokens, prefix tokens). `row_start` `[rows]` holds the first row of each row's own sequence.
    `read_rows` `[MAX_SUFFIXES]` are the rows that are read out; unused ones repeat row 0. `chunks` `[*, 2]` are rows
    from and to; `sequences` `[1 + MAX_SUFFIXES, 2]` each sequence's first chunk and number of chunks, the prefix first.
    `tiles` `[*, 4]` are queries from and to, what leads from a query to its row, and the row where its own keys begin,
    -1 in the prefix; `read_tiles` `[MAX_SUFFIXES, 4]` are those of the rows that are read out. Unused ones are empty.
    """

    rows: int
    table: Tensor
    counts: Tensor
    row_start: Tensor
    read_rows: Tensor
    chunks: Tensor
    sequences: Tensor
    tiles: Tensor
    read_tiles: Tensor

    @classmethod
    def over(cls, rows: int, table: Tensor) -> Layout:
        """The tables of a capacity in given memory, `[Layout.size(rows)]` int32, as it is."""
        shapes = _shapes(rows)
        parts = torch.split(table, [_room(shape) for shape in shapes.values()])
        places = zip(shapes.items(), parts, strict=True)
        views = {name: part[: math.prod(shape)].view(shape) for (name, shape), part in places}
        return cls(rows=rows, table=table, **views)

    @staticmethod
    def size(rows: int) -> int:
        """How many numbers the tables of a capacity have."""
        return sum(map(_room, _shapes(rows).values()))

    @classmethod
    def empty(cls, rows: int, device: torch.device | str) -> Layout:
        """A layout of a capacity, to be filled."""
        return cls.over(rows, torch.zeros(cls.size(rows), dtype=torch.int32, device=device))

    @classmethod
    def build(cls, segments: Segments, past_tokens: int, rows: int | None = None) -> Layout:
        """The layout of a pass, on the CPU: `fill` says the rest.

        Args:
            segments, past_tokens: as in `fill`.
            rows: the capacity; by default exactly the pass's rows.
        """
        layout = cls.empty(segments.tokens if rows is None else rows, "cpu")
        layout.fill(segments, past_tokens)
        return layout

    def fill(self, segments: Segments, past_tokens: int) -> None:
        """Write all tables of a pass, on the CPU.

        Args:
            segments: the pass; at most `MAX_SUFFIXES` suffixes.
            past_tokens: tokens of the state that the pass continues from.
        """
        spans = [segments.prefix, *segments.suffixes]
        own = [-1, *(suffix.start for suffix in segments.suffixes)]
        assert segments.tokens <= self.rows and len(spans) <= 1 + MAX_SUFFIXES, (segments, self.rows)
        read_rows = segments.last_rows
        chunks = [_cut(span, CHUNK_TOKENS) for span in spans]
        counts = [len(part) for part in chunks]
        firsts = accumulate(counts, initial=0)
        tiles = [
            (start, end, 0, begin)
            for span, begin in zip(spans, own, strict=True)
            for start, end in _cut(span, TILE_TOKENS)
        ]
        read_tiles = [(place, place + 1, row - place, own[1 + place]) for place, row in enumerate(read_rows)]
        entries: dict[str, Sequence[int]] = {
            "counts": (past_tokens, segments.prefix_tokens),
            "read_rows": read_rows,
            "sequences": _flat(zip(firsts, counts, strict=False)),
            "read_tiles": _flat(read_tiles),
            "chunks": _flat(chain.from_iterable(chunks)),
            # The last tiles see the most keys; they start first.
            "tiles": _flat(reversed(tiles)),
        }
        # All but the rows' own table in one copy: a tensor a table would take longer than everything else here.
        numbers: list[int] = []
        for name, shape in _shapes(self.rows).items():
            if name in entries:
                numbers += entries[name]
                numbers += [0] * (_room(shape) - len(entries[name]))
        self.table[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
        torch.arange(self.rows, out=self.row_start)  # a row of padding is a sequence of its own
        for span in spans:
            self.row_start[span] = span.start

    def to(self, device: torch.device | str) -> Layout:
        """The same tables on a device."""
        copy = Layout.empty(self.rows, device)
        copy.table.copy_(self.table)
        return copy


@dataclass(frozen=True)
class PlacedSegments(Segments):
    """Segments with their tables on a GPU, where only these count.

    In a captured graph the lengths are those of the capture, and of them only whether there is a prefix is used.
    """

    layout: Layout

    @property
    def tokens(self) -> int:
        """T, the rows of the whole pass, padding included."""
        return self.layout.rows


def layout_of(segments: Segments) -> Layout:
    """The tables of segments that were placed on a GPU."""
    assert isinstance(segments, PlacedSegments), "on a GPU a pass needs `PlacedSegments`"
    return segments.layout


def last_rows(x: Tensor, segments: Segments) -> Tensor:
    """The rows of `x` `[T, ...]` that are read out: `[K, ...]`, on a GPU always `MAX_SUFFIXES` of them."""
    if x.is_cuda:
        return x.index_select(0, layout_of(segments).read_rows)
    return x[list(segments.last_rows)]


def _shapes(rows: int) -> dict[str, tuple[int, ...]]:
    """Of each table in `Layout.table`, in their order there."""
    sequences = 1 + MAX_SUFFIXES
    return {
        "counts": (2,),
        "read_rows": (MAX_SUFFIXES,),
        "sequences": (sequences, 2),
        "read_tiles": (MAX_SUFFIXES, 4),
        "chunks": (rows // CHUNK_TOKENS + sequences, 2),
        "tiles": (rows // TILE_TOKENS + sequences, 4),
        "row_start": (rows,),
    }


def _room(shape: tuple[int, ...]) -> int:
    """A table's numbers and what is left free behind them: every table begins at a multiple of 16 bytes, so that a
    kernel is compiled for one alignment."""
    return -(-math.prod(shape) // 4) * 4


def _flat(entries: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(entries))


def _cut(span: slice, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, span.stop)) for start in range(span.start, span.stop, step)]
