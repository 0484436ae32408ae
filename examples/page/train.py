"""Train the page's checkpoint from scratch: pixels and a question in, the right option's letter out.

The forward pass is the engine's own torch path, batched by `torch.func.vmap` and run in float32. Sheets of pages come
from `examples.page.render`. Some questions say the page's state in words, at first half of them: from these the model
learns to find an option's letter before it can read pictures. A probe that reads the state from the image's mean row
helps the vision encoder to begin; it is thrown away.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.config import VISION_ROPE_THETA, ModelConfig
from engine.model import Segments
from engine.prompt import LETTERS, PromptEncoder, Question, positions
from examples.page.model import build, initial_tensors, raw_config, tokenizer
from examples.page.page import HEIGHT_PIXELS, WIDTH_PIXELS, Look, questions
from examples.page.render import COLUMNS, LOOKS, ROWS, SHEET
from kernels.patches import pack_patches
from kernels.rotary import inverse_frequencies

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

GRID = (1, HEIGHT_PIXELS // 16, WIDTH_PIXELS // 16)
QUESTIONS = ("state", "next")
MAX_OPTIONS = 4
# Wordings and orders of each page's questions, and how many of them say the state.
VARIANTS, TOLD = 10, 3
# The share of questions that say it: large at first, small after this part of the time.
TOLD_FIRST, TOLD_FIRST_UNTIL, TOLD_LATER = 0.5, 0.3, 0.1
LEARNING_RATE, WEIGHT_DECAY, CLIP, WARM_UP_STEPS = 1.5e-3, 0.05, 1.0, 150
PROBE_WEIGHT = 0.5
MAX_SHIFT_PIXELS = 8
SAVE_EVERY_S = 15.0
REPORT_STEPS = 50
# Before a step is captured.
EAGER_STEPS = 5


class Pages(NamedTuple):
    """`pixels` `uint8 [N, H, W, 3]`, `states` `[N, 2]` float32: enabled, saved."""

    pixels: Tensor
    looks: list[Look]
    states: Tensor


class Asked(NamedTuple):
    """Questions of pages: tails `[N, V, 2, L]` padded on the right, each one's last row `[N, V, 2]`, its right letter,
    and how many letters are in use."""

    tails: Tensor
    last: Tensor
    right: Tensor
    options: Tensor


def load_pages(folder: Path, device: torch.device, most: int | None = None) -> Pages:
    """All pages of a folder of sheets."""
    looks = [Look(**entry) for entry in json.loads((folder / LOOKS).read_bytes())][:most]
    per_sheet = COLUMNS * ROWS

    def cut(number: int) -> Tensor:
        sheet = np.asarray(Image.open(folder / SHEET.format(number=number)).convert("RGB"))
        tiles = torch.from_numpy(sheet.copy()).view(ROWS, HEIGHT_PIXELS, COLUMNS, WIDTH_PIXELS, 3).transpose(1, 2)
        return tiles.flatten(0, 1)

    with ThreadPoolExecutor() as pool:
        sheets = pool.map(cut, range(math.ceil(len(looks) / per_sheet)))
        pixels = torch.cat([sheet.to(device) for sheet in sheets])[: len(looks)]
    states = torch.tensor([[look.enabled, look.saved] for look in looks], dtype=torch.float32, device=device)
    return Pages(pixels, looks, states)


def ask(looks: Sequence[Look], encoder: PromptEncoder, device: torch.device, seed: int) -> Asked:
    """Every page's questions in several wordings and orders; the first `TOLD` say the state."""
    rng = random.Random(seed)
    tails, rights, counts = [], [], []
    for look in looks:
        for variant in range(VARIANTS):
            asked = questions(look, rng)
            for name in QUESTIONS:
                goal, options, right = asked[name]
                if variant < TOLD:
                    said = f"{'on' if look.enabled else 'off'} and {'' if look.saved else 'not '}saved"
                    goal = f"{goal} The switch is {said}."
                tails.append(encoder.tail_ids(Question(name, goal, tuple(options.values()))))
                rights.append(list(options).index(right))
                counts.append(len(options))
    width = max(map(len, tails))
    padded = torch.zeros(len(tails), width, dtype=torch.int32)
    for row, tail in zip(padded, tails, strict=True):
        row[: len(tail)] = torch.tensor(tail, dtype=torch.int32)
    shape = (len(looks), VARIANTS, len(QUESTIONS))
    last = torch.tensor([len(tail) - 1 for tail in tails])
    flat = (padded.view(*shape, width), *(torch.as_tensor(x).view(shape) for x in (last, rights, counts)))
    return Asked(*(part.to(device) for part in flat))


