"""Verification looks at what the files hold.

A broken file fails its SHA-256 already: these tests pin the broken checkpoint anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine.checkpoint import checks, published_pin
from tests.checkpoint.breaking import (
    ADAPTER,
    ADAPTER_CONFIG,
    EXPORT,
    FIRST_SHARD,
    SHARD,
    change_config,
    edit_json,
    edit_tensors,
    mismatches,
    repin_all,
    verify,
)
from tests.checkpoints import repin, rewrite, write_manifest


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"r": 8}, "r 8, expected 16"),
        ({"lora_alpha": 16}, "lora_alpha 16, expected 32"),
        ({"target_modules": ["q_proj", "v_proj"]}, "target_modules ['q_proj', 'v_proj'], expected ["),
        ({"target_modules": ".*(q|k)_proj"}, "target_modules '.*(q|k)_proj', expected ["),
        ({"target_modules": "("}, "target_modules '(', expected ["),
        ({"base_model_name_or_path": "Qwen/Qwen3-4B"}, "base_model_name_or_path 'Qwen/Qwen3-4B', expected 'mini-base'"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path None"),
        ({"use_dora": True}, "use_dora is True"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is {'q_proj': 4}"),
    ],
)
def test_another_adapter_config_is_refused(change: dict[str, object], found: str, checkpoint: Path) -> None:
    edit_json(checkpoint / ADAPTER_CONFIG, change_config(**change))
    repin(checkpoint)
    assert any(found in mismatch and "adapter_config.json" in mismatch for mismatch in mismatches(checkpoint))


@pytest.mark.parametrize(
    "change",
    [
        {"base_model_name_or_path": "/models/mini-base"},
        {"target_modules": r".*\.(q|k|v|o|gate|up|down)_proj|.*\.linear_fc[12]"},
    ],
)
def test_the_same_adapter_config_in_other_words_is_not(change: dict[str, object], checkpoint: Path) -> None:
    edit_json(checkpoint / ADAPTER_CONFIG, change_config(**change))
    repin(checkpoint)
    verify(checkpoint)


A = "base_model.model.model.visual.blocks.1.mlp.linear_fc1.lora_A.weight"
Q = "model.language_model.layers.3.self_attn.q_proj.weight"


def test_a_missing_lora_pair_is_named_and_counted(checkpoint: Path) -> None:
    edit_tensors(checkpoint / ADAPTER, lambda tensors: (tensors.pop(A), tensors.pop(A.replace("lora_A", "lora_B"))))
    repin(checkpoint)
    found = mismatches(checkpoint)
    assert found[0] == f"adapter: {A} not found, expected a tensor [16, 64] F32"
    # 8 layers x 3, 2 of them x 4 more, 3 blocks x 2 and the merger's 2.
    counts = "found 39 LoRA modules, 7 of them vision, expected 40 LoRA modules, 8 of them vision"
    assert found[2] == f"{ADAPTER}: {counts}"


@pytest.mark.parametrize(
    ("path", "name", "dtype"),
    [
        (FIRST_SHARD, Q, torch.float16),
        (FIRST_SHARD, Q, torch.float32),
        (SHARD, "model.visual.pos_embed.weight", torch.float32),
        (ADAPTER, A, torch.bfloat16),
        (EXPORT, Q, torch.float16),
    ],
)
def test_another_dtype_is_named(path: str, name: str, dtype: torch.dtype, checkpoint: Path) -> None:
    edit_tensors(checkpoint / path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    repin_all(checkpoint)
    written = {torch.float16: "F16", torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    assert any(f"{name} has dtype {written}, expected" in found for found in mismatches(checkpoint))


def test_the_two_tensors_that_are_published_in_float32_may_be_in_bfloat16(checkpoint: Path) -> None:
    name = "model.language_model.layers.0.linear_attn.A_log"
    edit_tensors(checkpoint / FIRST_SHARD, lambda tensors: tensors.update({name: tensors[name].to(torch.bfloat16)}))
    repin(checkpoint)
    verify(checkpoint)


@pytest.mark.parametrize("path", [FIRST_SHARD, ADAPTER, EXPORT])
def test_another_shape_and_an_extra_and_a_missing_tensor_are_named(path: str, checkpoint: Path) -> None:
    name = A if path == ADAPTER else Q

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1].clone()
        tensors["extra.weight"] = torch.zeros(2)
        del tensors[next(other for other in tensors if other.endswith(("k_proj.weight", "q_proj.lora_B.weight")))]

    edit_tensors(checkpoint / path, change)
    repin_all(checkpoint)
    found = mismatches(checkpoint)
    assert any(f"{name} has shape [" in mismatch for mismatch in found)
    assert any("found the tensor extra.weight, which this layout does not have" in mismatch for mismatch in found)
    assert any("_proj" in mismatch and "not found, expected a tensor" in mismatch for mismatch in found)


def test_a_tensor_in_two_shards_is_named(checkpoint: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.language_model.embed_tokens.weight"] = torch.zeros(260, 64, dtype=torch.bfloat16)

    edit_tensors(checkpoint / SHARD, change)
    repin(checkpoint)
    assert any("embed_tokens.weight is also in model.safetensors-00001" in found for found in mismatches(checkpoint))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda index: index["weight_map"].update({Q: "model.safetensors-00002-of-00002.safetensors"}), f"{Q} in"),
        (lambda index: index["weight_map"].pop(Q), f"{Q} in None, expected"),
        (lambda index: index["weight_map"].update({"extra": "../../x.safetensors"}), "extra in '../../x.safetensors'"),
        (lambda index: index.pop("weight_map"), "weight_map must be an object"),
    ],
    ids=["another shard", "missing", "a way out", "no map"],
)
def test_an_index_that_leads_elsewhere_is_refused(
    change: Callable[[Any], object], found: str, checkpoint: Path
) -> None:
    edit_json(checkpoint / "base/model.safetensors.index.json", change)
    repin(checkpoint)
    beginning = f"base/model.safetensors.index.json: {found}"
    assert any(mismatch.startswith(beginning) for mismatch in mismatches(checkpoint))


def test_a_file_that_is_no_safetensors_is_named(checkpoint: Path) -> None:
    rewrite(checkpoint / ADAPTER, b"\xff" * 100)
    repin(checkpoint)
    assert any(found.startswith(f"{ADAPTER}: not a safetensors file") for found in mismatches(checkpoint))


def shuffle_vocabulary(content: Any) -> None:
    """Take the token Z away: the letter then is no token at all."""
    content["model"]["vocab"]["ZZ"] = content["model"]["vocab"].pop("Z")


def test_a_letter_that_is_not_one_token_is_named(checkpoint: Path) -> None:
    edit_json(checkpoint / "base/tokenizer.json", shuffle_vocabulary)
    repin(checkpoint)
    assert "base/tokenizer.json: the letter Z is [], expected one token" in mismatches(checkpoint)


def test_a_letter_of_two_tokens_is_named(checkpoint: Path) -> None:
    """A normaliser that spells B as two bytes."""
    edit_json(
        checkpoint / "base/tokenizer.json",
        lambda content: content.update(normalizer={"type": "Replace", "pattern": {"String": "B"}, "content": "bb"}),
    )
    repin(checkpoint)
    (found,) = (found for found in mismatches(checkpoint) if "letter" in found)
    assert found.startswith("base/tokenizer.json: the letter B is [")
    assert found.count(",") == 2
    assert found.endswith("], expected one token")


def test_the_image_s_token_must_be_the_config_s(checkpoint: Path) -> None:
    edit_json(checkpoint / "base/config.json", change_config(image_token_id=255))
    repin(checkpoint)
    expected = "base/tokenizer.json: <|image_pad|> is [256], expected image_token_id of config.json, 255"
    assert expected in mismatches(checkpoint)


def test_an_id_without_a_row_in_the_embedding_is_named(checkpoint: Path) -> None:
    decoder = {str(at): {"content": f"<extra {at}>"} for at in range(257, 261)}
    edit_json(checkpoint / "base/tokenizer_config.json", change_config(added_tokens_decoder=decoder))
    repin(checkpoint)
    assert any("has the id 260, expected less than vocab_size, 260" in found for found in mismatches(checkpoint))


def test_the_published_checkpoint_s_letters_are_tokens_32_to_57(mini_checkpoint: Path) -> None:
    """The miniature's letters are single tokens with other ids: right for it, wrong for the published one."""
    stamps = verify(mini_checkpoint).stamps
    found: list[str] = []
    base, adapter = mini_checkpoint / "base", mini_checkpoint / "adapter"
    checks.check_sources(base, adapter, published_pin(), stamps, found)
    letters = [mismatch for mismatch in found if "the letter" in mismatch]
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    (a_id,) = tokenizer.encode("A").ids
    assert letters[0] == f"base/tokenizer.json: the letter A is [{a_id}], expected one token, 32"
    assert len(letters) == 26


