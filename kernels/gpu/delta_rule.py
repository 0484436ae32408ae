"""The chunked gated delta rule on the GPU, float32 throughout.

Three kernels: the products of a chunk's keys and queries with its keys; the chunk's triangular system, solved by
16-row blocks so that no power of it is ever formed (screens repeat themselves: keys are often equal, and powers would
overflow where substitution does not); and the scan, which alone goes from chunk to chunk. The prefix is scanned first,
then all suffixes beside each other from its end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.layout import CHUNK_TOKENS, MAX_SUFFIXES, Layout

Tensor = torch.Tensor

# How float32 products are made: each by three TF32 products of the operands' high and low parts, about 21 bits.
PRECISION = "tf32x3"
# Columns of the memory that one program of the scan carries.
SCAN_COLUMNS = 32
GRAM_WARPS, SOLVE_WARPS, SCAN_WARPS = 4, 4, 4
SCAN_STAGES = 1


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    layout: Layout,
    prefix: bool,
    precision: str = PRECISION,
) -> Tensor:
    """See `kernels.delta_rule.gated_delta_rule`; returns the output only.

    Args:
        state: `[V, key_dim, value_dim]`, float32; overwritten with the memory at the prefix's end.
        layout: the pass.
        prefix: whether the pass has a prefix; without one, `state` is left alone.
        precision: of the products (Triton's `input_precision`).
    """
    tokens, key_heads, key_dim = k.shape
    heads, value_dim = v.shape[1:]
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, state)) and layout.rows == tokens
    assert state.shape == (heads, key_dim, value_dim) and key_dim % 16 == 0 and value_dim % 16 == 0
    chunks = layout.chunks.shape[0]
    system = g.new_empty(chunks, heads, CHUNK_TOKENS, CHUNK_TOKENS)
    reads = torch.empty_like(system)
    decay = g.new_empty(chunks, heads, CHUNK_TOKENS)
    writes = g.new_empty(chunks, heads, CHUNK_TOKENS, value_dim)
    memory_keys = g.new_empty(chunks, heads, CHUNK_TOKENS, key_dim)
    out = torch.empty_like(v)
    shape = {"KEYS": key_heads, "HEADS": heads, "D": key_dim, "E": value_dim, "C": CHUNK_TOKENS, "PRECISION": precision}
    _gram[(chunks, key_heads)](
        q, k, g, beta, layout.chunks, system, reads, decay, **shape, num_warps=GRAM_WARPS, num_stages=1
    )
    _solve[(chunks, heads)](
        k, v, beta, layout.chunks, system, decay, writes, memory_keys, **shape, num_warps=SOLVE_WARPS, num_stages=1
    )
    columns = min(SCAN_COLUMNS, value_dim)
    for first, sequences in ((0, 1), (1, MAX_SUFFIXES))[0 if prefix else 1 :]:
        _scan[(value_dim // columns, heads, sequences)](
            q,
            k,
            layout.chunks,
            layout.sequences,
            reads,
            decay,
            writes,
            memory_keys,
            state,
            out,
            key_dim**-0.5,
            first,
            **shape,
            COLUMNS=columns,
            KEEP=first == 0,
            num_warps=SCAN_WARPS,
            num_stages=SCAN_STAGES,
        )
    return out


@triton.jit
def _gram(
    q,
    k,
    g,
    beta,
    chunks,
    system,
    reads,
    decay,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of one chunk and one key head, for each of its value heads: decays, system `[C, C]` and reads `[C, C]`."""
    chunk, key_head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(chunks + 2 * chunk)
    count = tl.load(chunks + 2 * chunk + 1) - begin
    if count > 0:
        row = tl.arange(0, C)
        present = row < count
        place = (begin + row).to(tl.int64)
        tile = place[:, None] * KEYS * D + key_head * D + tl.arange(0, D)[None, :]
        keys = tl.load(k + tile, mask=present[:, None], other=0.0)
        queries = tl.load(q + tile, mask=present[:, None], other=0.0)
        across = tl.trans(keys)
        key_key = tl.dot(keys, across, input_precision=PRECISION)
        query_key = tl.dot(queries, across, input_precision=PRECISION)
        later = row[:, None] > row[None, :]
        seen = row[:, None] >= row[None, :]
        square = row[:, None] * C + row[None, :]
        for member in tl.static_range(HEADS // KEYS):
            head = key_head * (HEADS // KEYS) + member
            scalar = place * HEADS + head
            total = tl.cumsum(tl.load(g + scalar, mask=present, other=0.0), axis=0)
            strength = tl.load(beta + scalar, mask=present, other=0.0).to(tl.float32)
            since = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
            number = (chunk * HEADS + head).to(tl.int64)
            tl.store(decay + number * C + row, total)
            corrections = tl.where(later, strength[:, None] * key_key * since, 0.0)
            tl.store(system + number * C * C + square, corrections)
            tl.store(reads + number * C * C + square, tl.where(seen, query_key * since, 0.0))


@triton.jit
def _solve(
    k,
    v,
    beta,
    chunks,
    system,
    decay,
    writes,
    memory_keys,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of one chunk and one value head: `(I + system)^-1` applied to the writes and to the keys that read the memory."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(chunks + 2 * chunk)
    count = tl.load(chunks + 2 * chunk + 1) - begin
    if count > 0:
        number = (chunk * HEADS + head).to(tl.int64)
        block = system + number * C * C
        row = tl.arange(0, 16)[:, None]
        column = tl.arange(0, 16)[None, :]
        place = row * C + column
        line = tl.arange(0, 16)
        # The four diagonal blocks, a row at a time: X_i = e_i - sum_{j < i} A_ij X_j.
        x00 = tl.where(row == column, 1.0, 0.0)
        x11 = x00
        x22 = x00
        x33 = x00
        for i in range(1, 16):
            here = row == i
            a = block + i * C + line
            x00 -= tl.where(here, tl.sum(tl.load(a)[:, None] * x00, axis=0)[None, :], 0.0)
            x11 -= tl.where(here, tl.sum(tl.load(a + 16 * (C + 1))[:, None] * x11, axis=0)[None, :], 0.0)
            x22 -= tl.where(here, tl.sum(tl.load(a + 32 * (C + 1))[:, None] * x22, axis=0)[None, :], 0.0)
            x33 -= tl.where(here, tl.sum(tl.load(a + 48 * (C + 1))[:, None] * x33, axis=0)[None, :], 0.0)
        # The blocks under them: X_ij = -X_ii sum_{j <= m < i} A_im X_mj.
        a10 = tl.load(block + 16 * C + place)
        a20 = tl.load(block + 32 * C + place)
        a21 = tl.load(block + 32 * C + 16 + place)
        a30 = tl.load(block + 48 * C + place)
        a31 = tl.load(block + 48 * C + 16 + place)
        a32 = tl.load(block + 48 * C + 32 + place)
        x10 = -_product(x11, _product(a10, x00))
        x21 = -_product(x22, _product(a21, x11))
        x32 = -_product(x33, _product(a32, x22))
        x20 = -_product(x22, _product(a20, x00) + _product(a21, x10))
        x31 = -_product(x33, _product(a31, x11) + _product(a32, x21))
        x30 = -_product(x33, _product(a30, x00) + _product(a31, x10) + _product(a32, x20))
        # Through memory into one square: only this program reads or writes these 4 C^2 bytes.
        tl.debug_barrier()
        tl.store(block + place, x00)
        tl.store(block + 16 * C + 16 + place, x11)
        tl.store(block + 32 * C + 32 + place, x22)
        tl.store(block + 48 * C + 48 + place, x33)
        tl.store(block + 16 * C + place, x10)
        tl.store(block + 32 * C + place, x20)
        tl.store(block + 32 * C + 16 + place, x21)
        tl.store(block + 48 * C + place, x30)
        tl.store(block + 48 * C + 16 + place, x31)
        tl.store(block + 48 * C + 32 + place, x32)
        tl.debug_barrier()
        token = tl.arange(0, C)
        inverse = tl.load(block + token[:, None] * C + token[None, :])
        present = token < count
        at = (begin + token).to(tl.int64)
        strength = tl.load(beta + at * HEADS + head, mask=present, other=0.0).to(tl.float32)
        total = tl.load(decay + number * C + token)
        key_head = head // (HEADS // KEYS)
        d = tl.arange(0, D)[None, :]
        keys = tl.load(k + at[:, None] * KEYS * D + key_head * D + d, mask=present[:, None], other=0.0)
        keys = keys * (strength * tl.exp(total))[:, None]
        out = token[:, None] * D + d
        tl.store(memory_keys + number * C * D + out, tl.dot(inverse, keys, input_precision=PRECISION))
        e = tl.arange(0, E)[None, :]
        values = tl.load(v + at[:, None] * HEADS * E + head * E + e, mask=present[:, None], other=0.0).to(tl.float32)
        values = values * strength[:, None]
        out = token[:, None] * E + e
        tl.store(writes + number * C * E + out, tl.dot(inverse, values, input_precision=PRECISION))


@triton.jit
def _product(a, b):
    """A product of two `[16, 16]`, plainly in float32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _scan(
    q,
    k,
    chunks,
    sequences,
    reads,
    decay,
    writes,
    memory_keys,
    state,
    out,
    scale,
    first_sequence,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Of one sequence and one value head, some columns of the memory: corrected, read and decayed chunk by chunk."""
    head = tl.program_id(1)
    sequence = first_sequence + tl.program_id(2)
    first = tl.load(sequences + 2 * sequence)
    count = tl.load(sequences + 2 * sequence + 1)
    if count > 0:
        key_head = head // (HEADS // KEYS)
        token = tl.arange(0, C)
        d = tl.arange(0, D)
        e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        carried = state + head * D * E + d[:, None] * E + e[None, :]
        memory = tl.load(carried)
        for chunk in range(first, first + count):
            begin = tl.load(chunks + 2 * chunk)
            present = token < tl.load(chunks + 2 * chunk + 1) - begin
            at = (begin + token).to(tl.int64)
            number = (chunk * HEADS + head).to(tl.int64)
            total = tl.load(decay + number * C + token)
            # The whole chunk's decay: padding of a chunk decays nothing, so it is the last one's, and the least.
            end = tl.min(total, axis=0)
            reading = tl.load(memory_keys + number * C * D + token[:, None] * D + d[None, :])
            writing = tl.load(writes + number * C * E + token[:, None] * E + e[None, :])
            writing -= tl.dot(reading, memory, input_precision=PRECISION)
            tile = at[:, None] * KEYS * D + key_head * D + d[None, :]
            queries = tl.load(q + tile, mask=present[:, None], other=0.0) * tl.exp(total)[:, None]
            value = tl.dot(queries, memory, input_precision=PRECISION)
            seen = tl.load(reads + number * C * C + token[:, None] * C + token[None, :])
            value = tl.dot(seen, writing, value, input_precision=PRECISION)
            target = out + at[:, None] * HEADS * E + head * E + e[None, :]
            tl.store(target, (value * scale).to(out.dtype.element_ty), mask=present[:, None])
            keys = tl.load(k + tile, mask=present[:, None], other=0.0) * tl.exp(end - total)[:, None]
            memory = tl.dot(tl.trans(keys), writing, memory * tl.exp(end), input_precision=PRECISION)
        if KEEP:
            tl.store(carried, memory)
