"""Attention by tables: where rows go, who stores them, and engines that use it; on a CPU through the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.caches import scattered_tables, stored
from tests.tiny import loaded, tiny_prompts
from tests.unit.engine.attend_cases import CHOICES, filled_cache, new_rows, where
from tests.unit.engine.test_engine_families import FAMILIES

from paceline.checkpoint.contract import TargetContract
from paceline.engine import paged_attends
from paceline.engine.attends import AttentionChoice, attend_block, write_then_attend
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.paged_attends import BlockPaged, CausalPaged
from paceline.engine.request import SamplingParameters
from paceline.models.loading import LoadedDrafter, LoadedTarget

PAGED = CHOICES["paged"]
_HEAD = tiny_prompts([24], seed=3)[0]
PROMPTS = [*tiny_prompts([5, 40, 17, 1]), _HEAD, [*_HEAD[:23], 7, 8, 9], [*_HEAD, 4]]


def test_rows_may_be_stored_by_whoever_computes_them() -> None:
    cache = filled_cache(scattered_tables(3, 24))
    attend = write_then_attend(cache, PAGED, **where(PAGED, [7, 3]), num_rows=4)
    assert isinstance(attend, CausalPaged)
    q, k, v = new_rows(4)
    planes, rows_T = attend.cells(0)
    assert planes.data_ptr() == cache.planes.data_ptr() and rows_T.shape == (8,)
    planes.flatten(2, 3)[0].index_copy_(1, rows_T, k.flatten(0, 1).transpose(0, 1))
    planes.flatten(2, 3)[1].index_copy_(1, rows_T, v.flatten(0, 1).transpose(0, 1))
    by_hand = attend.stored(0, q)
    assert torch.equal(stored(cache, 0, 3, 7)[0, 0], k[1].transpose(0, 1))
    assert torch.equal(attend(0, q, k, v), by_hand)


def test_a_blocks_rows_lie_beside_the_cache() -> None:
    cache = filled_cache(scattered_tables(3, 24), num_layers=2)
    before = cache.planes.clone()
    attend = attend_block(
        cache,
        PAGED,
        slots=[2, 0],
        slots_B=torch.tensor([2, 0]),
        lengths_B=torch.tensor([11, 6]),
        max_length=15,
        num_rows=4,
        windows=(None, 3),
        causal=(False, True),
    )
    assert isinstance(attend, BlockPaged)
    q, k, v = new_rows(4)
    expected = [attend(layer, q, k, v) for layer in (0, 1)]
    assert not torch.equal(*expected)
    for layer in (0, 1):
        tail, rows_T = attend.cells(layer)
        tail.fill_(torch.nan)
        both = tail.flatten(2, 3)
        both[0, :, rows_T], both[1, :, rows_T] = k.flatten(0, 1).transpose(0, 1), v.flatten(0, 1).transpose(0, 1)
        assert torch.equal(attend.stored(layer, q), expected[layer])
    assert torch.equal(cache.planes, before)


def texts(target: LoadedTarget, drafter: LoadedDrafter | None, *, at_once: int, **settings: Any) -> list[list[int]]:
    """What an engine says; it checks itself, and keeps NaN in free blocks."""
    settings = {"max_model_len": 96, "check_invariants": True} | settings
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=at_once, **settings))
    sampling = SamplingParameters(max_tokens=20, ignore_eos=True)
    names = [engine.add_request(prompt, sampling) for prompt in PROMPTS]
    for index in range(1000):
        if not engine.has_unfinished():
            break
        engine.step()
        if index == 9:
            engine.preempt(names[1])
    found = [list(engine.result(name).token_ids) for name in names]
    is_forced = AttentionChoice.for_device(torch.device("cpu"), is_row_invariant=False).is_paged
    assert engine.stats().attention == ("paged" if is_forced else "per_request")
    engine.close()
    return found


_TEXTS_ALONE: dict[TargetContract, list[list[int]]] = {}


def texts_alone(target: LoadedTarget) -> list[list[int]]:
    """One request at a time under exact attention; targets with one contract have the same weights here."""
    if target.contract not in _TEXTS_ALONE:
        _TEXTS_ALONE[target.contract] = texts(target, None, at_once=1, prefix_cache=False)
    return _TEXTS_ALONE[target.contract]


def force_paged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AttentionChoice, "for_device", lambda *_args, **_options: PAGED)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_texts_are_those_of_exact_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = loaded("qwen3", linear_mode="plain", **FAMILIES[name])
    alone = texts_alone(target)
    force_paged(monkeypatch)
    assert texts(target, drafter, at_once=3, prefill_chunk_size=16, block_size=8) == alone
    assert texts(target, drafter, at_once=5, run_ahead=True, block_size=16, prefix_cache=False) == alone


def test_fused_layers_on_a_cpu_store_their_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole path of a GPU, through the definitions of its kernels; nobody calls the attention with keys."""
    target, _ = loaded("qwen3", linear_mode="plain")
    alone = texts_alone(target)

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("rows were handed over to be stored")

    fused, fused_drafter = loaded("qwen3", linear_mode="fused")
    engine = Engine(fused, fused_drafter, EngineSettings(max_num_seqs=3, max_model_len=96))
    assert engine.stats().attention == "paged"
    engine.close()
    for form in (CausalPaged, BlockPaged):
        monkeypatch.setattr(form, "__call__", refuse)
    force_paged(monkeypatch)
    assert texts(fused, fused_drafter, at_once=3, block_size=16) == alone


def test_a_key_too_few_changes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = loaded("qwen3", linear_mode="plain")
    alone = texts(target, None, at_once=1)
    force_paged(monkeypatch)
    honest = paged_attends.paged_attention

    def one_less(*where_from: Any, **rest: Any) -> torch.Tensor:
        return honest(*where_from, **rest | {"window": 24})

    monkeypatch.setattr(paged_attends, "paged_attention", one_less)
    assert texts(target, None, at_once=3) != alone
