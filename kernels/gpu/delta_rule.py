"""The chunked gated delta rule on the GPU, in float32.

Three kernels: the inverse of a chunk's triangular system, by substitution in blocks so that no power of it is formed
(screens repeat themselves: keys are often equal, and powers would overflow where substitution does not); the scan,
which alone goes from chunk to chunk, over the prefix first and then over all suffixes beside each other from its end;
and the outputs, each chunk for itself.

Queries, keys and values are BF16 numbers; lengths, decays and strengths are factors of rows, and are kept out of the
products. So a product of two of them is exact in one BF16 product, one of them times a float32 in three (its high,
middle and low eight bits), and only float32 times float32 takes six. All are summed in float32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.split import three_parts
from kernels.layout import CHUNK_TOKENS, MAX_SUFFIXES, Layout
from kernels.norms import L2_NORM_EPS

Tensor = torch.Tensor

# Columns of the memory that one program of the scan carries, and of the outputs that one program computes.
SCAN_COLUMNS = 32
OUTPUT_COLUMNS = 64
WARPS = 4
# Chunks that the scan has in flight: over the prefix one program has a processor to itself, suffixes share it.
PREFIX_STAGES, SUFFIX_STAGES = 3, 2
# What a chunk and value head keep of its tokens, so many rows of float32: the strength, what scales the row that a key
# reads from the memory, what scales the row that it writes, the decay since the chunk's start (its logarithm), one over
# the key's length; and in the first place of the last row the whole chunk's decay.
FACTORS = 6

_FACTORS = tl.constexpr(FACTORS)


def decay_and_strength(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.delta_rule.decay_and_strength`."""
    tokens, heads = a.shape
    assert a.stride(1) == b.stride(1) == 1 and a.stride(0) == b.stride(0)
    g = torch.empty(tokens, heads, dtype=torch.float32, device=a.device)
    beta = torch.empty(tokens, heads, dtype=b.dtype, device=a.device)
    tiles = {"TOKENS": 16, "HEADS": triton.next_power_of_2(heads)}
    _decay[(triton.cdiv(tokens, 16),)](a, b, a_log, dt_bias, g, beta, tokens, heads, a.stride(0), **tiles)
    return g, beta