class Batched:
    """The model over batches of pages, and all that stays the same from page to page.

    A question's tokens follow the image's in one sequence; what pads it on the right is never looked at.
    """

    def __init__(self, config: ModelConfig, encoder: PromptEncoder, tail_tokens: int, device: torch.device) -> None:
        self._config = config
        self.width = config.text.hidden_size
        head, rows, columns = len(encoder.head_ids), GRID[1] // 2, GRID[2] // 2
        self._first = head + rows * columns
        self.segments = Segments(self._first + tail_tokens, ())
        self._positions = positions(head, (rows, columns), tail_tokens).to(device)
        self._head = torch.tensor(encoder.head_ids, device=device)
        self._letters = torch.tensor(encoder.letter_ids[:MAX_OPTIONS], device=device)
        vision, text = config.vision, config.text
        self._frequencies = (
            inverse_frequencies(vision.head_dim // 2, VISION_ROPE_THETA).to(device),
            inverse_frequencies(text.rotary_dims, text.rope_theta).to(device),
        )

    def logits(self, tensors: Tensors, pixels: Tensor, tails: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Letters' logits `[B, 2, MAX_OPTIONS]` and the images' mean rows `[B, D]`."""
        model = build(self._config, tensors)
        vision = replace(model.vision, frequencies=self._frequencies[0])
        language = replace(model.language, frequencies=self._frequencies[1])
        letters = language.embedding[self._letters]
        head = language.embed(self._head)
        tables = vision.grid_tables(GRID)

        def see(pixels: Tensor) -> Tensor:
            return vision(pack_patches(pixels), GRID, tables)

        def answer(features: Tensor, tail: Tensor, row: Tensor) -> Tensor:
            hidden = torch.cat([head, features, language.embed(tail)])
            *_, end = language.run(hidden, self._positions, self.segments)
            return (end.normed[row] @ letters.T)[0]

        with torch_path(), sdpa_kernel(SDPBackend.MATH):
            features = torch.func.vmap(see)(pixels)
            each = features.repeat_interleave(last.shape[1], 0)
            rows = (last.flatten() + self._first)[:, None]
            found: Tensor = torch.func.vmap(answer)(each, tails.flatten(0, 1), rows)
        return found.view(*last.shape, MAX_OPTIONS), features.mean(1)


@contextmanager
def torch_path() -> Iterator[None]:
    """Run the torch references of all kernels, on a GPU too: the fused kernels have no gradients."""
    torch.Tensor.is_cuda = property(lambda tensor: False)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.is_cuda


class Step:
    """One step of training over fixed buffers. On a GPU it can be captured: it is thousands of small launches."""

    def __init__(self, batched: Batched, tensors: Tensors, pages: Pages, asked: Asked, batch: int) -> None:
        device = pages.pixels.device
        self._batched, self._tensors = batched, tensors
        self._probe = torch.nn.Linear(batched.width, 2, device=device)
        self._all = [*tensors.values(), *self._probe.parameters()]
        wide = [tensor for tensor in tensors.values() if tensor.dim() > 1]
        thin = [tensor for tensor in self._all if not any(tensor is other for other in wide)]
        self.rate = torch.zeros((), device=device)
        self._optimizer = torch.optim.AdamW(
            [{"params": wide, "weight_decay": WEIGHT_DECAY}, {"params": thin, "weight_decay": 0.0}],
            lr=self.rate if device.type == "cuda" else 0.0,
            betas=(0.9, 0.98),
            capturable=device.type == "cuda",
        )
        self._inputs = [x[:batch].clone() for x in (pages.pixels, pages.states, *(x[:, 0] for x in asked))]
        self.sums = torch.zeros(5, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor) -> None:
        """Learn from a batch: pixels, states, and what is asked."""
        for ours, theirs in zip(self._inputs, inputs, strict=True):
            ours.copy_(theirs)
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def capture(self) -> str:
        """Capture the step, which must have run a few times on this stream; "" or why it could not be captured."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self._run()
        except RuntimeError as error:
            return str(error)
        self._graph = graph
        return ""

    def _run(self) -> None:
        pixels, states, *asked = self._inputs
        if self._graph is None and pixels.device.type != "cuda":
            for group in self._optimizer.param_groups:
                group["lr"] = float(self.rate)
        loss, hits, probe_hits = losses(self._batched, self._tensors, self._probe, pixels, states, Asked(*asked))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._all, CLIP)
        self._optimizer.step()
        self.sums += torch.stack([loss.detach(), *hits.float().mean(0), *probe_hits.float().mean(0)])


def train(options: argparse.Namespace) -> None:
    """Train until the time is over; the best weights so far are written again and again."""
    started_s = time.monotonic()
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    shifts = random.Random(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    vocabulary = tokenizer()
    encoder, config = PromptEncoder(vocabulary), ModelConfig.from_dict(raw_config(vocabulary))
    pages = load_pages(options.sheets, device, options.pages)
    held = max(1, len(pages.looks) // 20)
    asked = ask(pages.looks, encoder, device, options.seed)
    batched = Batched(config, encoder, asked.tails.shape[-1], device)
    start = load_file(options.resume) if options.resume else initial_tensors(config, options.seed)
    tensors = {name: tensor.to(device).requires_grad_() for name, tensor in start.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    vocabulary.save(str(options.out / "tokenizer.json"))
    log = (options.out / "log.jsonl").open("w")
    count, setup_s = sum(map(torch.numel, start.values())), round(time.monotonic() - started_s, 1)
    tell(log, pages=len(pages.looks), tail_tokens=asked.tails.shape[-1], parameters=count, setup_s=setup_s)
    step = Step(batched, tensors, pages, asked, options.batch)
    best = 0.0

    def keep_better(number: int) -> None:
        nonlocal best
        rates = kept_apart(batched, tensors, pages, asked, held, options.batch)
        tell(log, step=number, kept_apart=held, **rates)
        if sum(rates.values()) >= best:
            best = sum(rates.values())
            save(options.out, tensors)

    began_s = saved_s = time.monotonic()
    for number in itertools.count(1):
        spent = (time.monotonic() - began_s) / options.seconds
        if spent >= 1.0:
            break
        rate = options.rate * min(1.0, number / WARM_UP_STEPS) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * spent)))
        step.rate.fill_(rate)
        at = torch.randint(held, len(pages.looks), (options.batch,), device=device)
        variant = torch.where(
            torch.rand(options.batch, device=device) < (TOLD_FIRST if spent < TOLD_FIRST_UNTIL else TOLD_LATER),
            torch.randint(0, TOLD, (options.batch,), device=device),
            torch.randint(TOLD, VARIANTS, (options.batch,), device=device),
        )
        shift = [shifts.randint(-MAX_SHIFT_PIXELS, MAX_SHIFT_PIXELS) for _ in range(2)]
        step(pages.pixels[at].roll(shift, dims=(1, 2)), pages.states[at], *(tensor[at, variant] for tensor in asked))
        if number == EAGER_STEPS and device.type == "cuda" and not options.eager:
            tell(log, not_captured=step.capture(), s=round(time.monotonic() - began_s, 1))
        if number % options.report == 0:
            mean = [round(value, 4) for value in (step.sums / options.report).tolist()]
            tell(log, step=number, s=round(time.monotonic() - began_s, 1), rate=round(rate, 6), loss=mean[0],
                 state=mean[1], next=mean[2], probe=mean[3:])  # fmt: skip
            step.sums.zero_()
            if time.monotonic() - saved_s > SAVE_EVERY_S:
                keep_better(number)
                saved_s = time.monotonic()
    keep_better(number)


@torch.no_grad()
def kept_apart(
    batched: Batched, tensors: Tensors, pages: Pages, asked: Asked, count: int, batch: int
) -> dict[str, float]:
    """The share of right answers to the first pages' last wordings, by question."""
    hits = []
    for rows in torch.split(torch.arange(count, device=pages.pixels.device), batch):
        part = Asked(*(x[rows, -1] for x in asked))
        logits, _ = batched.logits(tensors, pages.pixels[rows], part.tails, part.last)
        hits.append(in_use(logits, part.options).argmax(-1) == part.right)
    rates = torch.cat(hits).float().mean(0).tolist()
    return dict(zip(QUESTIONS, (round(rate, 4) for rate in rates), strict=True))


def losses(
    batched: Batched, tensors: Tensors, probe: torch.nn.Linear, pixels: Tensor, states: Tensor, asked: Asked
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, which answers `[B, 2]` are right, and which states `[B, 2]` the probe reads rightly."""
    logits, mean = batched.logits(tensors, pixels, asked.tails, asked.last)
    logits = in_use(logits, asked.options)
    seen = probe(mean)
    loss = F.cross_entropy(logits.flatten(0, 1), asked.right.flatten())
    loss = loss + PROBE_WEIGHT * F.binary_cross_entropy_with_logits(seen, states)
    return loss, logits.argmax(-1) == asked.right, (seen > 0) == (states > 0.5)


def in_use(logits: Tensor, options: Tensor) -> Tensor:
    """The logits, without those of letters that a question does not use."""
    unused = torch.arange(MAX_OPTIONS, device=logits.device) >= options[..., None]
    return logits.masked_fill(unused, float("-inf"))


def save(out: Path, tensors: dict[str, Tensor]) -> None:
    """Write the float32 tensors; the file is whole or the one before."""
    part = out / "weights.part"
    save_file({name: tensor.detach().cpu() for name, tensor in tensors.items()}, part)
    part.replace(out / "weights.safetensors")


def tell(log: object, **facts: object) -> None:
    """One line, for the eye and for the log."""
    line = json.dumps(facts)
    print(line, flush=True)
    print(line, file=log, flush=True)  # type: ignore[call-overload]


def main() -> int:
    """Parse and train."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python -m examples.page.train --sheets .train --out .train/run --device cuda:0",
    )
    parser.add_argument("--sheets", type=Path, required=True, help="a folder of `examples.page.render`")
    parser.add_argument("--out", type=Path, required=True, help="the folder for weights.safetensors and log.jsonl")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0 (default cpu)")
    parser.add_argument("--seconds", type=float, default=150.0, help="how long to train (default 150)")
    parser.add_argument("--batch", type=int, default=128, help="pages a step, two questions each (default 128)")
    parser.add_argument("--rate", type=float, default=LEARNING_RATE, help=f"learning rate (default {LEARNING_RATE})")
    parser.add_argument("--pages", type=int, help="use only the first so many")
    parser.add_argument("--report", type=int, default=REPORT_STEPS, help="steps between lines (default 50)")
    parser.add_argument("--eager", action="store_true", help="on a GPU, launch every kernel instead of a captured step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="weights to go on from")
    options = parser.parse_args()
    # A stream of its own: the default one cannot be captured.
    with torch.cuda.stream(torch.cuda.Stream()) if options.device != "cpu" else nullcontext():  # type: ignore[no-untyped-call]
        train(options)
    return 0


if __name__ == "__main__":
    assert len(LETTERS) > MAX_OPTIONS
    sys.exit(main())
