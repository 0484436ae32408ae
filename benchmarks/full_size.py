"""The model at its published sizes with random weights made on the GPU, as our engine and as the reference has it.

The names and shapes are the checkpoint layout's, the distributions those of synthetic checkpoints; no file is read but
the tokenizer's. Both sides get the same tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer

from engine import Engine, Identity, Question
from engine.checkpoint.layout import LORA_ALPHA, LORA_RANK, LoraModule, language_tensors, lora_modules, vision_tensors
from engine.checkpoint.sizes import PREPROCESSOR, model_config
from engine.config import AdapterConfig, ModelConfig
from engine.model.weights import build_model
from engine.prompt import PromptEncoder

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

DEVICE = torch.device("cuda")
SCALE = LORA_ALPHA / LORA_RANK


def encoder(tokenizer: Path | None) -> PromptEncoder:
    """The prompt encoder of a `tokenizer.json`, or of the one that synthetic checkpoints get."""
    if tokenizer is not None:
        return PromptEncoder(Tokenizer.from_file(str(tokenizer)))
    from engine.checkpoint.tokenizer import build_tokenizer

    return PromptEncoder(Tokenizer.from_str(build_tokenizer()["tokenizer.json"].decode()))


class Weights:
    """The base in BF16 and the adapter in float32, by their published names.

    Args:
        seed: of the random numbers.
        raw_config: a `config.json`'s contents; the published sizes when left out.
        device: where they are made, and where models over them run.
    """

    def __init__(
        self, seed: int = 0, raw_config: dict[str, object] | None = None, device: torch.device = DEVICE
    ) -> None:
        self.device = device
        self.raw_config = raw_config or model_config("full")
        self.config = ModelConfig.from_dict(self.raw_config)
        generator = torch.Generator(device).manual_seed(seed)
        specs = (*language_tensors(self.config.text), *vision_tensors(self.config.vision))
        self.base: Tensors = {spec.name: _random(spec.name, spec.shape, generator).bfloat16() for spec in specs}
        self.modules: tuple[LoraModule, ...] = lora_modules(self.config)
        self.adapter: Tensors = {}
        for module in self.modules:
            for name, shape in (
                (module.a_name, (LORA_RANK, module.inputs)),
                (module.b_name, (module.outputs, LORA_RANK)),
            ):
                self.adapter[name] = _random(name, shape, generator)

    def merged(self, dtype: torch.dtype = torch.bfloat16) -> Tensors:
        """The language model with its pairs merged in float32 and rounded once to the dtype."""
        merged = {name: tensor.to(dtype) for name, tensor in self.base.items() if ".language_model." in name}
        for module in self.modules:
            if not module.is_vision:
                pair = self.adapter[module.b_name] @ self.adapter[module.a_name]
                merged[module.weight_name] = (self.base[module.weight_name].float() + SCALE * pair).to(dtype)
        return merged


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    def normal(mean: float, deviation: float) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device) * deviation + mean

    if name.endswith(".A_log"):
        return torch.empty(shape, device=generator.device).uniform_(0.01, 16.0, generator=generator).log()
    if name.endswith(".dt_bias"):
        return normal(-4.0, 2.0)
    if name.endswith((".embed_tokens.weight", ".pos_embed.weight")):
        return normal(0.0, 0.04)
    if name.endswith((".bias", ".lora_B.weight")):
        return normal(0.0, 0.02)
    if len(shape) == 1:
        multiplies = name.startswith("model.visual.") or name.endswith(".linear_attn.norm.weight")
        return normal(1.0 if multiplies else 0.0, 0.1)
    return normal(0.0, math.prod(shape[1:]) ** -0.5)


def our_engine(weights: Weights, prompts: PromptEncoder, merged: Tensors | None = None, **options: Any) -> Engine:
    """Our engine over these weights, in the dtype of the merged ones; `options` as `Engine.load` takes them.

    Args:
        merged: of `Weights.merged`, which in BF16 is what an export holds, and is used when left out.
    """
    merged = weights.merged() if merged is None else merged
    dtype = next(iter(merged.values())).dtype
    base = {name: tensor.to(dtype) for name, tensor in weights.base.items() if ".language_model." not in name}

    def shelf(tensors: Tensors) -> Any:
        def take(name: str, *shape: int) -> Tensor:
            assert tensors[name].shape == shape, (name, tensors[name].shape, shape)
            return tensors[name]

        return take

    shelves = (shelf(base), shelf(weights.adapter), shelf(merged))
    model = build_model(weights.config, AdapterConfig(LORA_RANK, SCALE), *shelves, weights.device)
    return Engine(model, prompts, Identity("random weights", {}), weights.device, **options)


class Peer:
    """Transformers with PEFT's unmerged adapter over the same weights, in one dtype."""

    def __init__(self, weights: Weights, dtype: torch.dtype, prompts: PromptEncoder) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import Qwen2VLImageProcessor, Qwen3_5Config, Qwen3_5ForConditionalGeneration

        self._prompts = prompts
        self._device = weights.device
        self.dtype = dtype
        config = Qwen3_5Config(**weights.raw_config)
        config._attn_implementation = "sdpa"
        # The published configuration names bfloat16, and its language model would be that whatever is asked for here.
        for part in (config, config.text_config, config.vision_config):
            part.dtype = dtype
        with _default(dtype), weights.device, _no_init():
            model = Qwen3_5ForConditionalGeneration(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name != "lm_head.weight":
                    parameter.copy_(weights.base[name])
        model.tie_weights()
        found = {parameter.dtype for parameter in model.parameters()}
        assert found == {dtype}, f"a reference in {dtype} that holds {found}"
        targets = sorted({module.module.rpartition(".")[2] for module in weights.modules})
        adapter = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=targets, bias="none")
        self.model = get_peft_model(model, adapter).eval()
        placed = 0
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(weights.adapter[name.replace(".default", "")])
                    assert parameter.dtype == torch.float32
                    placed += 1
        assert placed == len(weights.adapter), (placed, len(weights.adapter))
        options = {key: value for key, value in PREPROCESSOR.items() if not key.endswith(("_class", "_type"))}
        self.processor = Qwen2VLImageProcessor(**options)

    def inputs(self, picture: Any, question: Question) -> SimpleNamespace:
        """What the reference is called with: `ids` `[1, T]`, `pixel_values`, `grid`, on the CPU."""
        processed = self.processor(images=[picture], return_tensors="pt")
        grid = processed["image_grid_thw"]
        ids = torch.tensor([self._prompts.prompt_ids(question, int(grid.prod()) // 4)])
        return SimpleNamespace(ids=ids, pixel_values=processed["pixel_values"], grid=grid)

    def positions(self, inputs: SimpleNamespace) -> Tensor:
        """`[3, T]` positions by the reference."""
        is_image = (inputs.ids == self._prompts.image_pad_id).int()
        inner = self.model.base_model.model.model
        found: Tensor = inner.get_rope_index(inputs.ids, is_image, image_grid_thw=inputs.grid)[0][:, 0]
        return found

    @torch.inference_mode()
    def logits(self, inputs: SimpleNamespace) -> Tensor:
        """The last position's logits of the 26 letters, on the device."""
        ids = inputs.ids.to(self._device)
        is_image = (ids == self._prompts.image_pad_id).int()
        found = self.model(
            input_ids=ids,
            pixel_values=inputs.pixel_values.to(self._device),
            image_grid_thw=inputs.grid.to(self._device),
            mm_token_type_ids=is_image,
            use_cache=False,
            logits_to_keep=1,
        )
        logits: Tensor = found.logits[0, -1, list(self._prompts.letter_ids)]
        return logits

    def probabilities(self, inputs: SimpleNamespace, options: int) -> Tensor:
        """`[options]` float32 on the CPU."""
        return self.logits(inputs)[:options].float().softmax(-1).cpu()


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _no_init() -> Iterator[None]:
    """Every parameter is overwritten; initialising billions of them first would only take time."""
    from transformers import PreTrainedModel

    before = PreTrainedModel.init_weights
    PreTrainedModel.init_weights = lambda self: self.tie_weights()
    try:
        yield
    finally:
        PreTrainedModel.init_weights = before


def environment() -> dict[str, object]:
    """What every result file says of where it was measured."""
    import platform
    import time

    import peft
    import transformers
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
