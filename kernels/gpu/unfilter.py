"""A PNG's filters undone on the GPU, a diagonal at a time: three kernels, of which the second is the work.

A pixel needs its neighbours to the left, above and above left, so at step `t` row `r` can be at column `t - r`. The
rows are cut into bands, for each of which a program walks one channel: lane `r` holds row `r` of the band, the value
above comes from the lane before it, one step old, and the last lane hands its values on to the next band's program,
which follows a little behind. The first kernel skews the picture, so that what a step reads lies together; the third
sets it upright again.

The programs of one launch wait for each other. A band waits for the band before it only, whose programs the GPU starts
earlier; the most rows that are allowed, 2048, make 192 programs of a single warp, which all run at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.unfilter import AVERAGE, PAETH, SUB, UP

Tensor = torch.Tensor

# Rows of a band: a warp's lanes, so that a value moves from row to row by a shuffle, without shared memory.
ROWS = 32
WARPS = 1
# Steps whose bytes are one word of memory, read a word ahead: about as long as the memory takes to answer.
WORD = 8
BLOCK = 1024
# Set in a half of a word that a band has handed on, above its four bytes.
HANDED = 1 << 32

_AVERAGE, _PAETH, _SUB, _UP = tl.constexpr(AVERAGE), tl.constexpr(PAETH), tl.constexpr(SUB), tl.constexpr(UP)
_HANDED = tl.constexpr(HANDED)


def unfilter(filtered: Tensor, channels: int) -> Tensor:
    """See `kernels.unfilter.unfilter`."""
    assert filtered.is_contiguous()
    height, stride = filtered.shape
    width = (stride - 1) // channels
    bands = triton.cdiv(height, ROWS)
    words = triton.cdiv(width + ROWS - 1, WORD)
    # With room for the word that is read ahead of the last band's end.
    skewed = torch.empty(3 * bands * words + 1, ROWS, dtype=torch.int64, device=filtered.device)
    handed = torch.zeros(3, bands, words, 2, dtype=torch.int64, device=filtered.device)
    out = torch.empty(height, width, 3, dtype=torch.uint8, device=filtered.device)
    planes = skewed.view(torch.uint8)
    tile = BLOCK // (ROWS * WORD)
    _skew[(triton.cdiv(words, tile), bands, 3)](
        *(filtered, planes, height, width, stride, words, channels), ROWS=ROWS, WORD=WORD, BLOCK=BLOCK
    )
    _walk[(3, bands)](*(filtered, skewed, handed, height, stride, words), ROWS=ROWS, WORD=WORD, num_warps=WARPS)
    _straighten[(triton.cdiv(out.numel(), BLOCK),)](
        *(planes, out, out.numel(), width, bands, words), ROWS=ROWS, WORD=WORD, BLOCK=BLOCK
    )
    return out


# Not specialised: pictures come in all sizes, and none shall wait for a compiler.
@triton.jit(do_not_specialize=["height", "width", "stride", "words", "channels"])
def _skew(
    filtered,
    planes,
    height,
    width,
    stride,
    words,
    channels,
    ROWS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`planes[channel, band, t // WORD, lane, t % WORD]` is the byte of the band's row `lane` at column `t - lane`."""
    band, plane = tl.program_id(1), tl.program_id(2)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = at // WORD % ROWS
    row = band * ROWS + lane
    column = at // (WORD * ROWS) * WORD + at % WORD - lane
    inside = (row < height) & (column >= 0) & (column < width)
    # Zeros outside: with them, and nothing but zeros before a row, every filter gives 0 there.
    byte = tl.load(filtered + row * stride + 1 + column * channels + plane, mask=inside, other=0)
    size = words * ROWS * WORD
    bands = tl.num_programs(1)
    tl.store(planes + (plane * bands + band) * size + at, byte, mask=at < size)


