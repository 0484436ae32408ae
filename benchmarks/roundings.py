"""What BF16 costs, rounding by rounding, at reduced width on the CPU: `python -m benchmarks.roundings`.

All 24 vision blocks and 32 language layers at a quarter of the published width, random weights, 256x256 screenshots.
For each way of computing: how far its probabilities are from the reference's (Transformers with PEFT) in float32, and
how often the choice is the reference's where its two best are as far apart as the parity check asks. It says
what to expect of that check, which needs a GPU; it does not replace it.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.full_size import Peer, Weights, encoder, our_engine
from benchmarks.parity import RESULTS, Row
from benchmarks.screens import png, question, screenshot
from engine import Question
from engine.checkpoint.sizes import model_config
from kernels.lora import Activation, AdaptedLinear, lora_linear

Ask = Callable[[Any, Question], torch.Tensor]


def reduced_config() -> dict[str, object]:
    """The published configuration with fewer heads and narrower rows; every layer is there."""
    config: dict[str, Any] = dict(model_config("full"))
    narrow = {"hidden_size": 640, "intermediate_size": 1920, "num_attention_heads": 4, "num_key_value_heads": 1}
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    config["text_config"] = config["text_config"] | narrow | heads
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_heads": 2, "out_hidden_size": 640}
    config["vision_config"] = config["vision_config"] | sizes
    return config


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask all, print a line every eight questions, write `roundings.md`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roundings", description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=48, help="how many (default 48: eight minutes on 2 cores)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for roundings.md")
    options = parser.parse_args(arguments)
    weights, prompts = Weights(raw_config=reduced_config(), device=torch.device("cpu")), encoder(None)
    reference, bf16 = Peer(weights, torch.float32, prompts), Peer(weights, torch.bfloat16, prompts)
    rounded = weights.merged()

    def by_peer(peer: Peer) -> Ask:
        return lambda picture, asked: peer.probabilities(peer.inputs(picture, asked), len(asked.labels))

    def by_us(merged: dict[str, torch.Tensor]) -> Ask:
        engine = our_engine(weights, prompts, merged)
        return lambda picture, asked: torch.tensor(engine.decide(png(picture), [asked]).probabilities[0])

    in_our_bf16 = by_us(rounded)

    def branches_joined(picture: Any, asked: Question) -> torch.Tensor:
        with patch("engine.model.vision.lora_mlp", _mlp_rounded_once_a_layer):
            return in_our_bf16(picture, asked)

    ways = {
        "ours in BF16, as on a CPU": in_our_bf16,
        "ours in BF16, vision's branches as on a GPU": branches_joined,
        "ours in float32, adapter merged in BF16": by_us({name: x.float() for name, x in rounded.items()}),
        "ours in float32, adapter merged in float32": by_us(weights.merged(torch.float32)),
    }
    exact, in_bf16 = by_peer(reference), by_peer(bf16)
    found: dict[str, list[Row]] = {name: [] for name in ("the reference in BF16", *ways)}
    started_s = time.monotonic()
    for number in range(options.questions):
        picture, asked = screenshot(256, 256, seed=number), question("q", 2 + number % 8, seed=5000 + number)
        both = exact(picture, asked), in_bf16(picture, asked)
        found["the reference in BF16"].append(Row(*both, both[1]))
        for name, ask in ways.items():
            found[name].append(Row(*both, ask(picture, asked)))
        if number % 8 == 7:
            print(f"{number + 1} questions, {time.monotonic() - started_s:.0f} s", flush=True)
    report = "\n".join([*_HEAD, *(_line(name, rows) for name, rows in found.items())]) + "\n"
    print(report)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "roundings.md").write_text(
        f"# What BF16 costs, at reduced width\n\n{_made(options.questions)}\n\n{report}"
    )
    return 0


def _mlp_rounded_once_a_layer(
    x: torch.Tensor, first: AdaptedLinear, second: AdaptedLinear, activation: Activation
) -> torch.Tensor:
    """What `kernels.gpu.lora.lora_mlp` computes."""
    for layer, following in ((first, activation), (second, "none")):
        exact = AdaptedLinear(layer.weight.float(), layer.bias.float(), layer.lora)
        x = lora_linear(x.float(), exact, following).to(layer.weight.dtype)  # type: ignore[arg-type]
    return x


_HEAD = ("| computed | largest difference | root mean square | clear choices that agree |", "|---|---|---|---|")


def _line(name: str, rows: Sequence[Row]) -> str:
    differences = [float((row.ours - row.float32).abs().max()) for row in rows]
    rms = math.sqrt(sum(difference**2 for difference in differences) / len(differences))
    clear = [row for row in rows if row.clear]
    agree = sum(row.agrees for row in clear)
    return f"| {name} | {max(differences):.5f} | {rms:.5f} | {agree} of {len(clear)} |"


def _made(questions: int) -> str:
    import transformers

    return (
        f"`python -m benchmarks.roundings --questions {questions}`, {time.strftime('%Y-%m-%d')}, CPU, torch "
        f"{torch.__version__}, transformers {transformers.__version__}: largest difference of a probability from the "
        "reference in float32, a question. Random weights, all layers, a quarter of the published width."
    )


if __name__ == "__main__":
    sys.exit(main())
