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

from kernels.layout import CHUNK_TOKENS, MAX_SUFFIXES, Layout
from kernels.norms import L2_NORM_EPS

Tensor = torch.Tensor

# Columns of the memory that one program of the scan carries, and of the outputs that one program computes.
SCAN_COLUMNS = 32
OUTPUT_COLUMNS = 64
SOLVE_WARPS, SCAN_WARPS, OUTPUT_WARPS = 4, 4, 4
SCAN_STAGES = 2
# Triton's `input_precision` of float32 times float32, as fast as it was measured: TF32 three times, about 21 bits, or
# BF16 six times, about 22.
SOLVE_PRECISION, WIDE_PRECISION = "tf32x3", "bf16x6"


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
    factors = g.new_empty(chunks, heads, 3, CHUNK_TOKENS)
    inverses = g.new_empty(chunks, heads, CHUNK_TOKENS, CHUNK_TOKENS)
    writes = g.new_empty(chunks, heads, CHUNK_TOKENS, value_dim)
    memories = g.new_empty(chunks, heads, key_dim, value_dim)
    out = torch.empty_like(v)
    exact = v.dtype == torch.bfloat16
    solve_wide, wide = (SOLVE_PRECISION, WIDE_PRECISION) if exact else ("ieee", "ieee")
    sizes = {"KEYS": key_heads, "HEADS": heads, "D": key_dim, "E": value_dim, "C": CHUNK_TOKENS}
    _solve[(chunks, heads)](
        k,
        g,
        beta,
        layout.chunks,
        factors,
        inverses,
        L2_NORM_EPS,
        **sizes,
        WIDE=solve_wide,
        num_warps=SOLVE_WARPS,
        num_stages=1,
    )
    columns = min(SCAN_COLUMNS, value_dim)
    for first, sequences in ((0, 1), (1, MAX_SUFFIXES))[0 if prefix else 1 :]:
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
            WIDE=wide,
            COLUMNS=columns,
            KEEP=first == 0,
            STAGES=SCAN_STAGES,
            num_warps=SCAN_WARPS,
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
        WIDE=wide,
        COLUMNS=columns,
        num_warps=OUTPUT_WARPS,
        num_stages=1,
    )
    return out


@triton.jit
def _exact_times_wide(a, b, WIDE: tl.constexpr):
    """`a b` of `a` in the model dtype and float32 `b`; WIDE is "ieee" where both are float32."""
    if WIDE == "ieee":
        product = tl.dot(a, b, input_precision="ieee")
    else:
        high = b.to(tl.bfloat16)
        rest = b - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        product = tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low)))
    return product