@triton.jit(do_not_specialize=["height", "stride", "words"])
def _walk(filtered, skewed, handed, height, stride, words, ROWS: tl.constexpr, WORD: tl.constexpr):
    """Undo the filters of one channel of one band, in place."""
    plane, band = tl.program_id(0), tl.program_id(1)
    bands = tl.num_programs(1)
    lane = tl.arange(0, ROWS)
    row = band * ROWS + lane
    kind = tl.load(filtered + row * stride, mask=row < height, other=0).to(tl.int32)
    # All filters but Paeth's: a part of left and above, halved or not.
    use_left = tl.where((kind == _SUB) | (kind == _AVERAGE), 255, 0)
    use_above = tl.where((kind == _UP) | (kind == _AVERAGE), 255, 0)
    halving = (kind == _AVERAGE).to(tl.int32)
    is_paeth = kind == _PAETH
    first, last = lane == 0, lane == ROWS - 1
    before = tl.maximum(lane - 1, 0)

    mine = (plane * bands + band) * words
    words_here = skewed + mine * ROWS + lane
    handed_here = handed + 2 * mine + lane * 0
    # The last lane of the band above is at this band's column t + 1 in its own step t + ROWS.
    ahead: tl.constexpr = ROWS // WORD
    handed_above = handed + 2 * (mine - words + ahead)
    has_above = band > 0

    entering = _byte(_wait(handed_above - 1, has_above), WORD // 2 - 1)
    x = tl.zeros([ROWS], tl.int32)
    corner = tl.zeros([ROWS], tl.int32)
    word = tl.load(words_here)
    low = _peek(handed_above, has_above & (ahead < words))
    high = _peek(handed_above + 1, has_above & (ahead < words))
    for number in range(words):
        # What the next round needs, now, or every round would wait for the memory: a compiler does not move what is
        # volatile towards its use.
        next_word = tl.load(words_here + (number + 1) * ROWS, volatile=True)
        goes_on = has_above & (number + 1 + ahead < words)
        next_low = _peek(handed_above + 2 * number + 2, goes_on)
        next_high = _peek(handed_above + 2 * number + 3, goes_on)
        while tl.minimum(low, high) < _HANDED:
            low = _peek(handed_above + 2 * number, has_above)
            high = _peek(handed_above + 2 * number + 1, has_above)
        result = tl.zeros([ROWS], tl.int64)
        for step in tl.static_range(WORD):
            above = tl.where(first, entering, tl.gather(x, before, 0))
            # Paeth: which of left, above and corner is nearest to left + above - corner, the first of equals.
            by_left, by_above = above - corner, x - corner
            to_left, to_above, to_corner = tl.abs(by_left), tl.abs(by_above), tl.abs(by_left + by_above)
            nearest = tl.where(to_above <= to_corner, above, corner)
            nearest = tl.where(to_left <= tl.minimum(to_above, to_corner), x, nearest)
            linear = ((x & use_left) + (above & use_above)) >> halving
            x = (_byte(word, step) + tl.where(is_paeth, nearest, linear)) & 255
            corner = above
            result |= x.to(tl.int64) << (8 * step)
            entering = _byte(low, step) if step < WORD // 2 else _byte(high, step - WORD // 2)
        tl.store(words_here + number * ROWS, result)
        # A half carries its bytes and the sign that they are there, so that no order of writes has to be kept.
        tl.atomic_xchg(handed_here + 2 * number, result & (_HANDED - 1) | _HANDED, mask=last, sem="relaxed")
        second = (result >> 32) & (_HANDED - 1) | _HANDED
        tl.atomic_xchg(handed_here + 2 * number + 1, second, mask=last, sem="relaxed")
        word = next_word
        low = next_low
        high = next_high


@triton.jit
def _byte(word, number):
    """One byte of a word of 64 bits, int32."""
    return (word >> (8 * number)).to(tl.int32) & 255


@triton.jit
def _peek(address, there):
    """Half a word of the band above, which it may not have handed on yet; zeros where there is none."""
    return tl.load(address, mask=there, other=_HANDED, volatile=True)


@triton.jit
def _wait(address, there):
    """Half a word of the band above, once it has been handed on; zeros where there is none."""
    half = _peek(address, there)
    while half < _HANDED:
        half = _peek(address, there)
    return half


@triton.jit(do_not_specialize=["count", "width", "bands", "words"])
def _straighten(planes, out, count, width, bands, words, ROWS: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    plane = at % 3
    column = at // 3 % width
    row = at // 3 // width
    lane = row % ROWS
    t = column + lane
    word = ((plane * bands + row // ROWS) * words + t // WORD) * ROWS + lane
    tl.store(out + at, tl.load(planes + word * WORD + t % WORD, mask=inside, other=0), mask=inside)
