"""A served drafter drafts what the whole text says it should, from exactly the committed context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.caches import fixed_tables, make_cache, scattered_tables, store, stored
from tests.tiny import loaded, tiny_prompts

from paceline.engine import proposal as proposal_module
from paceline.engine.attends import AttentionChoice
from paceline.engine.block_tables import BlockTables
from paceline.engine.canary_drafts import count_equal_drafts
from paceline.engine.proposal import BlockProposer, Rows
from paceline.engine.request import SamplingParameters
from paceline.engine.slots import SlotState
from paceline.models.attends import WholeSequence
from paceline.models.drafters.backbone import DrafterBackbone
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.drafters.proposal import Proposal
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.models.taps import TapCollector
from paceline.ops.native.context import ContextCall
from paceline.ops.native.rows import can_run

CPU = torch.device("cpu")
FORMS = ((False, False), (True, False), (True, True))  # is_batched, is_paged


def make_proposer(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    *,
    is_batched: bool,
    is_paged: bool = False,
    method: str = "greedy",
    num_draft_tokens: int = 7,
) -> BlockProposer:
    num_kv_heads, head_size = drafter.model.backbone.cache_shape
    cache = make_cache(
        fixed_tables(2, 64),
        num_layers=drafter.contract.num_layers,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
    )
    choice = AttentionChoice(is_batched=is_batched, is_row_invariant=False, is_paged=is_paged)
    return BlockProposer(target.model, drafter.model, cache, choice, num_draft_tokens=num_draft_tokens, method=method)


def serve(
    proposer: BlockProposer,
    target: LoadedTarget,
    texts: list[list[int]],
    num_junk: int,
    num_drafts: int | None = None,
) -> list[list[int]]:
    """Write context for all but each text's last token, junk rows behind it, and draft after the last token."""
    length = len(texts[0]) - 1
    slots, starts = [1, 0], [0, 0]
    rows = Rows(slots, torch.tensor(slots), starts, torch.tensor(starts), length + num_junk)
    ids = torch.tensor(texts)[:, :-1]
    ids = torch.cat((ids, torch.randint(512, (2, num_junk))), dim=1)
    positions = torch.arange(length + num_junk).expand(2, -1)
    taps = TapCollector.of_layers(proposer.target_layer_ids)
    target.model(ids, positions, WholeSequence(), taps)
    proposer.write_context(rows, taps.collected(), positions)
    candidates = proposer.num_candidates
    state = SlotState(2, num_draft_tokens=proposer.num_draft_tokens, num_candidates=candidates, device=CPU)
    for slot, text in zip(slots, texts, strict=True):
        state.admit(slot, SamplingParameters(), seed=0)
        state.restore(slot, length=length, anchor=text[-1], step=0)
    drafts: list[list[int]] = proposer.propose(rows, state, all_greedy=True, num_drafts=num_drafts).ids_BK.tolist()
    return drafts


def test_drafts_equal_those_of_the_whole_text_and_ignore_rows_behind_the_context() -> None:
    for family in ("llama", "qwen3"):
        for windows in ((None, None), (4, None)):
            target, drafter = loaded(family, linear_mode="plain", layer_windows=windows, layer_causal=(True, False))
            texts = tiny_prompts([14, 14])
            for is_batched, is_paged in FORMS:
                proposer = make_proposer(target, drafter, is_batched=is_batched, is_paged=is_paged)
                drafts = serve(proposer, target, texts, num_junk=5)
                for text, block in zip(texts, drafts, strict=True):
                    assert count_equal_drafts(target.model, drafter, text, [(13, block)]) == 7


