"""A whole decision, from a file to probabilities, against Transformers + PEFT over the same checkpoint files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open

from engine import CheckpointPaths, Engine, Question, Refusal, Stats, open_checkpoint
from engine import image as images
from engine.checkpoint.tokenizer import load_tokenizer
from engine.png import FilteredRows
from engine.prompt import PromptEncoder
from engine.warm_up import picture
from kernels.patches import pack_patches
from tests.engine.reference import TinyCheckpoint, load_reference

# Between our packed pass and the reference's whole prompts, both in float32: largest difference of a probability.
FLOAT32_TOLERANCE = 1e-4

SCREENSHOT = (Path(__file__).parents[2] / "examples/pages/settings-1280x800.png").read_bytes()
TWO = Question("two", "Save the document", ("Save", "Cancel"))
FIVE = Question("five", "", tuple(f"Choice {n}" for n in range(5)))
ALL = Question("all", "Pick the row named in the title", tuple(f"Row {n}: open item {n * 919}" for n in range(26)))
ONE = Question("one", "Continue", ("Continue",))


@pytest.fixture(scope="module")
def paths(tiny_checkpoint: Path) -> CheckpointPaths:
    return open_checkpoint(tiny_checkpoint)


@pytest.fixture(scope="module")
def engine(paths: CheckpointPaths) -> Engine:
    return Engine.load(paths, device="cpu")


@pytest.fixture(scope="module")
def exact(paths: CheckpointPaths) -> Engine:
    return Engine.load(paths, device="cpu", dtype=torch.float32)


Ask = Callable[[bytes, Question], list[float]]


@pytest.fixture(scope="module")
def ask_reference(paths: CheckpointPaths) -> Ask:
    """The reference in float32, one whole prompt at a time, over the language weights as they were merged into BF16."""
    config = json.loads(paths.config.read_bytes())
    model = load_reference(TinyCheckpoint(paths.base, paths.adapter, paths.export, config), torch.float32)
    use_merged_language(model, paths.export)
    encoder = PromptEncoder(load_tokenizer(paths.base))

    @torch.inference_mode()
    def ask(image: bytes, question: Question) -> list[float]:
        pixels = images.resize(images.decode(image))
        rows, columns = pixels.shape[0] // 16, pixels.shape[1] // 16
        ids = torch.tensor([encoder.prompt_ids(question, rows * columns // 4)])
        output = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == encoder.image_pad_id).long(),
            pixel_values=pack_patches(pixels),
            image_grid_thw=torch.tensor([[1, rows, columns]]),
            logits_to_keep=1,
        )
        letters = list(encoder.letter_ids[: len(question.labels)])
        probabilities: list[float] = output.logits[0, -1, letters].softmax(-1).tolist()
        return probabilities

    return ask


def use_merged_language(model: PeftModel, export: Path) -> None:
    parameters = dict(model.named_parameters())
    copied = 0
    for file in sorted(export.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping, it only has keys()
                module = f"base_model.model.{name.removesuffix('.weight')}"
                target = parameters.get(f"{module}.base_layer.weight", parameters.get(f"{module}.weight"))
                if target is None:
                    target = parameters[module]
                target.data.copy_(tensors.get_tensor(name))
                copied += 1
    for name, parameter in parameters.items():
        if ".language_model." in name and ".lora_B." in name:
            parameter.data.zero_()
    assert copied > 20


def test_a_picture_whose_filters_are_left_to_the_device_gives_the_same_bits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.decide(SCREENSHOT, [TWO])
    assert isinstance(engine.prepare(SCREENSHOT, [TWO]).picture, torch.Tensor)
    monkeypatch.setattr(engine, "_filtered_pictures", True)
    assert isinstance(engine.prepare(SCREENSHOT, [TWO]).picture, FilteredRows)
    assert engine.decide(SCREENSHOT, [TWO]).probabilities == expected.probabilities


@pytest.mark.parametrize(
    ("image", "questions"),
    [
        (SCREENSHOT, (TWO, FIVE, ALL)),
        (picture(1, 1), (ONE, TWO)),
        (picture(200, 1), (FIVE,)),
        (picture(383, 257), (ALL, TWO, FIVE, ONE, TWO, ALL, FIVE, TWO)),
    ],
    ids=["screenshot", "1x1", "200x1", "odd size, 8 questions"],
)
def test_float32_equals_the_reference(
    exact: Engine, ask_reference: Ask, image: bytes, questions: tuple[Question, ...]
) -> None:
    decision = exact.decide(image, questions)
    for question, ours in zip(questions, decision.probabilities, strict=True):
        assert ours == pytest.approx(ask_reference(image, question), abs=FLOAT32_TOLERANCE), question.name


def test_the_pixels_reach_the_answer(exact: Engine) -> None:
    one, other = (exact.decide(picture(*size), (ALL,)).probabilities[0] for size in ((320, 256), (256, 320)))
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 10 * FLOAT32_TOLERANCE


def test_the_same_job_has_the_same_bits_whatever_ran_before(engine: Engine) -> None:
    first = engine.decide(SCREENSHOT, (TWO, ALL))
    engine.decide(picture(64, 64), (FIVE,))
    again = engine.decide(SCREENSHOT, (TWO, ALL))
    assert again.probabilities == first.probabilities


def test_usage_counts_every_questions_whole_prompt(engine: Engine, paths: CheckpointPaths) -> None:
    encoder = PromptEncoder(load_tokenizer(paths.base))
    decision = engine.decide(picture(256, 256), (TWO, ALL))
    assert decision.input_tokens == sum(len(encoder.prompt_ids(question, 64)) for question in (TWO, ALL))
    assert all(ms > 0 for ms in (decision.timings.prepare_ms, decision.timings.vision_ms, decision.timings.language_ms))


def test_every_prompt_that_is_too_long_is_named(engine: Engine) -> None:
    long = "word " * 4000
    questions = (Question("a", long, ("x",)), TWO, Question("b", "", (long, "y")))
    with pytest.raises(Refusal) as refusal:
        engine.decide(picture(64, 64), questions)
    assert [(fault.loc, fault.code) for fault in refusal.value.faults] == [
        ("questions.a", "prompt_too_long"),
        ("questions.b", "prompt_too_long"),
    ]


def test_on_the_cpu_nothing_is_kept_and_the_counts_say_so(engine: Engine) -> None:
    engine.decide(picture(64, 64), (TWO,))
    assert engine.stats() == Stats(0, 0, 0, 0, 0, 0)


def test_a_synthetic_checkpoint_answers_under_its_own_name(engine: Engine) -> None:
    assert engine.identity.name.startswith("synthetic-tiny-0@")
    assert "cua-ai" not in engine.identity.name


def test_a_loaded_engine_warms_up(engine: Engine) -> None:
    phases: set[str] = set()
    engine.warm_up(lambda phase, done, total: phases.add(phase))
    assert phases == {"warm up"}
