"""Are our probabilities the reference's? `python -m benchmarks.parity` on a GPU; exit code 1 on any miss.

The rule and the sets are fixed here, before any run. The reference is Transformers with PEFT in float32 (TF32 off) and
in BF16, over the same random weights at full size. A set passes if

- token ids, grids, all three position axes and `pixel_values` are the reference's, to the bit;
- the largest difference of a probability from the float32 reference is at most `FACTOR` times the BF16 reference's
  largest difference over the set, plus `SLACK`;
- the choice is the float32 reference's wherever its two best are at least `MARGIN` apart, and at least `CLEAR_SHARE` of
  the questions have that margin: a set without clear questions proves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.full_size import Peer, Weights, encoder, environment, our_engine
from benchmarks.screens import png, question, screenshot
from engine import Engine, Question
from engine.image import pixels_of, resize
from kernels.patches import pack_patches

FACTOR = 2.0
SLACK = 0.01
MARGIN = 0.05
CLEAR_SHARE = 0.75
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    """A screenshot's size in pixels and the number of options of each of its questions."""

    width: int
    height: int
    options: tuple[int, ...]


# Eight questions on common screens; then the ends of what is allowed, eleven questions.
SETS: dict[str, tuple[Case, ...]] = {
    "standard": (
        Case(1280, 800, (4,)),
        Case(1280, 800, (26,)),
        Case(1024, 768, (2, 6)),
        Case(512, 512, (3,)),
        Case(640, 480, (10,)),
        Case(256, 256, (5,)),
        Case(800, 600, (1,)),
    ),
    "boundary": (
        Case(1, 1, (4,)),
        Case(200, 1, (3,)),
        Case(383, 257, (26,)),
        Case(1024, 1024, (26, 2, 3, 5, 8, 13, 1, 26)),
    ),
}


@dataclass(frozen=True)
class Row:
    """One question's probabilities by the two references and by us, `[options]` each."""

    float32: torch.Tensor
    bfloat16: torch.Tensor
    ours: torch.Tensor

    @property
    def clear(self) -> bool:
        """Whether the float32 reference's two best options are far enough apart; a single option always is."""
        best = self.float32.topk(min(2, len(self.float32))).values
        return len(best) == 1 or float(best[0] - best[1]) >= MARGIN

    @property
    def agrees(self) -> bool:
        """Whether the choice is the float32 reference's."""
        return int(self.ours.argmax()) == int(self.float32.argmax())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all sets, print the table, write `parity.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; by default the synthetic checkpoints' one")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for parity.json")
    options = parser.parse_args(arguments)
    assert not torch.backends.cuda.matmul.allow_tf32, "the float32 reference needs TF32 off"
    prompts = encoder(options.tokenizer)
    weights = Weights()
    ours = our_engine(weights, prompts)
    exact = Peer(weights, torch.float32, prompts)
    rounded = Peer(weights, torch.bfloat16, prompts)
    print(f"rule: max |p - p32| <= {FACTOR} x max |p16 - p32| + {SLACK}; same choice where the margin is >= {MARGIN};")
    print(f"      at least {CLEAR_SHARE:.0%} of a set's questions have that margin; inputs identical to the bit")
    rows = [_report(name, _run(cases, ours, exact, rounded)) for name, cases in SETS.items()]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "parity.json").write_text(json.dumps({**environment(), "rows": rows}, indent=2) + "\n")
    return 0 if all(row["passed"] for row in rows) else 1


def _run(cases: tuple[Case, ...], ours: Engine, exact: Peer, rounded: Peer) -> list[Row]:
    found: list[Row] = []
    for number, case in enumerate(cases):
        picture = screenshot(case.width, case.height, seed=number)
        asked = [question(f"q{n}", count, seed=100 * number + n) for n, count in enumerate(case.options)]
        answers = ours.decide(png(picture), asked).probabilities
        for one, answer in zip(asked, answers, strict=True):
            inputs = exact.inputs(picture, one)
            _check_inputs(ours, exact, png(picture), one, inputs)
            theirs = [peer.probabilities(inputs, len(one.labels)) for peer in (exact, rounded)]
            found.append(Row(*theirs, torch.tensor(answer)))
    return found


def _check_inputs(ours: Engine, peer: Peer, image: bytes, asked: Question, inputs: object) -> None:
    """Ids, grid, positions and pixel values, ours and the reference's, must be identical."""
    prepared = ours.prepare(image, [asked])
    assert [list(prepared.grid)] == inputs.grid.tolist(), (prepared.grid, inputs.grid)  # type: ignore[attr-defined]
    assert torch.equal(prepared.ids, inputs.ids[0]), "token ids differ"  # type: ignore[attr-defined]
    assert torch.equal(prepared.positions, peer.positions(inputs)), "positions differ"  # type: ignore[arg-type]
    pixel_values = inputs.pixel_values  # type: ignore[attr-defined]
    for device in ("cpu", ours.device):
        assert torch.equal(pack_patches(resize(pixels_of(prepared.picture.to(device)))).cpu(), pixel_values), (
            f"pixels differ on {device}"
        )


def _report(name: str, rows: list[Row]) -> dict[str, object]:
    reference_dp = max(float((row.bfloat16 - row.float32).abs().max()) for row in rows)
    max_dp = max(float((row.ours - row.float32).abs().max()) for row in rows)
    allowed = FACTOR * reference_dp + SLACK
    clear = [row for row in rows if row.clear]
    agree = sum(row.agrees for row in clear)
    passed = max_dp <= allowed and agree == len(clear) and len(clear) >= CLEAR_SHARE * len(rows)
    print(
        f"{name:9s} {len(rows):2d} questions  max|dp| {max_dp:.4f}  allowed {allowed:.4f}  BF16 reference "
        f"{reference_dp:.4f}  choices {agree}/{len(clear)} clear  {'passed' if passed else 'MISSED'}"
    )
    return {
        "set": name,
        "questions": len(rows),
        "max_dp": max_dp,
        "allowed": allowed,
        "reference_bf16_dp": reference_dp,
        "clear_questions": len(clear),
        "choices_agree": agree == len(clear),
        "passed": passed,
    }


if __name__ == "__main__":
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    sys.exit(main())