@triton.jit
def _decay(a, b, a_log, dt_bias, g, beta, tokens, heads, stride, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    head = tl.arange(0, HEADS)[None, :]
    inside = (token < tokens) & (head < heads)
    source = token.to(tl.int64) * stride + head
    target = token * heads + head
    rate = tl.exp(tl.load(a_log + head, mask=head < heads, other=0.0).to(tl.float32))
    x = tl.load(a + source, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=head < heads, other=0.0).to(tl.float32)
    # softplus(x) = max(x, 0) + log(1 + exp(-|x|)); where the exponential is far under one, log(1 + e) is e.
    e = tl.exp(-tl.abs(x))
    softplus = tl.maximum(x, 0.0) + tl.where(e < 1e-4, e, tl.log(1.0 + e))
    tl.store(g + target, -rate * softplus, mask=inside)
    strength = 1.0 / (1.0 + tl.exp(-tl.load(b + source, mask=inside, other=0.0).to(tl.float32)))
    tl.store(beta + target, strength.to(beta.dtype.element_ty), mask=inside)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, layout: Layout, prefix: bool
) -> Tensor:
    """See `kernels.delta_rule.gated_delta_rule`; returns the output only.

    Args:
        state: `[V, key_dim, value_dim]`, float32; overwritten with the memory at the prefix's end.
        layout: the pass.
        prefix: whether the pass has a prefix; without one, `state` is left alone.
    """
    tokens, key_heads, key_dim = k.shape
    heads, value_dim = v.shape[1:]
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, state)) and layout.rows == tokens
    assert q.dtype == k.dtype == v.dtype
    assert state.shape == (heads, key_dim, value_dim) and key_dim % 16 == 0 and value_dim % 16 == 0
    chunks = layout.chunks.shape[0]
    exact = v.dtype == torch.bfloat16
    parts, part = (3, torch.bfloat16) if exact else (1, torch.float32)
    factors = g.new_empty(chunks, heads, FACTORS, CHUNK_TOKENS)
    systems = g.new_empty(chunks, heads, CHUNK_TOKENS, CHUNK_TOKENS)
    inverses = torch.empty(chunks, heads, parts, CHUNK_TOKENS, CHUNK_TOKENS, dtype=part, device=g.device)
    writes = g.new_empty(chunks, heads, CHUNK_TOKENS, value_dim)
    memories = g.new_empty(chunks, heads, key_dim, value_dim)
    assert memories.numel() < 1 << 31, "the kernels count in int32"
    out = torch.empty_like(v)
    sizes = {"KEYS": key_heads, "HEADS": heads, "D": key_dim, "C": CHUNK_TOKENS, "PARTS": parts}
    _solve[(chunks, heads)](
        k,
        g,
        beta,
        layout.chunks,
        factors,
        systems,
        inverses,
        L2_NORM_EPS,
        **sizes,
        num_warps=WARPS,
        num_stages=1,
    )
    columns = min(SCAN_COLUMNS, value_dim)
    scans = ((0, 1, PREFIX_STAGES), (1, MAX_SUFFIXES, SUFFIX_STAGES))
    for first, sequences, stages in scans[0 if prefix else 1 :]:
        _scan[(value_dim // columns, heads, sequences)](
            k,
            v,
            layout.chunks,
            layout.sequences,
            factors,
            inverses,
            writes,
            memories,
            state,
            first,
            **sizes,
            E=value_dim,
            COLUMNS=columns,
            KEEP=first == 0,
            STAGES=stages,
            num_warps=WARPS,
        )
    columns = min(OUTPUT_COLUMNS, value_dim)
    _output[(value_dim // columns, chunks, heads)](
        q,
        k,
        layout.chunks,
        factors,
        writes,
        memories,
        out,
        key_dim**-0.5,
        L2_NORM_EPS,
        **sizes,
        E=value_dim,
        COLUMNS=columns,
        num_warps=WARPS,
        num_stages=1,
    )
    return out


@triton.jit
def _exact_times_wide(a, b, PARTS: tl.constexpr):
    """`a b` of `a` in the model dtype and float32 `b`."""
    if PARTS == 1:
        product = tl.dot(a, b, input_precision="ieee")
    else:
        high, middle, low = three_parts(b)
        product = tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low)))
    return product


@triton.jit
def _wide_times_wide(a, b, PARTS: tl.constexpr):
    """`a b` of float32 numbers; the least of six BF16 products come first."""
    if PARTS == 1:
        product = tl.dot(a, b, input_precision="ieee")
    else:
        high, middle, low = three_parts(a)
        b_high, b_middle, b_low = three_parts(b)
        product = tl.dot(high, b_low, tl.dot(middle, b_middle, tl.dot(low, b_high)))
        product = tl.dot(high, b_high, tl.dot(high, b_middle, tl.dot(middle, b_high, product)))
    return product


@triton.jit
def _kept_times_wide(kept, b, C: tl.constexpr, PARTS: tl.constexpr):
    """`a b` of the square `a` that `_keep` wrote and float32 `b`; the least of six BF16 products come first."""
    if PARTS == 1:
        product = tl.dot(tl.load(kept), b, input_precision="ieee")
    else:
        a_high, a_middle, a_low = tl.load(kept), tl.load(kept + C * C), tl.load(kept + 2 * C * C)
        high, middle, low = three_parts(b)
        product = tl.dot(a_low, high, tl.dot(a_middle, middle, tl.dot(a_high, low)))
        product = tl.dot(a_high, high, tl.dot(a_middle, high, tl.dot(a_high, middle, product)))
    return product


