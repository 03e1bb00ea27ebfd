"""Engines in native arithmetic: a request has the text of plain decoding alone, whatever its drafts and neighbours."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.tiny import Family, loaded, tiny_prompts
from tests.tiny_codes import store_target_in_codes
from torch import Tensor

from paceline.checkpoint.contract import DrafterFamily
from paceline.engine import native_attends
from paceline.engine.engine import Engine
from paceline.engine.request import SamplingParameters
from paceline.engine.settings import EngineSettings
from paceline.models.layers import CODE_MODES, LinearMode, set_linear_mode
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.ops.native.integers import can_run_integers
from paceline.ops.native.layer import LayersCall
from paceline.ops.native.quantized import can_run_quantized
from paceline.ops.native.rows import can_run

pytestmark = pytest.mark.skipif(
    not can_run(torch.empty(1, dtype=torch.bfloat16)), reason="no native operations on this machine"
)

PROMPTS = tiny_prompts([5, 40, 17, 33, 1])


def texts(target: LoadedTarget, drafter: LoadedDrafter | None, *, at_once: int, **settings: Any) -> list[list[int]]:
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=at_once, max_model_len=128, **settings))
    sampling = SamplingParameters(max_tokens=24, ignore_eos=True)
    names = [engine.add_request(prompt, sampling) for prompt in PROMPTS]
    while engine.has_unfinished():
        engine.step()
    found = [list(engine.result(name).token_ids) for name in names]
    engine.close()
    return found


def parts(family: Family = "llama", drafter_family: DrafterFamily = "dflash") -> tuple[LoadedTarget, LoadedDrafter]:
    return loaded(family, linear_mode="native", dtype=torch.bfloat16, drafter_family=drafter_family)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("drafter_family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_drafts_and_neighbours_change_no_id(family: Family, drafter_family: DrafterFamily) -> None:
    target, drafter = parts(family, drafter_family)
    alone = texts(target, None, at_once=1)
    assert texts(target, None, at_once=5) == alone
    assert texts(target, drafter, at_once=1) == alone
    assert texts(target, drafter, at_once=5, prefill_chunk_size=16, block_size=16) == alone
    assert texts(target, drafter, at_once=3, run_ahead=True) == alone


@pytest.mark.parametrize("drafter_family", ["dflash", "dflash2"])
def test_layers_in_one_call_give_the_texts_of_layers_that_are_called(
    drafter_family: DrafterFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = parts(drafter_family=drafter_family)
    sizes = {target.contract.num_layers, drafter.contract.num_layers}
    assert len(sizes) == 2, "to be told apart"
    calls: list[int] = []
    whole = LayersCall.__call__

    def counted(self: LayersCall, *arguments: Any) -> Tensor:
        calls.append(len(self.calls))
        return whole(self, *arguments)

    monkeypatch.setattr(LayersCall, "__call__", counted)
    alone = texts(target, drafter, at_once=5)
    assert set(calls) == sizes
    calls.clear()
    heard: list[int] = []
    hook = target.model.layers[1].register_forward_hook(lambda *_call: heard.append(1))
    assert texts(target, drafter, at_once=5) == alone
    assert heard and set(calls) == sizes - {target.contract.num_layers}, "whoever listens to a layer hears it"
    hook.remove()
    calls.clear()
    hook = drafter.model.backbone.layers[1].register_forward_hook(lambda *_call: heard.append(2))
    assert texts(target, drafter, at_once=5) == alone
    assert 2 in heard and set(calls) == {target.contract.num_layers}, "so does whoever listens to a drafter's"
    hook.remove()
    monkeypatch.setattr(target.model.layers[0], "forward", lambda x, *_rest: x)
    assert texts(target, drafter, at_once=5) != alone, "and a layer that was replaced is run as it is now"


@pytest.mark.skipif(not (can_run_quantized() and can_run_integers()), reason="no products with codes on this machine")
@pytest.mark.parametrize("mode", CODE_MODES)
@pytest.mark.parametrize("drafter_family", ["dflash2", "dspark", "eagle3"])
def test_weights_in_codes_keep_that_and_take_less_memory(drafter_family: DrafterFamily, mode: LinearMode) -> None:
    native, drafter = parts("llama", drafter_family)
    store_target_in_codes(native.model)
    set_linear_mode(native.model, mode)
    drafter.model.prepare_for_serving(mode)
    target = dataclasses.replace(native, linear_mode=mode)
    alone = texts(target, None, at_once=1)
    assert texts(target, None, at_once=5) == alone
    assert texts(target, drafter, at_once=1) == alone
    assert texts(target, drafter, at_once=5, prefill_chunk_size=16, block_size=16) == alone
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2))
    stats = engine.stats()
    assert stats.linear_mode == mode and stats.attention == "native"
    own = sum(parameter.numel() * 2 for parameter in target.model.parameters())
    assert stats.target_weight_bytes < 1.6 * own, "panels of codes beside the weights; those of bf16 are as large again"
    engine.close()


def test_a_key_too_many_changes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = parts()
    alone = texts(target, None, at_once=1)
    sound = native_attends.Spans.of

    def one_more(self: native_attends.Spans, window: int | None, *, is_causal: bool) -> tuple[Tensor, Tensor]:
        lows_BT, highs_BT = sound(self, window, is_causal=is_causal)
        return lows_BT, torch.minimum(highs_BT + 1, highs_BT.amax(1, keepdim=True))

    monkeypatch.setattr(native_attends.Spans, "of", one_more)
    assert texts(target, drafter, at_once=5) != alone


def test_stats_say_what_runs_and_count_its_weights() -> None:
    target, drafter = parts()
    packed = loaded("llama", linear_mode="packed", dtype=torch.bfloat16)
    engines = [Engine(*each, EngineSettings(max_num_seqs=2)) for each in ((target, drafter), packed)]
    native_stats, packed_stats = (engine.stats() for engine in engines)
    assert native_stats.linear_mode == "native" and native_stats.attention == "native"
    own = sum(parameter.numel() * 2 for parameter in target.model.parameters())
    assert native_stats.target_weight_bytes > 1.5 * own
    assert abs(native_stats.target_weight_bytes / packed_stats.target_weight_bytes - 1) < 0.1
    for engine in engines:
        engine.close()