def test_images_prepared_in_another_way_are_refused(checkpoint: Path) -> None:
    change = change_config(patch_size=14, image_mean=[0.48, 0.46, 0.41])
    edit_json(checkpoint / "base/preprocessor_config.json", change)
    repin(checkpoint)
    assert mismatches(checkpoint) == (
        "base/preprocessor_config.json: image_mean [0.48, 0.46, 0.41], expected [0.5, 0.5, 0.5]",
        "base/preprocessor_config.json: patch_size 14, expected 16",
    )


def test_a_config_of_another_model_is_refused(checkpoint: Path) -> None:
    edit_json(checkpoint / "base/config.json", change_config(model_type="llama"))
    repin(checkpoint)
    assert any("model_type is 'llama'" in found for found in mismatches(checkpoint))


def test_a_pin_that_leaves_out_a_needed_file_is_refused(checkpoint: Path) -> None:
    for name in ("base/preprocessor_config.json", ADAPTER_CONFIG):
        (checkpoint / name).unlink()
    repin(checkpoint)
    found = mismatches(checkpoint)
    for name in ("base/preprocessor_config.json", ADAPTER_CONFIG):
        assert f"{name}: is not listed as a required file; every checkpoint of this layout has it" in found


# The export's record.


def test_an_export_of_other_sources_is_refused(checkpoint: Path) -> None:
    edit_json(checkpoint / ADAPTER_CONFIG, change_config(lora_dropout=0.5))
    repin(checkpoint, export=False)
    found = mismatches(checkpoint)
    assert any("export/manifest.json: adapter is not what the pin says" in mismatch for mismatch in found)
    assert any("export/manifest.json: was made under the pin" in mismatch for mismatch in found)


