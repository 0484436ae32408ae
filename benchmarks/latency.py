"""How long a request takes on the GPU: `python -m benchmarks.latency --peer hf`, random weights at full size.

GPU time is from the pixels' upload to the last probability, by CUDA events, vision and language together; a case's
picture and questions are prepared once and asked again and again, without the image cache but where it says so. The
peer is Transformers with PEFT over the same inputs in the same process, one call a question, wall clock to the letters'
probabilities, after its own CPU preparation. The floor is the arithmetic of the case's tokens at `PEAK_FLOPS`, and not
under the time to read the language weights once.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.full_size import Peer, Weights, encoder, environment, our_engine
from benchmarks.screens import png, question, screenshot
from engine import Engine, Question
from engine.gpu import DEFAULT_IMAGE_CACHE_BYTES
from engine.prompt import PromptEncoder

RESULTS = Path(__file__).parent / "results"
# A question's own tokens are then about 128, as in the cases that the targets were set for.
WORDS = 43
WARM_UPS, REPEATS, PEER_REPEATS = 3, 30, 3
# Measured on the H200: a BF16 product of 8192^3, and a copy's bytes read and written.
PEAK_FLOPS, PEAK_BYTES = 780e12, 4.17e12
LANGUAGE_BYTES = 7.2e9


@dataclass(frozen=True)
class Case:
    """A screenshot's size in pixels, how many questions of four options, how many words in each goal."""

    width: int
    height: int
    questions: int
    words: int = WORDS
    repeated: bool = False

    @property
    def name(self) -> str:
        """As the tables call it."""
        kind = ", long text" if self.words > 100 else ", repeated" if self.repeated else ""
        return f"{self.width}x{self.height}{kind}"

    def image(self) -> bytes:
        """The screenshot's file."""
        return png(screenshot(self.width, self.height, seed=1))

    def asked(self) -> list[Question]:
        """Its questions."""
        return [question(f"q{n}", 4, seed=n, words=self.words) for n in range(self.questions)]


SIZES = ((1280, 800), (1024, 1024), (512, 512), (256, 256))
CASES = (
    *(Case(width, height, count) for width, height in SIZES for count in (1, 4, 8)),
    Case(1280, 800, 1, words=1350),
    Case(1280, 800, 1, repeated=True),
    Case(1280, 800, 4, repeated=True),
)


def floor_ms(patches: int, tokens: int) -> float:
    """Of a request of so many patches (0: its image's state was kept) and prompt tokens that must be computed."""
    vision = 2 * patches * 310.3e6 + 98304 * patches**2
    language = 2 * tokens * 3.57e9 + 65536 * tokens**2 + 1.0e8 * tokens
    return max((vision + language) / PEAK_FLOPS, vision / PEAK_FLOPS + LANGUAGE_BYTES / PEAK_BYTES) * 1e3


def measure(ours: Engine, case: Case) -> dict[str, object]:
    """Our times of a case."""
    runner = ours._runner
    assert runner is not None
    runner.images.clear()
    runner.images.bound_bytes = DEFAULT_IMAGE_CACHE_BYTES if case.repeated else 0
    prepared = ours.prepare(case.image(), case.asked())
    for _ in range(WARM_UPS):
        runner.decide(prepared, b"benchmark")
        ours.capture_pending()
    torch.cuda.reset_peak_memory_stats()
    gpu_ms, vision_ms, wall_ms = [], [], []
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        outcome = runner.decide(prepared, b"benchmark")
        wall_ms.append((time.perf_counter() - started_s) * 1e3)
        vision_ms.append(outcome.vision_ms)
        gpu_ms.append(outcome.vision_ms + outcome.language_ms)
    _, rows, columns = prepared.grid
    suffix_tokens = sum(prepared.segments.suffix_tokens)
    tokens = suffix_tokens + (0 if case.repeated else prepared.segments.prefix_tokens)
    p20, p50, p80 = (statistics.quantiles(gpu_ms, n=10)[at] for at in (1, 4, 7))
    return {
        "case": case.name,
        "questions": case.questions,
        "tokens": tokens,
        "gpu_ms": {"p20": round(p20, 3), "p50": round(p50, 3), "p80": round(p80, 3)},
        "vision_ms": round(statistics.median(vision_ms), 3),
        "wall_ms": round(statistics.median(wall_ms), 3),
        "floor_ms": round(floor_ms(0 if case.repeated else rows * columns, tokens), 3),
        "peer_ms": None,
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }


def measure_peer(peer: Peer, case: Case) -> float:
    """The reference's time of a case: the median over repeats of all its questions one after another."""
    picture = screenshot(case.width, case.height, seed=1)
    inputs = [peer.inputs(picture, one) for one in case.asked()]
    times_ms = []
    for _ in range(1 + PEER_REPEATS):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        for one in inputs:
            peer.probabilities(one, 4)
        times_ms.append((time.perf_counter() - started_s) * 1e3)
    return round(statistics.median(times_ms[1:]), 1)


def load(prompts: PromptEncoder) -> Engine:
    """Our engine alone, so that its memory can be seen."""
    ours = our_engine(Weights(), prompts)
    gc.collect()
    torch.cuda.empty_cache()
    started_s = time.perf_counter()
    ours.warm_up()
    print(f"warm-up {time.perf_counter() - started_s:.1f} s, {len(ours._runner.graphs)} graphs")  # type: ignore[union-attr]
    return ours


def table(rows: Sequence[dict[str, object]]) -> str:
    """The rows as people read them: milliseconds, and gigabytes at the most."""
    heads = ("questions", "tokens", "p20", "p50", "p80", "vision", "wall", "floor", "x floor", "peer", "x peer", "GB")
    lines = [f"{'case':24s}" + "".join(f"{head:>10s}" for head in heads)]
    for row in rows:
        times: dict[str, float] = row["gpu_ms"]  # type: ignore[assignment]
        floor, peer = float(str(row["floor_ms"])), row["peer_ms"]
        cells = [
            *(row["questions"], row["tokens"], *(f"{time_ms:.2f}" for time_ms in times.values())),
            *(f"{row['vision_ms']:.2f}", f"{row['wall_ms']:.2f}", f"{floor:.2f}", f"{times['p50'] / floor:.2f}"),
            *((f"{peer:.0f}", f"{float(str(peer)) / times['p50']:.1f}") if peer else ("-", "-")),
            row["peak_gb"],
        ]
        lines.append(f"{row['case']:24s}" + "".join(f"{cell!s:>10s}" for cell in cells))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases, print the table, write `latency.json` and `latency.txt`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", choices=["hf"], help="measure the reference beside us")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; by default the synthetic checkpoints' one")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    prompts = encoder(options.tokenizer)
    ours = load(prompts)
    rows = [measure(ours, case) for case in CASES]
    print(table(rows))
    if options.peer:
        peer = Peer(Weights(), torch.bfloat16, prompts)
        for case, row in zip(CASES, rows, strict=True):
            row["peer_ms"] = measure_peer(peer, case)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "latency.json").write_text(json.dumps({**environment(), "rows": rows}, indent=2) + "\n")
    (options.out / "latency.txt").write_text(table(rows) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
