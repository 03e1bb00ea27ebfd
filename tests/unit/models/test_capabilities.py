"""The tap capability: declared by every target class, believed with its machinery alone, refused in known words."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.tiny_kimi import kimi_contract, kimi_target, multimodal_config, multimodal_target, small_kimi_config
from tests.unit.models.conftest import tiny_target
from torch import nn

from paceline.checkpoint.contract import CaptureId
from paceline.errors import CompatibilityError, ConfigError
from paceline.models.attends import WholeSequence
from paceline.models.capabilities import SupportsEagle3, check_capture_ids, require_taps, supports_eagle3
from paceline.models.taps import TapCollector
from paceline.models.targets.table import TARGETS
from paceline.models.targets.target import Target


class WithoutTaps(nn.Module):
    """A target that never heard of taps."""


class OnlyDeclares(nn.Module):
    """The flag without what it promises."""

    supports_eagle3 = True


def tiny(architecture: str) -> Any:
    """An instance of a row of the table; a new row needs a line here."""
    if architecture == "KimiLinearForCausalLM":
        return kimi_target(small_kimi_config(4, 2))
    if architecture == "KimiK3ForConditionalGeneration":
        return multimodal_target(multimodal_config(small_kimi_config(4, 2)))
    return tiny_target(architecture=architecture)


@pytest.mark.parametrize("architecture", sorted(TARGETS))
def test_every_target_class_and_instance_supports_taps(architecture: str) -> None:
    target = tiny(architecture)
    assert type(target) is TARGETS[architecture]
    assert supports_eagle3(TARGETS[architecture])
    assert supports_eagle3(target)
    assert isinstance(target, SupportsEagle3)
    require_taps(target, "prefix")
    require_taps(TARGETS[architecture], "prefix")
    assert list(target.capture_ids) == [0, 1, 2, 3, 4]
    assert target.default_capture_ids() == (2, 2, 1), "not sorted, at a depth that nobody has"


@pytest.mark.parametrize("architecture", sorted(TARGETS))
@torch.no_grad()
def test_every_target_has_what_its_protocol_says(architecture: str) -> None:
    """And taps of each of its streams at every id, in one pass over a whole sequence."""
    target = tiny(architecture)
    members = [name for name in vars(Target) if not name.startswith("_") or name == "__call__"]
    assert "embed" in members and not [name for name in members if not hasattr(target, name)]
    ids = torch.arange(6)[None]
    plain = target.logits(target(ids, ids, WholeSequence()))
    assert plain.shape == (1, 6, target.contract.vocab_size)
    assert target.position_table.shape[0] == target.contract.max_position_embeddings
    for stream in target.aux_hidden_streams:
        require_taps(target, stream)
        taps = TapCollector(list(target.capture_ids), stream)
        assert torch.equal(target.logits(target(ids, ids, WholeSequence(), taps)), plain)
        width = target.contract.hidden_size
        assert [tap.shape for tap in taps.collected()] == [(1, 6, width)] * 5
        assert torch.equal(taps.collected()[0], target.embed(ids))


@pytest.mark.parametrize("architecture", ["KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"])
def test_a_class_that_lost_its_declaration_is_refused(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the text class of a public engine did, while the multimodal one around it still had it."""
    monkeypatch.delattr(TARGETS[architecture], "supports_eagle3")
    name = TARGETS[architecture].__name__
    for model in (tiny(architecture), TARGETS[architecture]):
        assert not supports_eagle3(model)
        with pytest.raises(CompatibilityError, match=f"Model does not support EAGLE3 interface: {name}"):
            require_taps(model, "prefix")


def test_the_wrapper_asks_the_text_model() -> None:
    target = multimodal_target(multimodal_config(small_kimi_config(8, 4)))
    assert target.default_capture_ids() == target.language_model.default_capture_ids() == (2, 4, 5)
    assert target.capture_ids == target.language_model.capture_ids
    assert target.aux_hidden_streams == target.language_model.aux_hidden_streams == {"prefix", "attn_res"}
    plain = multimodal_target(multimodal_config(small_kimi_config(8, None)))
    with pytest.raises(CompatibilityError, match=r"'attn_res' stream; KimiMultimodalTarget offers \['prefix'\]"):
        require_taps(plain, "attn_res")


@pytest.mark.parametrize(
    ("ids", "stream", "error", "message"),
    [
        ([9], "prefix", ConfigError, r"capture ids \[9\] were asked for; legal are 0 \(the embedding\) to 8"),
        ([-1, 2], "prefix", ConfigError, "legal are 0"),
        ([2, 2], "attn_res", ConfigError, "each once and in ascending order"),
        ([4, 2], "attn_res", ConfigError, "each once and in ascending order"),
        ([2], "attn_res", None, ""),
        ([0, 8], "prefix", None, ""),
    ],
)
def test_capture_ids_are_checked(ids: list[int], stream: Any, error: Any, message: str) -> None:
    contract = kimi_contract(small_kimi_config(8, 4))
    chosen = [CaptureId(capture) for capture in ids]
    with nullcontext() if error is None else pytest.raises(error, match=message):
        check_capture_ids(contract, chosen, stream)
    with pytest.raises(CompatibilityError, match="the stream 'attn_res' was asked for; this KimiLinear"):
        check_capture_ids(kimi_contract(small_kimi_config(8, None)), chosen, "attn_res")


@pytest.mark.parametrize("model", [WithoutTaps, WithoutTaps(), OnlyDeclares, OnlyDeclares(), torch.nn.Linear(1, 1)])
def test_a_class_without_taps_is_refused(model: object) -> None:
    assert not supports_eagle3(model)
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    with pytest.raises(CompatibilityError, match=f"Model does not support EAGLE3 interface: {name}"):
        require_taps(model, "prefix")


def test_a_class_that_says_no_is_refused_although_it_has_the_methods() -> None:
    class Declines(TARGETS["LlamaForCausalLM"]):
        supports_eagle3 = False

    assert not supports_eagle3(Declines)
    with pytest.raises(CompatibilityError, match="Model does not support EAGLE3 interface"):
        require_taps(Declines, "prefix")


def test_another_stream_than_the_targets_is_refused() -> None:
    with pytest.raises(CompatibilityError, match=r"'attn_res' stream; DenseTarget offers \['prefix'\]"):
        require_taps(tiny_target(), "attn_res")


@pytest.mark.parametrize(("depth", "expected"), [(8, (2, 4, 5)), (30, (2, 15, 27))])
def test_default_capture_ids(depth: int, expected: tuple[int, ...]) -> None:
    assert tiny_target(num_layers=depth).default_capture_ids() == expected
