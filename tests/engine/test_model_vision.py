"""The vision encoder against Transformers and PEFT, and mutants that the comparison must notice."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from tests.engine import model_cases as cases
from tests.engine import reference as hf
from tests.engine.model_cases import BF16_FACTOR, FLOAT32_TOLERANCE, PAIRS, relative_error


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def error(config: str, case: str, found: torch.Tensor) -> float:
    return relative_error(found, cases.expected(config, case).features)


@pytest.mark.parametrize("config, case", PAIRS)
def test_features_in_float32(config: str, case: str) -> None:
    asked = cases.request(config, case)
    found = cases.model(config).vision(asked.pixel_values, asked.grid)
    assert found.shape == (asked.case.image_tokens, cases.model(config).config.text.hidden_size)
    assert error(config, case, found) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("config", cases.CONFIGS)
def test_features_in_bf16_err_as_the_reference_does(config: str) -> None:
    ours, theirs = [], []
    for case in cases.CASES:
        asked = cases.request(config, case)
        found = cases.model(config, torch.bfloat16).vision(asked.pixel_values, asked.grid)
        assert found.dtype == torch.bfloat16
        ours.append(error(config, case, found))
        theirs.append(error(config, case, cases.expected(config, case, torch.bfloat16).features))
    assert 0 < max(ours) <= BF16_FACTOR * max(theirs)


def test_pixels_rounded_beforehand_are_the_same() -> None:
    asked, encode = cases.request("plain", "three questions"), cases.model("plain", torch.bfloat16).vision
    early = encode(asked.pixel_values.bfloat16(), asked.grid)
    assert torch.equal(early, encode(asked.pixel_values, asked.grid))


@pytest.mark.parametrize("grid", [(2, 6, 10), (1, 6, 8)])
def test_a_grid_that_is_not_the_patches_is_refused(grid: tuple[int, int, int]) -> None:
    asked = cases.request("plain", "three questions")
    with pytest.raises(AssertionError):
        cases.model("plain").vision(asked.pixel_values, grid)


def test_mutant_swapped_axes() -> None:
    asked = cases.request("plain", "three questions")
    rows, columns = asked.case.grid
    found = cases.model("plain").vision(asked.pixel_values, (1, columns, rows))
    assert error("plain", "three questions", found) > 100 * FLOAT32_TOLERANCE


def features_of(paths: hf.TinyCheckpoint) -> torch.Tensor:
    asked = cases.request("plain", "three questions")
    return cases.load(paths).vision(asked.pixel_values, asked.grid)


def test_mutant_lora_scale_one() -> None:
    with cases.checkpoint("plain") as paths:
        settings_file = paths.adapter / "multimodal" / "adapter_config.json"
        settings = json.loads(settings_file.read_text())
        settings_file.write_text(json.dumps({**settings, "lora_alpha": settings["r"]}))
        assert error("plain", "three questions", features_of(paths)) > 10 * FLOAT32_TOLERANCE


LORA_MODULES = [
    f"visual.{module}"
    for module in ("blocks.0.mlp.linear_fc1", "blocks.1.mlp.linear_fc2", "merger.linear_fc1", "merger.linear_fc2")
]


@pytest.mark.parametrize("module", LORA_MODULES)
def test_mutant_adapter_ignored(module: str) -> None:
    with cases.checkpoint("plain") as paths:
        file = paths.adapter / "multimodal" / hf.ADAPTER_FILE
        hf.scale_tensors(file, f"base_model.model.model.{module}.lora_B.weight", 0.0)
        assert error("plain", "three questions", features_of(paths)) > 10 * FLOAT32_TOLERANCE


BASE_TENSORS = [
    *(f"blocks.1.{name}.bias" for name in ("norm1", "norm2", "attn.qkv", "attn.proj")),
    *(f"blocks.0.mlp.{name}.bias" for name in ("linear_fc1", "linear_fc2")),
    *(f"merger.{name}.bias" for name in ("norm", "linear_fc1", "linear_fc2")),
    *("patch_embed.proj.bias", "pos_embed.weight"),
]


@pytest.mark.parametrize("name", BASE_TENSORS)
def test_mutant_missing_bias(name: str) -> None:
    with cases.checkpoint("plain") as paths:
        for shard in paths.base.glob("*.safetensors"):
            hf.scale_tensors(shard, f"model.visual.{name}", 0.0)
        assert error("plain", "three questions", features_of(paths)) > 10 * FLOAT32_TOLERANCE
