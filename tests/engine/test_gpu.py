"""What of the GPU's running can be seen without one: the cache's bound, a request's passes, what a pass is given."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from engine.gpu.cache import ByteBoundCache
from engine.gpu.runner import MAX_ROWS, ROWS_STEP, request_passes
from engine.prepared import Prepared
from kernels.layout import MAX_SUFFIXES, Layout
from kernels.segments import Segments

HEAD = 3


@dataclass(frozen=True)
class Item:
    size_bytes: int


def keep(cache: ByteBoundCache[Item], key: bytes, size_bytes: int) -> bool:
    fits = cache.make_room(size_bytes)
    if fits:
        cache.put(key, Item(size_bytes))
    return fits


def test_the_least_recently_used_goes_first() -> None:
    cache: ByteBoundCache[Item] = ByteBoundCache(10)
    assert keep(cache, b"a", 4) and keep(cache, b"b", 4)
    assert cache.get(b"a") == Item(4)
    assert keep(cache, b"c", 4)
    assert cache.get(b"b") is None and cache.get(b"a") == Item(4) and cache.get(b"c") == Item(4)
    assert (cache.size_bytes, cache.hits, cache.misses) == (8, 3, 1)


def test_what_is_larger_than_the_bound_drops_nothing() -> None:
    cache: ByteBoundCache[Item] = ByteBoundCache(10)
    assert keep(cache, b"a", 10)
    assert not keep(cache, b"b", 11)
    assert len(cache) == 1 and cache.size_bytes == 10


def test_a_key_again_replaces_its_item() -> None:
    cache: ByteBoundCache[Item] = ByteBoundCache(10)
    assert keep(cache, b"a", 4)
    cache.put(b"a", Item(6))
    assert (len(cache), cache.size_bytes) == (1, 6)
    cache.clear()
    assert (len(cache), cache.size_bytes) == (0, 0)


def test_a_bound_of_zero_keeps_nothing() -> None:
    assert not keep(ByteBoundCache(0), b"a", 1)


def prepared(image_tokens: int, tails: tuple[int, ...]) -> Prepared:
    prefix = HEAD + image_tokens
    total = prefix + sum(tails)
    return Prepared(
        image_key=b"image",
        picture=torch.zeros(32, 32, 3, dtype=torch.uint8),
        grid=(1, 2, 2),
        ids=torch.arange(total),
        positions=torch.arange(total).expand(3, -1) + torch.tensor([[0], [1000], [2000]]),
        image_tokens=torch.where(torch.arange(total) < prefix, torch.arange(total) - HEAD, -1).clamp(min=-1),
        segments=Segments(prefix, tails),
        options=tuple(range(2, 2 + len(tails))),
        head_tokens=HEAD,
        input_tokens=total,
        prepare_ms=1.0,
    )


def test_a_pass_holds_the_image_and_every_question() -> None:
    ((inputs, segments),) = request_passes(prepared(5, (4, 2)), with_prefix=True)
    assert segments == Segments(5, (4, 2)) and inputs.rows == ROWS_STEP
    assert inputs.ids[:11].tolist() == list(range(3, 14))
    assert inputs.image_tokens[:11].tolist() == [0, 1, 2, 3, 4, *[-1] * 6]
    assert inputs.positions[2, :11].tolist() == list(range(2003, 2014))
    assert inputs.layout.counts.tolist() == [HEAD, 5]
    assert inputs.layout.read_rows[:2].tolist() == [8, 10]
    assert inputs.options.tolist() == [2, 3, *[1] * (MAX_SUFFIXES - 2)]
    assert inputs.image_tokens[11:].eq(-1).all() and inputs.layout.row_start[11:].tolist() == list(range(11, 64))


def test_from_a_kept_image_only_the_questions_run() -> None:
    ((inputs, segments),) = request_passes(prepared(5, (4, 2)), with_prefix=False)
    assert segments == Segments(0, (4, 2))
    assert inputs.ids[:6].tolist() == list(range(8, 14))
    assert inputs.layout.counts.tolist() == [HEAD + 5, 0]


@pytest.mark.parametrize("with_prefix", [True, False])
def test_what_does_not_fit_runs_in_later_passes(with_prefix: bool) -> None:
    tails = (3000, 1500, 3000, 500)
    passes = request_passes(prepared(900, tails), with_prefix)
    assert [segments.suffix_tokens for _, segments in passes] == [(3000,), (1500,), (3000, 500)]
    assert [segments.prefix_tokens for _, segments in passes] == [900 * with_prefix, 0, 0]
    assert all(inputs.rows <= MAX_ROWS and inputs.rows % ROWS_STEP == 0 for inputs, _ in passes)
    assert [inputs.layout.counts.tolist()[0] for inputs, _ in passes] == [3 if with_prefix else 903, 903, 903]
    starts = [0, 3000, 4500, 7500]
    assert passes[2][0].ids[[0, 3000]].tolist() == [903 + starts[2], 903 + starts[3]]
    assert passes[2][0].options[:2].tolist() == [4, 5]


@pytest.mark.parametrize("rows", [64, 192, 2048])
def test_a_layout_over_used_memory_is_as_a_new_one(rows: int) -> None:
    used = torch.full((Layout.size(rows),), -7, dtype=torch.int32)
    layout = Layout.over(rows, used)
    layout.fill(Segments(30, (20, 1)), 5)
    new = Layout.build(Segments(30, (20, 1)), 5, rows)
    names = ("counts", "row_start", "read_rows", "chunks", "sequences", "tiles", "read_tiles")
    assert all(torch.equal(getattr(layout, name), getattr(new, name)) for name in names)
    # A kernel is compiled once for addresses that are multiples of 16 bytes, and once more for others.
    assert all(getattr(layout, name).storage_offset() % 4 == 0 for name in names)
