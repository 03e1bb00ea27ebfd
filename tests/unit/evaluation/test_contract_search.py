"""Other readings are scored on the target's own text; the right one wins, and chance does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from tests.tiny import tiny_drafter, tiny_prompts, tiny_target, wrap_target

from paceline.checkpoint.contract import DrafterFamily, RopeSettings, TargetLayerId
from paceline.engine.direct_drafts import direct_sequential_drafts
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.errors import DataError
from paceline.evaluation import contract_search
from paceline.evaluation.contract_search import Score, Text, judge, places_of_text, search_contract
from paceline.evaluation.readings import readings_of
from paceline.models.attends import WholeSequence
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.drafters.table import Drafter
from paceline.models.loading import LoadedTarget
from paceline.models.readings import reread
from paceline.models.taps import TapCollector
from paceline.training.anchors import make_blocks, sample_anchors
from paceline.training.objective import draft_blocks

PROMPT, ANSWER, COUNT = 12, 36, 20


def score(values: Sequence[float], first_accepted: float, name: str = "other") -> Score:
    return Score(name, "", tuple(values), first_accepted)


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return wrap_target(tiny_target(), "plain")


@pytest.fixture(scope="module")
def texts(target: LoadedTarget) -> list[Text]:
    engine = Engine(target, None, EngineSettings(max_num_seqs=COUNT, max_model_len=64))
    sampling = SamplingParameters(max_tokens=ANSWER, ignore_eos=True)
    results = engine.generate(tiny_prompts([PROMPT] * COUNT, seed=5), sampling)
    return [Text(result.prompt_ids + result.token_ids, PROMPT) for result in results]


@pytest.fixture(scope="module")
def drafter(target: LoadedTarget, texts: list[Text]) -> BlockDrafter:
    """One that knows these very texts by heart, from their taps."""
    made = tiny_drafter(target.contract, block_size=4)
    assert isinstance(made, BlockDrafter)
    made.requires_grad_(True)
    ids = torch.tensor([text.ids for text in texts])
    taps = TapCollector.of_layers(made.contract.target_layer_ids)
    with torch.no_grad():
        target.model(ids, torch.arange(ids.shape[1]).expand(ids.shape), WholeSequence(), taps)
    supervised = torch.zeros_like(ids, dtype=torch.bool)
    supervised[:, PROMPT:] = True
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(120):
        anchors, valid = sample_anchors(supervised, 6, generator)
        blocks = make_blocks(ids, supervised, anchors, valid, made.contract.block_size)
        rows = made.embed(made.block_ids(ids.gather(1, anchors), made.contract.num_draft_tokens), target.model)
        hidden = draft_blocks(made, taps.collected(), rows, blocks)[blocks.counts_BAQ]
        loss = functional.cross_entropy(made.logits(hidden, target.model), blocks.labels_BAQ[blocks.counts_BAQ])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made.requires_grad_(False)


def test_the_reading_of_training_is_the_best(target: LoadedTarget, texts: list[Text], drafter: BlockDrafter) -> None:
    seen: list[tuple[int, int]] = []
    verdict = search_contract(target.model, drafter, texts, on_progress=lambda *done: seen.append(done))
    assert verdict.says_yes and not verdict.is_lost and verdict.declared.first_accepted > 0.9
    assert verdict.others[0].log_likelihood < verdict.declared.log_likelihood
    assert seen[-1] == (len(verdict.others) + 1, len(verdict.others) + 1) and len(verdict.others) > 20


@pytest.mark.parametrize(
    ("changes", "name", "fix"),
    [
        ({"is_neox_style": False}, "RoPE with split halves", '"is_neox_style": true'),
        ({"rope": RopeSettings(theta=1e6)}, "theta 10000", '"rope_theta": 10000'),
        ({"mask_token_id": 17}, "the mask id 3", '"mask_token_id": 3'),
        ({"input_embedding_scale": 8.0}, "input_embedding_scale 1", '"input_embedding_scale": 1'),
        ({"has_tap_norm": False}, "with a norm per tap, gains of 1", '"fc_norm": true'),
        ({"target_layer_ids": (-1, 0, 1)}, "every tap one layer later", "[0, 1, 2]"),
        ({"target_layer_ids": (0, 1, 3)}, "tap 2 one layer earlier", "[0, 1, 2]"),
        ({"target_layer_ids": (0, 2, 1)}, "taps 1 and 2 swapped", "columns in fc.weight"),
    ],
)
def test_faults_are_named_without_a_fingerprint(
    target: LoadedTarget, texts: list[Text], drafter: BlockDrafter, changes: dict[str, Any], name: str, fix: str
) -> None:
    if "target_layer_ids" in changes:
        changes = {"target_layer_ids": tuple(map(TargetLayerId, changes["target_layer_ids"]))}
    verdict = search_contract(target.model, reread(drafter, **changes), texts, mask_candidates=[3])
    assert verdict.better is not None and not verdict.says_yes
    assert (verdict.better.name, fix in verdict.better.fix) == (name, True)
    assert verdict.p_value is not None and verdict.p_value < 1e-4


def test_an_untrained_drafter_is_lost_on_every_reading(target: LoadedTarget, texts: list[Text]) -> None:
    verdict = search_contract(target.model, tiny_drafter(target.contract, seed=11), texts)
    assert verdict.is_lost and not verdict.says_yes and verdict.better is None


def test_a_gain_must_be_large_sure_and_not_at_the_drafts_cost() -> None:
    count = 20
    declared = score([-2.0] * count, 0.5, "as the config says")
    assert judge(declared, [score([-1.9] * count, 0.55)]).better is not None
    assert judge(declared, [score([-1.98] * count, 0.55)]).says_yes, "too small"
    mixed = [-2.0 + (2.0 if index % 2 else -1.6) for index in range(count)]
    assert sum(mixed) / count > -1.85
    assert judge(declared, [score(mixed, 0.6)]).says_yes, "not sure"
    assert judge(declared, [score([-1.5] * count, 0.4)]).says_yes, "fewer drafts accepted"
    hopeless = score([-9.0] * count, 0.01)
    verdict = judge(hopeless, [score([-8.0] * count, 0.1)])
    assert verdict.is_lost and not verdict.says_yes, "a little better by chance is not right"


def test_many_readings_ask_for_more() -> None:
    """The level is shared: what one reading would pass with, the best of hundred does not."""
    count = 16
    gains = [0.3 + 0.01 * index for index in range(13)] + [-0.001, -0.002, -0.003]  # sign-rank p is 28 / 2**16
    declared = score([-2.0] * count, 0.5)
    better = score([-2.0 + gain for gain in gains], 0.7, "better")
    assert judge(declared, [better]).better is better
    assert judge(declared, [better, *[score([-5.0] * count, 0.1)] * 99]).better is None


def test_too_few_prompts_are_no_verdict(target: LoadedTarget, texts: list[Text], drafter: BlockDrafter) -> None:
    with pytest.raises(DataError, match="15 answered prompts are too few to judge by, 16 are needed"):
        search_contract(target.model, drafter, texts[:15])
    short = [Text(text.ids[: PROMPT + 4], PROMPT) for text in texts]
    with pytest.raises(DataError, match="0 answered prompts"):
        search_contract(target.model, drafter, short)


def test_places_lie_in_the_answer_and_leave_room_for_the_scored_rows() -> None:
    assert places_of_text(Text(tuple(range(40)), 10)) == [10, 12, 15, 18, 21, 24, 27, 30, 33, 36]
    assert places_of_text(Text(tuple(range(15)), 10)) == [10, 11]
    assert places_of_text(Text(tuple(range(14)), 10)) == [10]


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_scored_drafts_are_those_of_the_drafter(target: LoadedTarget, texts: list[Text], family: DrafterFamily) -> None:
    """The search computes drafts in a way of its own; they must be the drafts that serving and training compute."""
    made = tiny_drafter(target.contract, family=family)
    text, anchors = texts[0], places_of_text(texts[0])
    (states,) = [contract_search._states(target.model, text, set(readings_of(target.model, made, ())[0].places))]
    taps = [states[place] for place in readings_of(target.model, made, ())[0].places]
    ids = torch.tensor([text.ids])
    if isinstance(made, Eagle3Drafter):
        found = contract_search._row_logits(target.model, made, text, taps, anchors)[:, 0].argmax(-1).tolist()
        features = made.features(taps).unsqueeze(0)
        assert found == [direct_sequential_drafts(target.model, made, ids, features, n, 1)[0] for n in anchors]
        return
    found_logits = contract_search._block_logits(target.model, made, text, taps, anchors)
    anchors_1A = torch.tensor([anchors])
    supervised = torch.ones_like(ids, dtype=torch.bool)
    blocks = make_blocks(ids, supervised, anchors_1A, anchors_1A >= 0, made.contract.block_size)
    rows = made.embed(made.block_ids(ids.gather(1, anchors_1A), made.contract.num_draft_tokens), target.model)
    hidden = made.predicted_rows(draft_blocks(made, [tap.unsqueeze(0) for tap in taps], rows, blocks))[0, :, :3]
    torch.testing.assert_close(found_logits, made.logits(hidden, target.model), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_readings_of_a_family(target: LoadedTarget, family: DrafterFamily) -> None:
    made: Drafter = tiny_drafter(target.contract, family=family)
    names = [reading.name for reading in readings_of(target.model, made, [9, 10**6])]
    assert names[0] == "as the config says" and len(set(names)) == len(names)
    assert {"every tap one layer later", "taps 0 and 2 swapped", "RoPE with interleaved pairs", "theta 1000000"} <= set(
        names
    )
    assert ("the mask id 9" in names) == (family != "eagle3") and "the mask id 1000000" not in names
    assert ("the block layout fill_in" in names) == (family == "dspark"), "others do not draft in two ways"
    assert ("norm_before_residual false" in names) == (family == "eagle3")
    assert "the last tap after the final norm" in names


def test_tokens_outside_a_reduced_vocabulary_count_as_unlikely(target: LoadedTarget, texts: list[Text]) -> None:
    made = tiny_drafter(target.contract, draft_vocab_size=256, has_own_head=True)
    table = made.vocabulary.target_ids_V
    assert table is not None
    outside = next(token for token in range(512) if token not in table.tolist())
    labels = torch.tensor([[outside, int(table[7])]])
    logits = torch.zeros(1, 2, 256)
    logits[0, 1, 7] = 50.0
    log_p, is_best = contract_search._against(made, logits, labels)
    assert log_p.tolist() == [[-20.0, 0.0]] and is_best.tolist() == [[False, True]]