@pytest.mark.parametrize(("is_batched", "is_paged"), FORMS)
@pytest.mark.parametrize("drafter_family", ["dflash", "dflash2", "dspark"])
def test_context_below_its_start_does_not_exist(
    drafter_family: str, is_batched: bool, is_paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T7.7: after a prefix hit that lacks draft context, whatever lies there is never read."""
    target, drafter = loaded(linear_mode="plain", drafter_family=drafter_family)
    texts, firsts = tiny_prompts([14, 14]), [9, 0]

    def drafts(junk: float) -> list[list[int]]:
        proposer = make_proposer(target, drafter, is_batched=is_batched, is_paged=is_paged)
        propose = proposer.propose

        def after_a_hit(rows: Rows, state: SlotState, **options: Any) -> Proposal:
            for slot, first in zip(rows.slots, firsts, strict=True):
                store(proposer.cache, slot, torch.full_like(stored(proposer.cache, slot, 0, first), junk))
            return propose(
                replace(rows, context_starts=firsts, context_starts_B=torch.tensor(firsts)), state, **options
            )

        proposer.propose = after_a_hit
        return serve(proposer, target, texts, num_junk=2)

    honest = drafts(0.0)
    assert drafts(torch.nan) == honest
    # The other request is as it was, and the first one drafts from what is left.
    other = make_proposer(target, drafter, is_batched=is_batched, is_paged=is_paged)
    assert honest[1] == serve(other, target, texts, num_junk=2)[1]
    attend = proposal_module.attend_block
    for lost in ("context_starts", "context_starts_B"):
        monkeypatch.setattr(proposal_module, "attend_block", lambda *a, lost=lost, **o: attend(*a, **o | {lost: None}))
        is_read = lost == ("context_starts_B" if is_batched else "context_starts")
        assert (drafts(torch.nan) != honest) == is_read


@pytest.mark.skipif(not can_run(torch.empty(1, dtype=torch.bfloat16)), reason="no native operations on this machine")
@pytest.mark.parametrize("make_tables", [fixed_tables, scattered_tables])
def test_one_native_call_writes_the_context_where_the_cache_would(
    make_tables: Callable[..., BlockTables], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = loaded(linear_mode="native", dtype=torch.bfloat16)
    num_heads, head_size = drafter.model.backbone.cache_shape
    sizes = {"num_layers": drafter.contract.num_layers, "num_kv_heads": num_heads, "head_size": head_size}
    choice = AttentionChoice.for_device(CPU, is_row_invariant=False, is_native=True)
    caches = [make_cache(make_tables(3, 40), **sizes, dtype=torch.bfloat16) for _ in range(2)]
    passes = (
        ([1], [0], 30),
        ([0, 2], [3, 11], 4),
        ([1], [29], 1),
    )  # a prompt, two requests, a step whose row counts anew
    calls: list[int] = []
    call = ContextCall.__call__
    monkeypatch.setattr(ContextCall, "__call__", lambda self, *given: calls.append(1) or call(self, *given))
    for cache in caches:
        proposer = BlockProposer(target.model, drafter.model, cache, choice, num_draft_tokens=7, method="greedy")
        generator = torch.Generator().manual_seed(0)
        for slots, starts, num_rows in passes:
            rows = Rows(slots, torch.tensor(slots), starts, torch.tensor(starts), num_rows)
            width = drafter.contract.target_hidden_size
            taps = [
                torch.randn(len(slots), num_rows, width, generator=generator).bfloat16()
                for _ in proposer.target_layer_ids
            ]
            proposer.write_context(rows, taps, rows.starts_B[:, None] + torch.arange(num_rows))
        assert len(calls) == len(passes)
        monkeypatch.setattr(DrafterBackbone, "writes_at_once", lambda *_arguments: False)
    at_once, expected = (cache.planes.double() for cache in caches)
    assert expected.any() and torch.equal(at_once == 0, expected == 0)
    assert torch.equal(at_once[:, 1], expected[:, 1]), "values"
    assert ((at_once - expected).abs() <= 2**-7 * expected.abs().amax(-1, keepdim=True)).all(), "keys"


def test_fewer_drafts_than_trained_means_fewer_rows() -> None:
    target, drafter = loaded(linear_mode="plain")
    texts = tiny_prompts([10, 10])
    drafts = serve(make_proposer(target, drafter, is_batched=False, num_draft_tokens=3), target, texts, num_junk=0)
    assert [len(block) for block in drafts] == [3, 3]
    assert count_equal_drafts(target.model, drafter, texts[0], [(9, drafts[0])]) == 3


def test_a_shorter_block_is_what_a_proposer_of_shorter_blocks_drafts() -> None:
    """For every family of blocks and both layouts; what a block's end adds to its front is gone, so ids may differ."""
    texts = tiny_prompts([10, 10])
    for drafter_family in ("dflash", "dflash2", "dspark"):
        target, drafter = loaded(linear_mode="plain", drafter_family=drafter_family)
        for is_batched, is_paged in FORMS:
            form = {"is_batched": is_batched, "is_paged": is_paged}
            whole = make_proposer(target, drafter, **form)
            for count in (1, 3, 7):
                short = make_proposer(target, drafter, **form, num_draft_tokens=count)
                expected = serve(short, target, texts, num_junk=2)
                assert serve(whole, target, texts, num_junk=2, num_drafts=count) == expected
                assert [len(block) for block in expected] == [count, count]
                assert count_equal_drafts(target.model, drafter, texts[0], [(9, expected[0])]) == count


def test_a_shorter_block_costs_fewer_rows() -> None:
    target, drafter = loaded(linear_mode="plain")
    proposer = make_proposer(target, drafter, is_batched=False)
    num_rows = []
    handle = drafter.model.backbone.register_forward_pre_hook(lambda _, inputs: num_rows.append(inputs[0].shape[1]))
    for count in (None, 4, 1):
        serve(proposer, target, tiny_prompts([10, 10]), num_junk=0, num_drafts=count)
    handle.remove()
    assert num_rows == [8, 5, 2]


def test_a_block_beyond_the_drafters_positions_has_no_drafts() -> None:
    texts = tiny_prompts([14, 14])
    for limit, has_drafts in ((20, False), (21, True)):  # anchor at 13, drafts at 14..20
        target, drafter = loaded(linear_mode="plain", max_position_embeddings=limit)
        drafts = serve(make_proposer(target, drafter, is_batched=False), target, texts, num_junk=9)
        assert (drafts[0] != [-1] * 7) == has_drafts
        assert (drafts[1] != [-1] * 7) == has_drafts


def test_a_coupled_proposer_says_so_to_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = loaded(linear_mode="plain")
    found, propose = [], DFlashDrafter.propose
    monkeypatch.setattr(DFlashDrafter, "propose", lambda *args: found.append(args[-1].is_coupled) or propose(*args))
    for is_coupled in (False, True):
        proposer = make_proposer(target, drafter, is_batched=False)
        proposer._is_coupled = is_coupled
        serve(proposer, target, tiny_prompts([6, 6]), num_junk=0)
    assert found == [False, True]


def test_a_probabilistic_proposer_stores_32_candidates_and_a_greedy_one_none() -> None:
    target, drafter = loaded(linear_mode="plain")
    assert make_proposer(target, drafter, is_batched=False, method="probabilistic").num_candidates == 32
    greedy = make_proposer(target, drafter, is_batched=False)
    assert (greedy.num_candidates, greedy.name) == (0, "dflash/greedy")
