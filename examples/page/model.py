"""The tiny model of the page: its sizes, its tokenizer, its tensors by their published names, and writing a checkpoint.

The architecture and the layout are those of the published checkpoint; only the numbers are small.
`python -m examples.page.model RUN OUT` writes the checkpoint of a training run.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.checkpoint import CheckpointPaths, load_pin, open_checkpoint
from engine.checkpoint.export import export_checkpoint
from engine.checkpoint.layout import LORA_ALPHA, LORA_RANK, LoraModule, adapter_tensors, base_tensors, lora_modules
from engine.checkpoint.paths import PIN
from engine.checkpoint.pins import ADAPTER_FOLDER, Pin
from engine.checkpoint.sizes import model_config
from engine.checkpoint.synthesize import make_pin, plan_tensor_files, small_files
from engine.config import AdapterConfig, ModelConfig
from engine.model import Model
from engine.model.weights import build_model
from engine.prompt import HEAD_TEXT, Question, tail_text
from examples.page.page import TRAINING

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

NAME = "cua-page-tiny"
COMMITTED = Path(__file__).with_name("checkpoint")
PROVENANCE = {"source": "trained from scratch on generated settings pages: examples/page"}
SPECIAL_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<think>", "</think>", "<|endoftext|>"),
)
VOCABULARY = 1024
OTHER_WORDS = (
    *("Click", "Press", "the", "switch", "is", "on", "off", "Turn", "Switch", "and", "save", "it", "Stop", "all"),
    *("done", "nothing", "left", "to", "do", "Is"),
)
SCALE = LORA_ALPHA / LORA_RANK


def tokenizer() -> Tokenizer:
    """Byte-level BPE, trained on the prompt's constant text and on single words, so that both are few tokens.

    A quotation mark is always a token of its own: labels begin and end there.
    """
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex('"'), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # All options, so that every letter's line is known; the marks around goal and labels cut the text there.
    constant = HEAD_TEXT + tail_text(Question("q", '"', ('"',) * 26))
    for token in SPECIAL_TOKENS:
        constant = constant.replace(token, '"')
    words = {form for word in _words() for form in (word, f" {word}")}
    built.train_from_iterator([constant] * 20 + sorted(words) * 10, trainer)
    built.add_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return built


def _words() -> Iterator[str]:
    for texts in TRAINING:
        for text in texts:
            yield from text.split()
    yield from OTHER_WORDS
    yield from ("Click '", "Press '", "' ", "'")


def raw_config(vocabulary: Tokenizer) -> dict[str, object]:
    """The contents of `config.json`."""
    raw = copy.deepcopy(model_config("tiny"))
    ids = {token: vocabulary.token_to_id(token) for token in SPECIAL_TOKENS}
    raw["image_token_id"], raw["video_token_id"] = ids["<|image_pad|>"], ids["<|video_pad|>"]
    raw["vision_start_token_id"], raw["vision_end_token_id"] = ids["<|vision_start|>"], ids["<|vision_end|>"]
    text, vision = raw["text_config"], raw["vision_config"]
    assert isinstance(text, dict) and isinstance(vision, dict)
    text |= {
        "vocab_size": VOCABULARY,
        "eos_token_id": ids["<|endoftext|>"],
        "hidden_size": 128,
        "intermediate_size": 256,
        "mtp_num_hidden_layers": 0,
    }
    vision |= {"hidden_size": 128, "intermediate_size": 256, "out_hidden_size": 128}
    return raw


def initial_tensors(config: ModelConfig, seed: int) -> Tensors:
    """Random float32 tensors to train from, by their published names."""
    generator = torch.Generator().manual_seed(seed)
    layers = config.text.num_hidden_layers

    def values(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(".A_log"):
            return torch.empty(shape).uniform_(0.02, 2.0, generator=generator).log()
        if name.endswith(".dt_bias"):
            return torch.empty(shape).uniform_(-4.0, 0.0, generator=generator)
        if name.endswith((".embed_tokens.weight", ".pos_embed.weight")):
            return torch.randn(shape, generator=generator) * 0.04
        if name.endswith((".bias", ".lora_B.weight")):
            return torch.zeros(shape)
        if len(shape) == 1:
            multiplies = name.startswith("model.visual.") or name.endswith(".linear_attn.norm.weight")
            return torch.full(shape, 1.0 if multiplies else 0.0)
        deviation = 0.8 * torch.Size(shape[1:]).numel() ** -0.5
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "attn.proj.weight", "fc2.weight")):
            deviation *= (2 * layers) ** -0.5
        drawn: Tensor = torch.randn(shape, generator=generator) * deviation
        return drawn

    return {spec.name: values(spec.name, spec.shape) for spec in (*base_tensors(config, 0), *adapter_tensors(config))}


def build(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Model:
    """The engine's model over these tensors; differentiable, the language's LoRA pairs merged on the way.

    Its rotary frequencies are on the CPU.
    """
    merged = dict(tensors)
    for module in lora_modules(config):
        if not module.is_vision:
            merged[module.weight_name] = tensors[module.weight_name] + _pair(module, tensors)

    def take(name: str, *shape: int) -> Tensor:
        assert merged[name].shape == shape, (name, merged[name].shape, shape)
        return merged[name]

    return build_model(config, AdapterConfig(LORA_RANK, SCALE), take, take, take, torch.device("cpu"))


def _pair(module: LoraModule, tensors: Mapping[str, Tensor]) -> Tensor:
    pair: Tensor = torch.matmul(tensors[module.b_name], tensors[module.a_name]) * SCALE
    return pair


def write_checkpoint(out: Path, tensors: Mapping[str, Tensor], vocabulary: Tokenizer) -> Pin:
    """Write `out/base`, `out/adapter` and `out/pin.json`, the base in BF16, the adapter in float32."""
    raw = raw_config(vocabulary)
    planned = plan_tensor_files(raw)
    texts = {"tokenizer.json": vocabulary.to_str().encode(), "tokenizer_config.json": json.dumps({}).encode()}
    (out / "base").mkdir(parents=True)
    (out / "adapter" / ADAPTER_FOLDER).mkdir(parents=True)
    for path, text in small_files(raw, planned, texts, f"{NAME}-base").items():
        (out / path).write_bytes(text)
    for path, plan in planned.plans.items():
        dtypes = {tensor.name: torch.float32 if tensor.dtype == "F32" else torch.bfloat16 for tensor in plan.tensors}
        save_file({key: tensors[key].to(dtype).contiguous() for key, dtype in dtypes.items()}, out / path)
    pin = make_pin(out, NAME, "1", PROVENANCE)
    pin.write(out / PIN)
    return pin


def exported(out: Path) -> CheckpointPaths:
    """The committed checkpoint, copied to a new folder and exported there."""
    shutil.copytree(COMMITTED, out, ignore=shutil.ignore_patterns("export"))
    export_checkpoint(out / "base", out / "adapter", out / "export", load_pin(out / PIN))
    return open_checkpoint(out)


def main() -> int:
    """Write the checkpoint of a training run."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python -m examples.page.model .train/run examples/page/checkpoint",
    )
    parser.add_argument("run", type=Path, help="the folder that `examples.page.train` wrote")
    parser.add_argument("out", type=Path, help="the checkpoint's new folder")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists: name a new folder, or remove it")
    vocabulary = Tokenizer.from_file(str(options.run / "tokenizer.json"))
    pin = write_checkpoint(options.out, load_file(options.run / "weights.safetensors"), vocabulary)
    print(f"{pin.name} is in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
