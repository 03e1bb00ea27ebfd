"""Silent faults of speculative decoding, planted: what a check says of sound code, and that it notices the fault.

`docs/pitfalls.md` lists all of them, P1 to P48, with the tests that catch them; here are those whose own files have no
test with the fault in place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes import ByteTokenizer, ReplayProposer, scripted_target, table_target
from tests.tiny import loaded, tiny_prompts

import paceline.engine.step as step_module
import paceline.engine.target_cache as target_cache
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.slots import SlotState
from paceline.engine.structured import StructuredOutput
from paceline.engine.token_state import TokenState
from paceline.models.drafters.proposal import Proposal
from paceline.models.loading import LoadedTarget
from paceline.ops import noise, target_distribution
from paceline.ops.finalise_block import Verdict
from paceline.ops.slot_columns import SlotColumns
from paceline.ops.token_rules import RuledLogits


def generate(target: LoadedTarget, sampling: SamplingParameters, *prompts: list[int], **settings: Any) -> Any:
    return Engine(target, None, EngineSettings(**settings)).generate(list(prompts), sampling)


def replay(target: LoadedTarget, prompt: Sequence[int], script: Sequence[int], sampling: SamplingParameters) -> Any:
    """One request whose drafts are `script`, seven at a time."""
    proposer = ReplayProposer(lambda slot: [*prompt, *script], 7)
    engine = Engine(target, None, EngineSettings(max_num_seqs=1), proposer=proposer)
    (result,) = engine.generate([prompt], sampling)
    return result


def test_p3_the_kept_distribution_has_the_bits_of_the_drawn_one() -> None:
    state, slots = SlotState(1, num_draft_tokens=1, num_candidates=16, device=torch.device("cpu")), torch.tensor([0])
    log_q = (torch.randn(1, 1, 16) * 2.5 + 18).log_softmax(-1)
    proposal = Proposal(torch.zeros(1, 1).long(), torch.arange(16).view(1, 1, 16), log_q)

    state.store_proposal(slots, proposal)
    found = state.proposal(slots, 1, with_q=True).log_q_BKC
    assert found is not None and found.dtype == torch.float32 and torch.equal(found, log_q)
    state.log_q = state.log_q.bfloat16()
    with pytest.raises(RuntimeError, match="dtypes match"):
        state.store_proposal(slots, proposal)


def keys_of_a_full_context(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions that key the target's noise while a request runs up to the last position."""
    seen: set[int] = set()
    hash32 = noise.hash32

    def watched(seed: Any, position: torch.Tensor, token: Any, domain: int = noise.TARGET) -> Any:
        if domain == noise.TARGET:
            seen.update(position.flatten().tolist())
        return hash32(seed, position, token, domain)

    target = table_target(torch.randn(9, 9), max_positions=24)
    with monkeypatch.context() as patch:
        patch.setattr(noise, "hash32", watched)
        (result,) = generate(target, SamplingParameters(max_tokens=99, temperature=1.0, seed=3), [1, 2, 3])
    assert len(result.token_ids) == 21
    return sorted(seen)