@pytest.mark.parametrize("name", ["../base/config.json", "/etc/passwd", "manifest.json", "a//b"])
def test_a_manifest_names_only_files_of_the_export(name: str, checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / "export/manifest.json").read_bytes())
    manifest["files"][name] = manifest["files"]["config.json"]
    write_manifest(checkpoint, manifest)
    assert any("must stay inside the export's folder" in found for found in mismatches(checkpoint))


def test_an_export_with_another_config_or_tokenizer_is_refused(checkpoint: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        rewrite(checkpoint / "export" / name, (checkpoint / "export" / name).read_bytes() + b" ")
    repin_all(checkpoint)
    found = mismatches(checkpoint)
    assert len(found) == 2
    assert all("expected the base's own" in mismatch for mismatch in found)


def test_a_manifest_with_the_same_contents_in_another_form_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "export/manifest.json"
    rewrite(path, path.read_bytes() + b" ")
    (found,) = mismatches(checkpoint)
    assert found.startswith("export/manifest.json: its bytes are not in the form")


def test_an_export_without_a_manifest_is_unfinished(checkpoint: Path) -> None:
    (checkpoint / "export/manifest.json").unlink()
    assert any("export/manifest.json: cannot be read" in found for found in mismatches(checkpoint))


def test_without_an_own_pin_the_published_one_holds(checkpoint: Path) -> None:
    (checkpoint / "pin.json").unlink()
    found = mismatches(checkpoint)
    assert any(f"expected {published_pin().base.files['config.json'].size_bytes} bytes" in one for one in found)


def test_a_dangling_pin_is_not_the_published_one(checkpoint: Path) -> None:
    (checkpoint / "pin.json").unlink()
    (checkpoint / "pin.json").symlink_to(checkpoint / "nowhere")
    assert any("the pin file cannot be read" in found for found in mismatches(checkpoint))
