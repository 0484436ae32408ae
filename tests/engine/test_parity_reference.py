"""The reference that `benchmarks.parity` and `benchmarks.latency` build is what they say it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import full_size
from benchmarks.full_size import Peer, Weights, encoder
from benchmarks.screens import png, question, screenshot
from engine import Engine, Identity
from engine.config import AdapterConfig
from engine.model.weights import build_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_size, "DEVICE", CPU)


def float32_engine(weights: Weights) -> Engine:
    """Our model in float32 arithmetic, its adapter merged without rounding."""
    merged = {name: tensor.float() for name, tensor in weights.base.items()}
    for module in weights.modules:
        if not module.is_vision:
            pair = weights.adapter[module.b_name] @ weights.adapter[module.a_name]
            merged[module.weight_name] = merged[module.weight_name] + full_size.SCALE * pair

    def shelf(tensors: dict[str, torch.Tensor]) -> Any:
        return lambda name, *shape: tensors[name]

    base = {name: tensor.float() for name, tensor in weights.base.items()}
    adapter = AdapterConfig(full_size.LORA_RANK, full_size.SCALE)
    model = build_model(weights.config, adapter, shelf(base), shelf(weights.adapter), shelf(merged), CPU)
    return Engine(model, encoder(None), Identity("random weights, tiny", {}), CPU)


def test_its_float32_model_computes_in_float32_and_as_ours() -> None:
    """The published configuration names bfloat16; a language model in that is about 1e-2 away."""
    weights = Weights(size="tiny")
    peer, ours = Peer(weights, torch.float32, encoder(None)), float32_engine(weights)
    for seed, options in ((1, 4), (2, 9)):
        picture, asked = screenshot(256, 256, seed), question("next", options, seed)  # a size that is not resized
        expected = peer.probabilities(peer.inputs(picture, asked), options)
        found = torch.tensor(ours.decide(png(picture), [asked]).probabilities[0])
        assert float((found - expected).abs().max()) <= 1e-4
        assert peer.logits(peer.inputs(picture, asked)).dtype == torch.float32


def test_its_bfloat16_model_is_all_of_it_bfloat16() -> None:
    peer = Peer(Weights(size="tiny"), torch.bfloat16, encoder(None))
    dtypes = {parameter.dtype for name, parameter in peer.model.named_parameters() if "lora_" not in name}
    assert dtypes == {torch.bfloat16}
