"""The transformers model that benchmarks build must be the same network: logits, then greedy ids."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from benchmarks.lossless import all_logits, last_logits
from benchmarks.transformers_models import build_model, generate_greedily, next_logits
from tests import tiny
from torch import Tensor

from paceline.checkpoint.contract import RopeSettings
from paceline.checkpoint.export import split_fused
from paceline.checkpoint.names import dense_target_destinations
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.errors import CheckpointError
from paceline.models.loading import LoadedTarget

ROPES = {
    "default": RopeSettings(theta=10_000.0),
    "linear": RopeSettings(theta=10_000.0, kind="linear", factor=4.0),
    "llama3": RopeSettings(theta=10_000.0, kind="llama3", factor=8.0, original_max_position_embeddings=64),
    "yarn": RopeSettings(theta=10_000.0, kind="yarn", factor=4.0, original_max_position_embeddings=64),
}


class Source:
    """Tensors in a dict."""

    origin = "tests"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def load(self, name: str) -> Tensor:
        return self._tensors[name]


def source_of(target: LoadedTarget) -> dict[str, Tensor]:
    return split_fused(dict(target.model.named_parameters()), dense_target_destinations(target.contract))


@pytest.mark.parametrize(
    ("family", "rope"),
    [("llama", "default"), ("qwen3", "default"), ("llama", "linear"), ("llama", "llama3"), ("qwen3", "yarn")],
)
def test_same_network(family: tiny.Family, rope: str) -> None:
    target, _ = tiny.loaded(family, linear_mode="plain", target_changes={"rope": ROPES[rope]})
    model = build_model(target.contract, Source(source_of(target)), torch.float32)
    prompt = tiny.tiny_prompts([40])[0]
    expected = model(torch.tensor([prompt])).logits[0]
    assert torch.allclose(all_logits(target, prompt), expected, atol=1e-4)
    assert torch.equal(last_logits(target, prompt), all_logits(target, prompt)[-1])
    assert torch.allclose(next_logits(model)(prompt), expected[-1], atol=1e-5)


def test_half_precision_keeps_the_rotary_frequencies() -> None:
    target, _ = tiny.loaded("llama", linear_mode="plain")
    source = Source(source_of(target))
    exact, rounded = (build_model(target.contract, source, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert rounded.model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(rounded.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq)


def test_same_greedy_ids_and_times() -> None:
    target, _ = tiny.loaded("llama", linear_mode="plain")
    model = build_model(target.contract, Source(source_of(target)), torch.float32)
    prompt = tiny.tiny_prompts([12])[0]
    ours = Engine(target, None, EngineSettings(max_num_seqs=1)).generate(
        [prompt], SamplingParameters(max_tokens=24, ignore_eos=True)
    )[0]
    theirs = generate_greedily(model, prompt, 24)
    assert theirs.token_ids == ours.token_ids and len(theirs.token_ids) == 24
    assert theirs.prefill_s > 0 and theirs.decode_s > 0
    stop = theirs.token_ids[5]
    stopped = generate_greedily(model, prompt, 24, [stop]).token_ids
    assert stopped == theirs.token_ids[: theirs.token_ids.index(stop) + 1]


def test_weights_that_do_not_fit_are_refused() -> None:
    target, _ = tiny.loaded("llama", linear_mode="plain")
    tensors = source_of(target)
    name = "model.norm.weight"
    with pytest.raises(CheckpointError, match=name):
        build_model(target.contract, Source({k: v for k, v in tensors.items() if k != name}), torch.float32)
    with pytest.raises(CheckpointError, match="extra"):
        build_model(target.contract, Source(tensors | {"extra": tensors[name]}), torch.float32)
