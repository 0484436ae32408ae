"""Where a request's GPU time goes, kernel by kernel: `python -m benchmarks.breakdown`. Needs a GPU.

Full size, random weights, a 1280x800 screenshot with one question, launched one by one (graphs hide names) under
PyTorch's profiler. Kernels beside each other count in full, so the sum may exceed the request's time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.full_size import Weights, encoder, environment, our_engine
from benchmarks.latency import RESULTS, Case

REPEATS = 5
NAME_LETTERS = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile, print the kernels by their time, write `breakdown.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; by default the synthetic checkpoints' one")
    parser.add_argument("--size", default="1280x800", help="the screenshot's size (default 1280x800)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for breakdown.json")
    options = parser.parse_args(arguments)
    width, height = (int(side) for side in options.size.split("x"))
    case = Case(width, height, 1)
    ours = our_engine(Weights(), encoder(options.tokenizer), eager=True, image_cache_bytes=0)
    prepared = ours.prepare(case.image(), case.asked())
    for _ in range(3):
        ours.decide_prepared(prepared)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            ours.decide_prepared(prepared)
        torch.cuda.synchronize()
    spent_us: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent_us[event.name].append(event.device_time)
    rows = [
        {
            "kernel": name,
            "calls": len(times) / REPEATS,
            "us": round(sum(times) / len(times), 1),
            "ms": round(sum(times) / REPEATS / 1e3, 3),
        }
        for name, times in sorted(spent_us.items(), key=lambda item: -sum(item[1]))
    ]
    print(f"{'kernel':{NAME_LETTERS}s}{'calls':>7s}{'us each':>9s}{'ms':>8s}")
    for row in rows[:40]:
        print(
            f"{str(row['kernel'])[:NAME_LETTERS]:{NAME_LETTERS}s}{row['calls']:>7.0f}{row['us']:>9.1f}{row['ms']:>8.3f}"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    name = "breakdown.json" if options.size == "1280x800" else f"breakdown-{options.size}.json"
    (options.out / name).write_text(json.dumps({**environment(), "case": case.name, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
