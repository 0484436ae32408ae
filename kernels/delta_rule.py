"""The gated delta rule: a matrix of memory a head, decayed, corrected and read at every token.

With `S` the memory (`[key_dim, value_dim]`), at each token

    S <- exp(g) S,    S <- S + beta k (v - S^T k)^T,    o = S^T q / sqrt(key_dim)

All arithmetic and the memory are float32.

Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks" (arXiv 2412.06464); the chunked form is the UT
transform of Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule" (arXiv 2406.06484).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.layout import CHUNK_TOKENS as CHUNK_TOKENS
from kernels.layout import layout_of
from kernels.norms import l2_norm
from kernels.segments import Segments

Tensor = torch.Tensor


def decay_and_strength(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """How far each token's memory fades and how strongly it is corrected.

    Args:
        a, b: `[T, V]`, model dtype: projections of the hidden rows; may be slices of wider rows.
        a_log, dt_bias: `[V]`, model dtype.

    Returns:
        `g = -exp(a_log) * softplus(a + dt_bias)`, `[T, V]` float32, at most 0, and `beta = sigmoid(b)`, `[T, V]`,
        rounded to the model dtype.

    Source: the discretisation of Mamba (Gu and Dao 2023, arXiv 2312.00752).
    """
    if a.is_cuda:
        from kernels.gpu import delta_rule as gpu

        return gpu.decay_and_strength(a, b, a_log, dt_bias)
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), torch.sigmoid(b)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, segments: Segments
) -> tuple[Tensor, Tensor]:
    """The rule over packed tokens: the prefix from `state`, every suffix from the prefix's end.

    Args:
        q, k: `[T, K, key_dim]`, model dtype; each is brought to length one first, in float32 and not rounded. V is a
            multiple of K: key head `j` serves the value heads `j * V / K` up to the next.
        v: `[T, V, value_dim]`, model dtype.
        g: `[T, V]`, float32, at most 0.
        beta: `[T, V]`, any float dtype.
        state: `[V, key_dim, value_dim]`, float32; None for zeros. On a GPU it is overwritten with the memory returned.

    Returns:
        `[T, V, value_dim]`, rounded to v's dtype, and the memory at the prefix's end,
        `[V, key_dim, value_dim]` float32.
    """
    assert q.shape[0] == segments.tokens
    if q.is_cuda:
        from kernels.gpu import delta_rule as gpu

        assert state is not None, "on a GPU a pass continues from a state, be it of zeros"
        prefix = segments.prefix_tokens > 0
        return gpu.gated_delta_rule(q, k, v, g, beta, state, layout_of(segments), prefix), state
    q, k = l2_norm(q), l2_norm(k)
    if state is None:
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float32)

    def scan(rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        return chunked(q[rows], k[rows], v[rows], g[rows], beta[rows], state)

    output, end = scan(segments.prefix, state)
    return torch.cat([output, *(scan(rows, end)[0] for rows in segments.suffixes)]), end


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule over one sequence, a chunk at a time.

    Args:
        q, k: `[T, K, key_dim]`, of length one, float32.
        v, g, beta, state: as in `gated_delta_rule`, for one sequence.

    Returns:
        `[T, V, value_dim]`, rounded to v's dtype, and the memory after the last token, float32.
    """
    tokens, heads = g.shape
    query, key, value = (_chunks(_per_value_head(x, heads)) for x in (q, k, v))  # [n, V, C, d]
    strength = _chunks(beta.unsqueeze(-1))  # [n, V, C, 1]
    decay = _chunks(g.unsqueeze(-1)).cumsum(2)  # log of the decay since the chunk's start, [n, V, C, 1]

    # Token i sees what token j <= i wrote, decayed by exp(decay_i - decay_j), and nothing later. The mask comes before
    # exp, which could overflow there.
    later = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=q.device).triu(1)
    since = (decay - decay.transpose(2, 3)).masked_fill(later, float("-inf")).exp()  # [n, V, C, C]
    reads = (query @ key.transpose(2, 3)) * since
    # Each write is corrected by the writes before it in the chunk: a unit lower triangular system, solved once for the
    # values and once for the keys that read the chunk's initial memory.
    system = (strength * key) @ key.transpose(2, 3) * since
    right = torch.cat([strength * value, strength * key * decay.exp()], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    writes, memory_keys = torch.split(solved, [v.shape[2], k.shape[2]], dim=-1)

    query_now = query * decay.exp()
    key_end = (key * (decay[:, :, -1:] - decay).exp()).transpose(2, 3)
    chunk_decay = decay[:, :, -1:].exp()
    output = torch.empty_like(value)
    for n in range(value.shape[0]):
        corrected = writes[n] - memory_keys[n] @ state
        output[n] = query_now[n] @ state + reads[n] @ corrected
        state = state * chunk_decay[n] + key_end[n] @ corrected
    output = output * k.shape[2] ** -0.5
    return output.transpose(1, 2).flatten(0, 1)[:tokens].to(v.dtype), state


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule as it is defined, a token at a time: the oracle of every faster form.

    Args:
        q, k, v, g, beta, state: as in `chunked`.

    Returns:
        As `chunked`.
    """
    heads = g.shape[1]
    query, key, value = (_per_value_head(x, heads) for x in (q, k, v))
    output = torch.empty_like(value)
    for t in range(value.shape[0]):
        state = state * g[t, :, None, None].float().exp()
        error = value[t] - (state * key[t, :, :, None]).sum(1)
        state = state + key[t, :, :, None] * (beta[t, :, None].float() * error)[:, None, :]
        output[t] = (state * query[t, :, :, None]).sum(1) * k.shape[2] ** -0.5
    return output.to(v.dtype), state


def _per_value_head(x: Tensor, heads: int) -> Tensor:
    """`[T, K or V, d]` as float32 `[T, V, d]`."""
    return x.float().repeat_interleave(heads // x.shape[1], dim=1)


def _chunks(x: Tensor) -> Tensor:
    """`[T, V, d]` as float32 `[n, V, C, d]`; the tokens that fill the last chunk are zeros, which change no memory."""
    tokens, heads, width = x.shape
    padded = F.pad(x.float(), (0, 0, 0, 0, 0, -tokens % CHUNK_TOKENS))
    return padded.view(-1, CHUNK_TOKENS, heads, width).transpose(1, 2)