@triton.jit
def _keep(kept, x, C: tl.constexpr, PARTS: tl.constexpr):
    """Write a float32 square, in parts."""
    if PARTS == 1:
        tl.store(kept, x)
    else:
        high, middle, low = three_parts(x)
        tl.store(kept, high)
        tl.store(kept + C * C, middle)
        tl.store(kept + 2 * C * C, low)


@triton.jit
def _length(x, eps):
    """One over the length of each row."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + eps)


@triton.jit
def _invert_blocks(square, C: tl.constexpr):
    """In place, the inverses of `I + A` for the diagonal 16 x 16 blocks of `square` `[C, C]`, all at once.

    Substitution, a row of all blocks after the other.
    """
    column = tl.arange(0, C)
    block = square + column // 16 * 16 * C
    rows = ()
    for i in tl.static_range(16):
        row = tl.where(column % 16 == i, 1.0, 0.0)
        for j in tl.static_range(i):
            row -= tl.load(block + i * C + column // 16 * 16 + j) * rows[j]
        rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005 - Triton knows no starred tuple
    tl.debug_barrier()
    for i in tl.static_range(16):
        tl.store(block + i * C + column, rows[i])


@triton.jit
def _solve(
    k,
    g,
    beta,
    chunks,
    factors,
    systems,
    inverses,
    eps,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Of one chunk and one value head: `(I + A)^-1` and each token's factors.

    A holds the corrections of a write by earlier ones, strictly lower triangular.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(chunks + 2 * chunk)
    count = tl.load(chunks + 2 * chunk + 1) - begin
    if count > 0:
        row = tl.arange(0, C)
        present = row < count
        at = begin + row
        number = chunk * HEADS + head
        tile = at[:, None] * KEYS * D + head // (HEADS // KEYS) * D + tl.arange(0, D)[None, :]
        keys = tl.load(k + tile, mask=present[:, None], other=0.0)
        strength = tl.load(beta + at * HEADS + head, mask=present, other=0.0).to(tl.float32)
        total = tl.cumsum(tl.load(g + at * HEADS + head, mask=present, other=0.0), axis=0)
        length = _length(keys, eps)
        # The whole chunk's decay: padding of a chunk decays nothing, so it is the last one's, and the least.
        end = tl.min(total, axis=0)
        factor = factors + number * _FACTORS * C + row
        tl.store(factor, strength)
        tl.store(factor + C, strength * length * tl.exp(total))
        tl.store(factor + 2 * C, length * tl.exp(end - total))
        tl.store(factor + 3 * C, total)
        tl.store(factor + 4 * C, length)
        tl.store(factors + (number * _FACTORS + 5) * C, tl.exp(end))
        later = row[:, None] > row[None, :]
        since = tl.exp(tl.where(later, total[:, None] - total[None, :], 0.0))
        overlap = tl.dot(keys, tl.trans(keys), input_precision="ieee") * (length[:, None] * length[None, :])
        corrections = tl.where(later, strength[:, None] * overlap * since, 0.0)
        # Through memory, where the diagonal blocks of 16 can be taken apart: only this program touches these bytes.
        cells = row[:, None] * C + row[None, :]
        square = systems + number * C * C
        tl.store(square + cells, corrections)
        tl.debug_barrier()
        _invert_blocks(square, C)
        tl.debug_barrier()
        inverse = tl.where(row[:, None] // 16 == row[None, :] // 16, tl.load(square + cells), 0.0)
        # Then inverses of blocks that double in size: of two neighbours X and Y with B under X and beside Y, the
        # inverse's lower block is -Y B X. One product over the whole square does it for all pairs of blocks.
        size = 16
        while size < C:
            pairs = (row[:, None] // (2 * size) == row[None, :] // (2 * size)) & (
                row[:, None] // size != row[None, :] // size
            )
            below = _wide_times_wide(tl.where(pairs, corrections, 0.0), inverse, PARTS)
            inverse -= _wide_times_wide(inverse, below, PARTS)
            size *= 2
        _keep(inverses + number * PARTS * C * C + cells, inverse, C, PARTS)


@triton.jit
def _scan(
    k,
    v,
    chunks,
    sequences,
    factors,
    inverses,
    writes,
    memories,
    state,
    first_sequence,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of one sequence and one value head, some columns of the memory: kept at each chunk's start, then written to."""
    head = tl.program_id(1)
    sequence = first_sequence + tl.program_id(2)
    first = tl.load(sequences + 2 * sequence)
    count = tl.load(sequences + 2 * sequence + 1)
    if count > 0:
        begin = tl.load(chunks + 2 * first)
        rows = tl.load(chunks + 2 * (first + count - 1) + 1) - begin
        row = tl.arange(0, C)
        d = tl.arange(0, D)
        e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        cells = row[:, None] * C + row[None, :]
        square = d[:, None] * E + e[None, :]
        carried = state + head * D * E + square
        memory = tl.load(carried)
        for chunk in tl.range(0, count, num_stages=STAGES):
            present = (chunk * C + row < rows)[:, None]
            at = (begin + chunk * C + row)[:, None]
            number = (first + chunk) * HEADS + head
            factor = factors + number * _FACTORS * C + row
            strength = tl.load(factor)
            known_scale = tl.load(factor + C)
            fading = tl.load(factor + 2 * C)
            keys = tl.load(k + at * KEYS * D + head // (HEADS // KEYS) * D + d[None, :], mask=present, other=0.0)
            values = tl.load(v + at * HEADS * E + head * E + e[None, :], mask=present, other=0.0).to(tl.float32)
            tl.store(memories + number * D * E + square, memory)
            known = _exact_times_wide(keys, memory, PARTS)
            right = values * strength[:, None] - known * known_scale[:, None]
            writing = _kept_times_wide(inverses + number * PARTS * C * C + cells, right, C, PARTS)
            tl.store(writes + number * C * E + row[:, None] * E + e[None, :], writing)
            decay = tl.load(factors + (number * _FACTORS + 5) * C)
            memory = memory * decay + _exact_times_wide(tl.trans(keys), writing * fading[:, None], PARTS)
        if KEEP:
            tl.store(carried, memory)


@triton.jit
def _output(
    q,
    k,
    chunks,
    factors,
    writes,
    memories,
    out,
    scale,
    eps,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of one chunk and one value head, some columns: what queries read from the memory and from the chunk's writes."""
    chunk, head = tl.program_id(1), tl.program_id(2)
    begin = tl.load(chunks + 2 * chunk)
    count = tl.load(chunks + 2 * chunk + 1) - begin
    if count > 0:
        row = tl.arange(0, C)
        present = (row < count)[:, None]
        at = (begin + row)[:, None]
        number = chunk * HEADS + head
        d = tl.arange(0, D)
        e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        tile = at * KEYS * D + head // (HEADS // KEYS) * D + d[None, :]
        queries = tl.load(q + tile, mask=present, other=0.0)
        keys = tl.load(k + tile, mask=present, other=0.0)
        memory = tl.load(memories + number * D * E + d[:, None] * E + e[None, :])
        writing = tl.load(writes + number * C * E + row[:, None] * E + e[None, :])
        total = tl.load(factors + (number * _FACTORS + 3) * C + row)
        length = tl.load(factors + (number * _FACTORS + 4) * C + row)
        value = _exact_times_wide(queries, memory, PARTS) * tl.exp(total)[:, None]
        seen = row[:, None] >= row[None, :]
        since = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
        overlap = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        reads = tl.where(seen, overlap * since * length[None, :], 0.0)
        value += _wide_times_wide(reads, writing, PARTS)
        value *= (_length(queries, eps) * scale)[:, None]
        tl.store(out + at * HEADS * E + head * E + e[None, :], value.to(out.dtype.element_ty), mask=present)
