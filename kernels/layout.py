"""A pass's packing as tables on the device, where kernels read it: `Segments` without a length in any launch.

A layout has a capacity in rows; a pass of fewer rows leaves the last ones as padding, which belongs to no sequence. So
one captured graph serves every packing that fits, and no kernel's grid depends on a question's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

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
    def empty(cls, rows: int, device: torch.device | str) -> Layout:
        """A layout of a capacity, to be filled."""
        sequences = 1 + MAX_SUFFIXES
        shapes = {
            "counts": (2,),
            "row_start": (rows,),
            "read_rows": (MAX_SUFFIXES,),
            "chunks": (rows // CHUNK_TOKENS + sequences, 2),
            "sequences": (sequences, 2),
            "tiles": (rows // TILE_TOKENS + sequences, 4),
            "read_tiles": (MAX_SUFFIXES, 4),
        }
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        table = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        parts = torch.split(table, sizes)
        views = {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}
        return cls(rows=rows, table=table, **views)

    @classmethod
    def build(cls, segments: Segments, past_tokens: int, rows: int | None = None) -> Layout:
        """The layout of a pass, on the CPU.

        Args:
            segments: the pass; at most `MAX_SUFFIXES` suffixes.
            past_tokens: tokens of the state that the pass continues from.
            rows: the capacity; by default exactly the pass's rows.
        """
        rows = segments.tokens if rows is None else rows
        suffixes = segments.suffixes
        assert segments.tokens <= rows and len(suffixes) <= MAX_SUFFIXES, (segments, rows)
        layout = cls.empty(rows, "cpu")
        layout.counts[:] = torch.tensor([past_tokens, segments.prefix_tokens])
        starts = torch.arange(rows)  # a row of padding is a sequence of its own
        for rows_of in (segments.prefix, *suffixes):
            starts[rows_of] = rows_of.start
        layout.row_start[:] = starts
        read_rows = list(segments.last_rows)
        _fill(layout.read_rows, read_rows)
        own = [-1, *(suffix.start for suffix in suffixes)]
        spans = [segments.prefix, *suffixes]
        chunks = [_cut(span, CHUNK_TOKENS) for span in spans]
        counts = [len(part) for part in chunks]
        firsts = [sum(counts[:number]) for number in range(len(counts))]
        _fill(layout.sequences, list(zip(firsts, counts, strict=True)))
        _fill(layout.chunks, list(chain.from_iterable(chunks)))
        tiles = [
            (start, end, 0, begin)
            for span, begin in zip(spans, own, strict=True)
            for start, end in _cut(span, TILE_TOKENS)
        ]
        # The last tiles see the most keys; they start first.
        _fill(layout.tiles, tiles[::-1])
        _fill(
            layout.read_tiles,
            [(place, place + 1, row - place, own[1 + place]) for place, row in enumerate(read_rows)],
        )
        return layout

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


def _fill(target: Tensor, entries: Sequence[object]) -> None:
    if entries:
        target[: len(entries)] = torch.tensor(entries, dtype=torch.int32)


def _cut(span: slice, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, span.stop)) for start in range(span.start, span.stop, step)]