@triton.jit
def _length(x, eps):
    """One over the length of each row."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + eps)


@triton.jit
def _invert_blocks(square, C: tl.constexpr):
    """In place, the inverses of `I + A` for the diagonal 16 x 16 blocks of `square` `[C, C]`, all at once.

    Substitution: once a row is final, it is taken out of all rows under it.
    """
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, C)[None, :]
    place = square + (column // 16 * 16 + row) * C
    inverse = tl.where(row == column % 16, 1.0, 0.0)
    for done in range(15):
        final = tl.sum(tl.where(row == done, inverse, 0.0), axis=0)
        under = tl.load(place + column // 16 * 16 + done, mask=row > done, other=0.0)
        inverse -= under * final[None, :]
    tl.debug_barrier()
    tl.store(place + column, inverse)


@triton.jit
def _solve(
    k,
    g,
    beta,
    chunks,
    factors,
    inverses,
    eps,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Of one chunk and one value head: `(I + A)^-1`, and each row's decay, strength and one over its key's length.

    A holds the corrections of a write by earlier ones, strictly lower triangular.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(chunks + 2 * chunk)
    count = tl.load(chunks + 2 * chunk + 1) - begin
    if count > 0:
        row = tl.arange(0, C)
        present = row < count
        at = (begin + row).to(tl.int64)
        number = (chunk * HEADS + head).to(tl.int64)
        strength = tl.load(beta + at * HEADS + head, mask=present, other=0.0).to(tl.float32)
        total = tl.cumsum(tl.load(g + at * HEADS + head, mask=present, other=0.0), axis=0)
        tile = at[:, None] * KEYS * D + head // (HEADS // KEYS) * D + tl.arange(0, D)[None, :]
        keys = tl.load(k + tile, mask=present[:, None], other=0.0)
        length = _length(keys, eps)
        factor = factors + number * 3 * C + row
        tl.store(factor, total)
        tl.store(factor + C, strength)
        tl.store(factor + 2 * C, length)
        later = row[:, None] > row[None, :]
        since = tl.exp(tl.where(later, total[:, None] - total[None, :], 0.0))
        overlap = tl.dot(keys, tl.trans(keys), input_precision="ieee") * (length[:, None] * length[None, :])
        corrections = tl.where(later, strength[:, None] * overlap * since, 0.0)
        # Through memory, where the diagonal blocks of 16 can be taken apart: only this program touches these bytes.
        square = inverses + number * C * C + row[:, None] * C + row[None, :]
        tl.store(square, corrections)
        tl.debug_barrier()
        _invert_blocks(inverses + number * C * C, C)
        tl.debug_barrier()
        inverse = tl.where(row[:, None] // 16 == row[None, :] // 16, tl.load(square), 0.0)
        # Then inverses of blocks that double in size: of two neighbours X and Y with B under X and beside Y, the
        # inverse's lower block is -Y B X. One product over the whole square does it for all pairs of blocks.
        size = 16
        while size < C:
            pairs = (row[:, None] // (2 * size) == row[None, :] // (2 * size)) & (
                row[:, None] // size != row[None, :] // size
            )
            below = tl.dot(tl.where(pairs, corrections, 0.0), inverse, input_precision=WIDE)
            inverse -= tl.dot(inverse, below, input_precision=WIDE)
            size *= 2
        tl.store(square, inverse)


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
    WIDE: tl.constexpr,
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
        row = tl.arange(0, C)
        d = tl.arange(0, D)
        e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        square = d[:, None] * E + e[None, :]
        carried = state + head * D * E + square
        memory = tl.load(carried)
        for chunk in tl.range(first, first + count, num_stages=STAGES):
            begin = tl.load(chunks + 2 * chunk)
            present = (row < tl.load(chunks + 2 * chunk + 1) - begin)[:, None]
            at = (begin + row).to(tl.int64)[:, None]
            number = (chunk * HEADS + head).to(tl.int64)
            factor = factors + number * 3 * C + row
            total = tl.load(factor)
            strength = tl.load(factor + C)
            length = tl.load(factor + 2 * C)
            # The whole chunk's decay: padding of a chunk decays nothing, so it is the last one's, and the least.
            end = tl.min(total, axis=0)
            keys = tl.load(k + at * KEYS * D + head // (HEADS // KEYS) * D + d[None, :], mask=present, other=0.0)
            values = tl.load(v + at * HEADS * E + head * E + e[None, :], mask=present, other=0.0).to(tl.float32)
            inverse = tl.load(inverses + number * C * C + row[:, None] * C + row[None, :])
            tl.store(memories + number * D * E + square, memory)
            known = _exact_times_wide(keys, memory, WIDE) * (length * tl.exp(total))[:, None]
            writing = tl.dot(inverse, (values - known) * strength[:, None], input_precision=WIDE)
            tl.store(writes + number * C * E + row[:, None] * E + e[None, :], writing)
            fading = writing * (length * tl.exp(end - total))[:, None]
            memory = memory * tl.exp(end) + _exact_times_wide(tl.trans(keys), fading, WIDE)
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
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of one chunk and one value head, some columns: what queries read from the memory and from the chunk's writes."""
    chunk, head = tl.program_id(1), tl.program_id(2)
    begin = tl.load(chunks + 2 * chunk)
    count = tl.load(chunks + 2 * chunk + 1) - begin
    if count > 0:
        row = tl.arange(0, C)
        present = (row < count)[:, None]
        at = (begin + row).to(tl.int64)[:, None]
        number = (chunk * HEADS + head).to(tl.int64)
        d = tl.arange(0, D)
        e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tile = at * KEYS * D + head // (HEADS // KEYS) * D + d[None, :]
        queries = tl.load(q + tile, mask=present, other=0.0)
        keys = tl.load(k + tile, mask=present, other=0.0)
        total = tl.load(factors + number * 3 * C + row)
        length = tl.load(factors + number * 3 * C + 2 * C + row)
        seen = row[:, None] >= row[None, :]
        since = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
        overlap = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        reads = tl.where(seen, overlap * since * length[None, :], 0.0)
        memory = tl.load(memories + number * D * E + d[:, None] * E + e)
        value = _exact_times_wide(queries, memory, WIDE) * tl.exp(total)[:, None]
        writing = tl.load(writes + number * C * E + row[:, None] * E + e)
        value += tl.dot(reads, writing, input_precision=WIDE)
        value *= (_length(queries, eps) * scale)[:, None]
        tl.store(out + at * HEADS * E + head * E + e, value.to(out.dtype.element_ty), mask=present)
