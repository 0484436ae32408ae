"""Every GPU kernel at the model's sizes: against its torch reference, and against the clock. Needs a GPU.

`python -m benchmarks.kernels` prints, for a 1280x800 screenshot with one question, each kernel's time (the median of
graph replays, so without launch gaps), the bandwidth or arithmetic rate it reached, its share of the ceiling that
bounds it, and its difference from the torch reference on the CPU; it exits with 1 if one is over its tolerance. Where
flash-linear-attention is installed, its time stands beside ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.full_size import DEVICE, environment
from benchmarks.latency import PEAK_BYTES, PEAK_FLOPS, RESULTS
from kernels import attention, causal_conv, delta_rule, linear, lora, mlp, norms, patches, resize, rotary, unfilter
from kernels.layout import Layout, PlacedSegments, last_rows
from kernels.segments import Segments

Tensor = torch.Tensor

PATCHES, PAST, EPS = 4000, 79, 1e-6
SEGMENTS = Segments(1000, (128,))
ROWS = 1152
# Of BF16 outputs: relative to the reference's norm. A rounding is 2^-9; sums of rounded numbers come within a few.
TOLERANCE = 4e-3


@dataclass(frozen=True)
class Entry:
    """One kernel's work: how to run it, on which device, what it must give, and what it must move and compute.

    `run` takes the device's tensors and returns tensors to compare. `tokens` of the outputs' rows mean something.
    `tolerance` is of the difference relative to the reference's norm; 0 where there is one right answer.
    """

    name: str
    inputs: tuple[object, ...]
    run: Callable[..., Tensor | Sequence[Tensor]]
    moved_bytes: float = 0.0
    flops: float = 0.0
    tokens: int | None = None
    peer: Callable[[], object] | None = None
    tolerance: float = TOLERANCE


def _random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def _vision() -> list[Entry]:
    x, wide = _random(PATCHES, 1024), _random(PATCHES, 4096)
    fc1, fc2 = (_adapted(outputs, inputs) for outputs, inputs in ((4096, 1024), (1024, 4096)))
    norm = (_random(1024, scale=0.1), _random(1024, scale=0.1))
    pixels = torch.randint(0, 256, (800, 1280, 3), dtype=torch.uint8, device=DEVICE)
    screen = torch.randint(0, 256, (768, 1366, 3), dtype=torch.uint8, device=DEVICE)
    # Any bytes are some picture's filtered bytes.
    scanlines = torch.randint(0, 256, (800, 1 + 1280 * 3), dtype=torch.uint8, device=DEVICE)
    scanlines[:, 0] %= 5
    qkv = _random(PATCHES, 3072)
    table = (_random(PATCHES, 32, dtype=torch.float32), _random(PATCHES, 32, dtype=torch.float32))
    heads = [_random(PATCHES, 16, 64) for _ in range(3)]
    product = 2 * PATCHES * 1024 * 4096
    branch = 2 * PATCHES * 16 * (1024 + 4096)
    return [
        Entry(
            "pack patches", (pixels, 16, 2, 2, torch.bfloat16), patches.pack_patches, pixels.numel() + PATCHES * 3072
        ),
        Entry("PNG filters", (scanlines, 3), unfilter.unfilter, scanlines.numel() * 2, tolerance=0.0),
        Entry("resize 1366x768", (screen, 768, 1376), resize.resize_bicubic, screen.numel() * 2, tolerance=0.0),
        Entry("add + layer norm", (x, _random(PATCHES, 1024), *norm, EPS), norms.add_layer_norm, PATCHES * 1024 * 8),
        Entry("split + 2-D rotary", (qkv, table, 16), rotary.split_rotate_vision, PATCHES * 2048 * 4),
        Entry("attention over patches", (*heads,), attention.full_attention, flops=4 * PATCHES**2 * 1024),
        Entry("fc1 + LoRA + GELU", (x, fc1, "gelu_tanh"), lora.lora_linear, flops=product + branch),
        Entry("fc1 alone", (x, *fc1[:2]), linear.linear, flops=product),
        Entry("fc2 + LoRA", (wide, fc2), lora.lora_linear, flops=product + branch),
        Entry("fc2 alone", (wide, *fc2[:2]), linear.linear, flops=product),
    ]


def _adapted(outputs: int, inputs: int) -> lora.AdaptedLinear:
    down = _random(16, inputs, scale=inputs**-0.5, dtype=torch.float32)
    up = _random(outputs, 16, scale=0.02, dtype=torch.float32)
    weight, bias = _random(outputs, inputs, scale=inputs**-0.5), _random(outputs, scale=0.02)
    return lora.AdaptedLinear.of(weight, bias, lora.LowRank(down, up, 2.0))


def _language(placed: PlacedSegments) -> list[Entry]:
    tokens = SEGMENTS.tokens
    x, projected = _random(ROWS, 2560), _random(ROWS, 12352)
    channels = projected[:, :8192]
    conv = (_random(8192, 4, scale=0.5), _random(3, 8192))
    scalars = (projected[:, 12320:], projected[:, 12288:12320], _random(32), _random(32, scale=2.0) - 4.0)
    q, k, v = _random(ROWS, 16, 128), _random(ROWS, 16, 128), _random(ROWS, 32, 128)
    g, beta = -torch.rand(ROWS, 32, device=DEVICE) * 0.1, torch.sigmoid(_random(ROWS, 32))
    memory = _random(32, 128, 128, scale=0.1, dtype=torch.float32)
    attended = _random(ROWS, 10240)
    table = (_random(ROWS, 32), _random(ROWS, 32))
    weights = (_random(256, scale=0.1), _random(256, scale=0.1))
    queries, keys, values = _random(ROWS, 16, 256), _random(ROWS, 4, 256), _random(ROWS, 4, 256)
    past = tuple(_random(PAST, 4, 256) for _ in range(2))

    def convolve(x: Tensor, weight: Tensor, state: Tensor) -> Sequence[Tensor]:
        segments = placed if x.is_cuda else SEGMENTS
        return causal_conv.conv_silu_split(x if x.is_cuda else x[:tokens], weight, state, segments, 16, 32, 128)

    def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor) -> Tensor:
        if q.is_cuda:
            return delta_rule.gated_delta_rule(q, k, v, g, beta, memory, placed)[0]
        rows = (part[:tokens] for part in (q, k, v, g, beta))
        return delta_rule.gated_delta_rule(*rows, memory, SEGMENTS)[0]

    room = tuple(F.pad(part, (0, 0, 0, 0, 0, ROWS)) for part in past)

    def attend(q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor]) -> Tensor:
        if q.is_cuda:
            shared = attention.extended((room[0], room[1]), k, v, placed)
            return attention.shared_prefix_attention(q, k, v, shared, placed)
        q, k, v = q[:tokens], k[:tokens], v[:tokens]
        return attention.shared_prefix_attention(q, k, v, attention.extended(past, k, v, SEGMENTS), SEGMENTS)

    entries = [
        Entry(
            "add + RMS norm",
            (x, _random(ROWS, 2560), _random(2560, scale=0.1), EPS),
            norms.add_rms_norm,
            ROWS * 2560 * 8,
        ),
        Entry("conv + SiLU + split", (channels, *conv), convolve, ROWS * 8192 * 4, tokens=tokens),
        Entry("decay and strength", scalars, delta_rule.decay_and_strength, ROWS * 32 * 10),
        Entry(
            *("gated delta rule", (q, k, v, g, beta, memory), scan),
            *(0.0, tokens * 1.0e8 / 24, tokens, _fla_delta_rule(q, k, v, g, beta, memory)),
        ),
        Entry(
            "gated RMS norm", (v, projected[:, 8192:12288], _random(128), EPS), norms.gated_rms_norm, ROWS * 4096 * 6
        ),
        Entry("SwiGLU", (_random(ROWS, 18432),), mlp.swiglu, ROWS * 9216 * 6),
        Entry("norm + mRoPE", (attended, *weights, table, 16, 4, EPS), rotary.split_norm_rotate, ROWS * 5120 * 4),
        Entry(
            *("attention, shared prefix", (queries, keys, values, past), attend),
            *(0.0, 4 * tokens * (PAST + tokens / 2) * 4096, tokens),
        ),
        Entry("output gate", (_random(ROWS, 4096), projected[:, :4096]), attention.gate_output, ROWS * 4096 * 6),
    ]
    for name, inputs, outputs in (
        ("q+k+v+z+b+a", 2560, 12352),
        ("delta rule out", 4096, 2560),
        ("gate+up", 2560, 18432),
        ("down", 9216, 2560),
    ):
        weight = _random(outputs, inputs, scale=inputs**-0.5)
        product = Entry(
            f"{name} (cuBLAS)", (_random(ROWS, inputs), weight), linear.linear, flops=2 * ROWS * inputs * outputs
        )
        entries.append(product)
    last = _random(ROWS, 2560)
    entries.append(
        Entry("last rows", (last,), lambda x: last_rows(x, placed if x.is_cuda else SEGMENTS)[:1], 8 * 2560 * 4)
    )
    return entries


def _fla_delta_rule(*inputs: Tensor) -> Callable[[], object] | None:
    """flash-linear-attention's rule over the same rows as one sequence, or None where it is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    q, k, v, g, beta, memory = inputs
    q, k = (part.repeat_interleave(2, dim=1)[None] for part in (q, k))
    options = {"initial_state": memory[None], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return lambda: chunk_gated_delta_rule(q, k, v[None], g[None], beta[None], **options)


def median_us(run: Callable[[], object], repeats: int = 20, inner: int = 4) -> float:
    """The median time of one run, of graph replays that hold several."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(inner):
                run()
    times_us = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_us.append(start.elapsed_time(end) * 1e3 / inner)
    return statistics.median(times_us)


def _on_cpu(value: object) -> object:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, lora.LowRank | lora.AdaptedLinear):
        return type(value)(*map(_on_cpu, value))  # type: ignore[arg-type]
    return tuple(map(_on_cpu, value)) if isinstance(value, tuple) else value


def _difference(found: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor], tokens: int | None) -> float:
    """The largest relative difference of the outputs, by norms; NaN counts as infinite."""
    pairs = zip(*((value,) if isinstance(value, Tensor) else value for value in (found, expected)), strict=True)
    worst = 0.0
    for ours, theirs in pairs:
        rows = min(tokens or len(theirs), len(theirs))
        one, other = ours[:rows].float().cpu(), theirs[:rows].float()
        error = float((one - other).norm() / other.norm().clamp(min=1e-30))
        worst = max(worst, error if error == error else float("inf"))
    return worst


def measure(entry: Entry) -> dict[str, object]:
    """Check, then time."""
    expected = entry.run(*map(_on_cpu, entry.inputs))
    inputs = tuple(
        value.clone() if isinstance(value, Tensor) and value.is_contiguous() else value for value in entry.inputs
    )
    difference = _difference(entry.run(*inputs), expected, entry.tokens)
    time_us = median_us(lambda: entry.run(*inputs))
    bound_us = max(entry.moved_bytes / PEAK_BYTES, entry.flops / PEAK_FLOPS) * 1e6
    return {
        "kernel": entry.name,
        "us": round(time_us, 1),
        "gb_per_s": round(entry.moved_bytes / time_us / 1e3) if entry.moved_bytes else None,
        "tflop_per_s": round(entry.flops / time_us / 1e6, 1) if entry.flops else None,
        "share_of_ceiling": round(bound_us / time_us, 3),
        "difference": difference,
        "passed": difference <= entry.tolerance,
        "fla_us": round(median_us(entry.peer), 1) if entry.peer else None,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and time all kernels, print the table, write `kernels.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for kernels.json")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    placed = PlacedSegments(
        SEGMENTS.prefix_tokens, SEGMENTS.suffix_tokens, Layout.build(SEGMENTS, PAST, ROWS).to(DEVICE)
    )
    with torch.inference_mode():
        rows = [measure(entry) for entry in (*_vision(), *_language(placed))]
    print(f"{'kernel':26s}{'us':>8s}{'GB/s':>8s}{'TFLOP/s':>9s}{'ceiling':>9s}{'difference':>12s}{'fla us':>8s}")
    for row in rows:
        rates = f"{row['us']!s:>8s}{row['gb_per_s'] or '-'!s:>8}{row['tflop_per_s'] or '-'!s:>9}"
        checks = f"{float(str(row['share_of_ceiling'])):>9.0%}{float(str(row['difference'])):>12.1e}"
        print(f"{row['kernel']!s:26s}{rates}{checks}{row['fla_us'] or '-'!s:>8}{'' if row['passed'] else '  MISSED'}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kernels.json").write_text(json.dumps({**environment(), "rows": rows}, indent=2) + "\n")
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