def test_p11_every_token_up_to_the_last_position_has_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_of_a_full_context(monkeypatch) == list(range(2, 23))
    judge = step_module.judge

    def clamped(
        logits: Any, proposal: Any, state: Any, slots: Any, positions: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        return judge(logits, proposal, state, slots, positions.clamp(max=15), *rest, **options)

    monkeypatch.setattr(step_module, "judge", clamped)
    assert keys_of_a_full_context(monkeypatch) != list(range(2, 23))


def test_p12_a_slot_in_the_key_shows_in_company(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = loaded()
    prompts = tiny_prompts([4, 9, 6])
    sampling = SamplingParameters(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)

    def is_the_same() -> bool:
        together = Engine(target, drafter, EngineSettings(max_num_seqs=3)).generate(prompts, sampling)
        alone = [Engine(target, drafter).generate([prompt], sampling)[0] for prompt in prompts]
        return [result.token_ids for result in together] == [result.token_ids for result in alone]

    assert is_the_same()
    sampling_rows = SlotState.sampling_rows

    def keyed_by_slot(self: SlotState, slots_B: torch.Tensor) -> Any:
        rows = sampling_rows(self, slots_B)
        return rows._replace(seed_B=rows.seed_B + slots_B)

    monkeypatch.setattr(SlotState, "sampling_rows", keyed_by_slot)
    assert not is_the_same()


def test_p13_a_slots_second_owner_starts_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = loaded()
    first, second = tiny_prompts([12, 5])
    sampling = SamplingParameters(max_tokens=12, repetition_penalty=1.8, frequency_penalty=1.5, ignore_eos=True)

    def is_fresh() -> bool:
        used, fresh = (Engine(target, drafter, EngineSettings(max_num_seqs=1)) for _ in range(2))
        used.generate([first], sampling)
        return used.generate([second], sampling)[0].token_ids == fresh.generate([second], sampling)[0].token_ids

    assert is_fresh()
    admit, owned = TokenState.admit, set()

    def keeps_the_old(self: TokenState, slot: int, *arguments: Any, **options: Any) -> None:
        if (id(self), slot) not in owned:
            owned.add((id(self), slot))
            admit(self, slot, *arguments, **options)

    monkeypatch.setattr(TokenState, "admit", keeps_the_old)
    assert not is_fresh()


def test_p14_a_slot_of_minus_one_is_nobodys() -> None:
    """The last row of every array belongs to no slot; an array without it would lose its last slot."""
    state = SlotState(2, num_draft_tokens=1, num_candidates=0, device=torch.device("cpu"))
    state.lengths[:2] = torch.tensor([5, 6])
    padding = torch.tensor([-1])
    zero = torch.tensor([0])
    rows = state.step_rows(padding, 0, vocab_size=99, num_positions=99, reads_q=False)
    rows = rows._replace(slots_B=padding, starts_B=torch.tensor([98]))
    state.commit(rows, Verdict(zero, torch.tensor([9]), zero, zero))
    state.store_proposal(padding, Proposal(torch.tensor([[7]])))
    assert state.lengths[:2].tolist() == [5, 6] and state.draft_ids[:2].tolist() == [[-1], [-1]]
    state._columns = SlotColumns(*(array[:2] for array in state._columns))
    state._draft_ids = state._draft_ids[:2]
    state.commit(rows, Verdict(zero, torch.tensor([9]), zero, zero))
    assert state.lengths.tolist() == [5, 99]


IMPOSSIBLE = SamplingParameters(
    max_tokens=6, allowed_token_ids=(120,), structured_output=StructuredOutput("choice", ("ab", "cd"))
)


def test_p17_p44_a_row_that_allows_nothing_is_an_error_and_spares_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = loaded(tokenizer=ByteTokenizer())
    prompts, free = tiny_prompts([5, 7, 4]), SamplingParameters(max_tokens=6, ignore_eos=True)

    def run() -> list[RequestResult]:
        engine = Engine(target, drafter, EngineSettings(max_num_seqs=3))
        return engine.generate(prompts, [free, IMPOSSIBLE, free])

    found = run()
    assert found[1].finish_reason == "error" and found[1].error and found[1].token_ids == ()
    alone = [Engine(target).generate([prompt], free)[0] for prompt in prompts]
    assert [found[i].token_ids for i in (0, 2)] == [alone[i].token_ids for i in (0, 2)]

    apply_rules = target_distribution.apply_token_rules

    def guarded(*arguments: Any, **options: Any) -> RuledLogits:
        """Makes all-masked rows look sound."""
        return RuledLogits(*(logits.clamp(min=-1e30) for logits in apply_rules(*arguments, **options)))

    monkeypatch.setattr(target_distribution, "apply_token_rules", guarded)
    assert run()[1].finish_reason != "error"


def test_p27_a_tied_draft_of_a_higher_id_is_refused() -> None:
    """bfloat16 puts logits between 16 and 32 on a grid of 0.125: ties are common, and the lowest id wins everywhere."""
    table = (torch.randn(40, 40) + 20).bfloat16().float()
    table[:, [7, 31]] = 24.0
    target = table_target(table)
    sampling = SamplingParameters(max_tokens=6, ignore_eos=True)
    (plain,) = generate(target, sampling, [3])
    assert plain.token_ids == (7,) * 6
    result = replay(target, [3], [31] * 6, sampling)
    assert result.token_ids == plain.token_ids
    assert {record.num_accepted for record in result.trace.records} == {0}


def test_p48_the_canary_sees_a_verifier_that_refuses_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = loaded("qwen3")
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2))
    assert engine.canary().has_passed
    judge = step_module.judge

    def refuses(logits: Any, proposal: Proposal, *arguments: Any, **options: Any) -> Any:
        nothing = proposal._replace(ids_BK=torch.full_like(proposal.ids_BK, -1))
        return judge(logits, nothing, *arguments, **options)

    monkeypatch.setattr(step_module, "judge", refuses)
    assert not engine.canary().has_passed


def test_p41_rows_of_refused_drafts_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is refused somewhere; a target that saw one of the refused rows would go on differently."""
    target, _ = loaded("qwen3")
    (prompt,) = tiny_prompts([6])
    sampling = SamplingParameters(max_tokens=12, ignore_eos=True)
    (plain,) = generate(target, sampling, prompt)
    script = [token if place % 2 else 11 for place, token in enumerate(plain.token_ids)]
    assert replay(target, prompt, script, sampling).token_ids == plain.token_ids
    attend = target_cache.write_then_attend

    def one_row_late(*arguments: Any, num_rows: int, starts: list[int], starts_B: torch.Tensor, **options: Any) -> Any:
        late = int(num_rows > 1 and starts[0] > len(prompt))
        starts, starts_B = [start + late for start in starts], starts_B + late
        return attend(*arguments, num_rows=num_rows, starts=starts, starts_B=starts_B, **options)

    monkeypatch.setattr(target_cache, "write_then_attend", one_row_late)
    assert replay(target, prompt, script, sampling).token_ids != plain.token_ids


def test_p40_a_changed_seed_changes_the_text() -> None:
    """Nothing is captured: settings are tensors, read anew in every step."""
    target = scripted_target([1, 2, 3], vocab_size=6)
    texts = {
        generate(target, SamplingParameters(max_tokens=8, temperature=1.5, seed=seed), [1])[0].token_ids
        for seed in range(6)
    }
    assert len(texts) > 3


def test_the_table_names_every_pitfall_and_only_tests_that_exist() -> None:
    root = Path(__file__).parents[1]
    table = [line for line in (root.parent / "docs" / "pitfalls.md").read_text().splitlines() if line.startswith("| P")]
    assert [line.split("|")[1].strip() for line in table] == [f"P{number}" for number in range(1, 49)]
    for line in table:
        tests, remark = line.split("|")[3:5]
        names = re.findall(r"`([^`]+)::(\w+)`", tests)
        assert names or remark.strip(), line
        for place, name in names:
            path = root / (place.replace("I/", "integration/") if place.startswith("I/") else f"unit/{place}")
            assert f"\ndef {name}(" in path.with_suffix(".py").read_text(), f"{place}::{name}"
