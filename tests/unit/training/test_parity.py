"""Training drafts what serving drafts, for every family; and each way of breaking that is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.hybrid_runs import FAMILIES as HYBRID_FAMILIES
from tests.hybrid_runs import drafter_for, prompts_of, small_target, stepwise_text
from tests.tiny import loaded, tiny_prompts
from torch import Tensor

from paceline.checkpoint.contract import ConfidenceSettings, MarkovSettings
from paceline.engine.engine import Engine
from paceline.engine.request import SamplingParameters
from paceline.errors import CompatibilityError
from paceline.models.drafters.dspark import DSparkDrafter
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.training import objective, parity, parity_stages, serving_pass
from paceline.training.anchors import Blocks
from paceline.training.parity import compare, training_drafter
from paceline.training.parity_stages import Gates, KnownText, Parity, Stage

FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {"drafter_family": "dflash"},
    "dflash-window": {"drafter_family": "dflash", "layer_windows": (4, None), "layer_causal": (True, False)},
    "dflash2": {"drafter_family": "dflash2"},
    "dspark": {"drafter_family": "dspark"},
    "dspark-fill-in": {
        "drafter_family": "dspark",
        "layout": "fill_in",
        "markov": MarkovSettings(rank=8, kind="gated"),
        "confidence": ConfidenceSettings(with_markov=True),
    },
    "dspark-rnn": {"drafter_family": "dspark", "markov": MarkovSettings(rank=8, kind="rnn")},
    "eagle3": {"drafter_family": "eagle3"},
    "eagle3-few-ids": {"drafter_family": "eagle3", "draft_vocab_size": 100, "has_own_head": True, "num_layers": 2},
}


def own_texts(target: LoadedTarget, lengths: tuple[int, ...] = (5, 9)) -> list[KnownText]:
    prompts = tiny_prompts(lengths)
    results = Engine(target).generate(prompts, SamplingParameters(max_tokens=24, ignore_eos=True))
    return [KnownText((*p, *r.token_ids), len(p)) for p, r in zip(prompts, results, strict=True)]


def compared(pair: tuple[LoadedTarget, LoadedDrafter], **options: Any) -> Parity:
    return compare(*pair, own_texts(pair[0]), **options)


def first_difference(found: Parity) -> str:
    assert found.first_difference is not None
    assert found.first_difference.cause
    return found.first_difference.name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["plain", "row_invariant"])
def test_every_family_drafts_alike(family: str, mode: Any) -> None:
    found = compared(loaded(linear_mode=mode, **FAMILIES[family]))
    assert found.first_difference is None, found
    assert found.dtype == "float32"
    assert [slot.num_equal for slot in found.slots] == [slot.num_blocks for slot in found.slots]
    assert all(slot.num_blocks == 32 for slot in found.slots)  # 16 anchors of each text


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_drafters_of_hybrid_targets_draft_alike(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fed with mixtures of the residual; refused rows must not stay in the states that later taps come from."""
    target = small_target()
    (prompts, texts) = prompts_of([5, 9]), []
    for prompt in prompts:
        texts.append(KnownText((*prompt, *stepwise_text(target, prompt, 24)), len(prompt)))
    found = compare(target, drafter_for(target, family), texts)
    assert found.first_difference is None, found
    assert all(slot.num_equal == slot.num_blocks == 32 for slot in found.slots)
    monkeypatch.setattr(serving_pass, "commit_rows", lambda *_args: None)
    assert first_difference(compare(target, drafter_for(target, family), texts)).startswith("tap")


def test_whole_blocks_are_compared_whatever_is_served() -> None:
    target, drafter = loaded()
    found = compared((target, replace(drafter, num_draft_tokens=2)))
    assert found.first_difference is None
    assert len(found.slots) == 7


def test_bf16_is_held_against_its_own_coarseness() -> None:
    found = compared(loaded(linear_mode="plain", dtype=torch.bfloat16))
    assert found.first_difference is None, found
    assert found.dtype == "bfloat16"


def test_gates_follow_the_dtype() -> None:
    fine, coarse = Gates.of(torch.float32, 30.0), Gates.of(torch.bfloat16, 30.0)
    assert (fine.score_error, fine.equal_share, fine.teacher_share) == (1e-3, 0.999, 0.995)
    assert (coarse.score_error, coarse.teacher_share) == (4 * 2**-7 * 30, 0.97)
    assert Gates.of(torch.bfloat16, 1.0).score_error == 0.1


def judged(errors: list[float], margins: list[float], alike: list[bool], *, dtype: torch.dtype) -> tuple[Stage, Stage]:
    """The stages of scores and drafts, of blocks with a draft each over three ids whose scores differ by as much."""
    served = torch.tensor([[[20.0, 4.0, -9.0]]]).expand(len(errors), 1, 3)
    pair: Any = SimpleNamespace(
        trained_scores_AKV=served + torch.tensor(errors)[:, None, None],
        served_scores_AKV=served,
        margin_AK=torch.tensor(margins)[:, None],
        chosen_alike_AK=torch.tensor(alike)[:, None],
    )
    gates = Gates.of(dtype, 20.0)
    slots = parity_stages._slots([pair], gates)
    return parity_stages._scores_stage(slots, gates), parity_stages._choice_stage(slots, gates)


def test_a_small_fault_in_every_score_is_one() -> None:
    """Of bf16 a single score of 20 may be half of one off, which is four of its steps; all of them may not."""
    kept = {"margins": [9.0] * 200, "alike": [True] * 200, "dtype": torch.bfloat16}
    for errors, is_sound in (([0.05] * 199 + [0.5], True), ([0.12] * 200, False), ([0.0] * 199 + [0.7], False)):
        assert judged(errors, **kept)[0].ok == is_sound
    scores, _ = judged([0.12] * 200, **kept)
    assert "largest difference 0.12" in scores.note and "root mean square 0.12 (below 0.1)" in scores.note
    assert "scores of draft 1 differ" in scores.cause


def test_drafts_change_places_within_twice_what_their_row_is_off_by() -> None:
    errors, alike, dtype = [0.3] + [0.01] * 9, [False] + [True] * 9, torch.bfloat16
    assert judged(errors, [0.59] + [9.0] * 9, alike, dtype=dtype)[1].ok
    assert not judged(errors, [0.61] + [9.0] * 9, alike, dtype=dtype)[1].ok
    assert not judged([0.01] * 10, [0.59] + [9.0] * 9, alike, dtype=dtype)[1].ok
    assert not judged([5e-4] * 10, [0.003] + [9.0] * 9, alike, dtype=torch.float32)[1].ok


def test_a_candidate_is_as_far_from_change_as_from_the_ids_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A selector's choice may be the weakest of its candidates: rounding then puts another id in its place."""
    seen: list[Any] = []
    judge = parity.judge

    def look(target: Any, served: Any, trained: Any, pairs: Any, *rest: Any) -> Parity:
        seen.extend(pairs)
        return judge(target, served, trained, pairs, *rest)

    monkeypatch.setattr(parity, "judge", look)
    pair = loaded(drafter_family="dflash2")
    compared(pair)
    num_candidates = pair[1].model.num_candidates
    for one in seen:
        scores = one.served_scores_AKV
        left_out = scores.sort(dim=-1, descending=True).values[..., num_candidates]
        above = scores.gather(-1, one.served.ids_AK.unsqueeze(-1)).squeeze(-1) - left_out
        assert (above >= 0).all() and (one.margin_AK <= above).all()
    assert any(bool((one.margin_AK < 0.5).any()) for one in seen)


# --- planted faults ---


def test_a_tap_that_training_reads_one_layer_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = parity.TargetFeatures

    def shifted(target: Any, layers: Any, stream: Any) -> Any:
        return original(target, [layers[0], layers[1], layers[2] + 1], stream)

    monkeypatch.setattr(parity, "TargetFeatures", shifted)
    assert first_difference(compared(loaded())) == "tap 2 (layer 2)"


def test_a_mask_that_shows_the_anchors_own_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = objective.block_visibility

    def leaky(anchors_BA: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return original(anchors_BA + 1, *arguments, **options)

    monkeypatch.setattr(objective, "block_visibility", leaky)
    found = compared(loaded())
    assert first_difference(found) == "scores"
    assert found.first_difference is not None
    assert "what its row may see" in found.first_difference.cause


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_labels_that_are_shifted_by_one_are_named(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = parity.make_blocks

    def shifted(*arguments: Any) -> Blocks:
        blocks = original(*arguments)
        return replace(blocks, labels_BAQ=blocks.labels_BAQ.roll(-1, dims=-1))

    monkeypatch.setattr(parity, "make_blocks", shifted)
    assert first_difference(compared(loaded(**FAMILIES[family]))) == "labels"


def test_rope_positions_that_are_one_off_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = parity.make_blocks

    def late(*arguments: Any) -> Blocks:
        blocks = original(*arguments)
        return replace(blocks, positions_BAQ=blocks.positions_BAQ + 1)

    monkeypatch.setattr(parity, "make_blocks", late)
    found = compared(loaded())
    assert first_difference(found) == "labels"
    assert found.first_difference is not None and "does not sit at its anchor" in found.first_difference.cause
    assert not next(stage for stage in found.stages if stage.name == "scores").ok


def test_context_at_other_rope_positions_is_named() -> None:
    pair = loaded()
    trained = training_drafter(pair[1])
    original = trained.backbone.context_kv
    trained.backbone.context_kv = lambda features, positions: original(features, positions + 1)
    assert first_difference(compared(pair, trained=trained)) == "context of drafter layer 0"


def test_another_drafter_dtype_is_refused() -> None:
    pair = loaded()
    with pytest.raises(CompatibilityError, match=r"torch.bfloat16 in training and torch.float32 in serving"):
        compared(pair, trained=training_drafter(pair[1]).to(torch.bfloat16))


def test_an_eagle3_drafter_with_windows_is_refused() -> None:
    """It can be served; it cannot be trained, and an assertion of ours is no answer."""
    pair = loaded(drafter_family="eagle3", layer_windows=(8,), layer_causal=(True,), num_layers=1)
    with pytest.raises(CompatibilityError, match="layers see 8 tokens; an EAGLE-3 drafter is trained without windows"):
        compared(pair)


def test_states_of_the_wrong_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = parity.TargetFeatures

    def late(*arguments: Any) -> Callable[[Any], Any]:
        features = original(*arguments)

        class Late:
            head_VD = features.head_VD
            embed, logits = staticmethod(features.embed), staticmethod(features.logits)

            def __call__(self, batch: Any) -> Any:
                found = features(batch)
                return found._replace(hidden_BSD=found.hidden_BSD.roll(1, dims=1))

        return Late()

    monkeypatch.setattr(parity, "TargetFeatures", late)
    assert first_difference(compared(loaded())) == "teacher"


def test_texts_of_another_writer_say_nothing_about_the_teacher() -> None:
    target, drafter = loaded()
    texts = [KnownText(tuple(ids), 4) for ids in tiny_prompts([20], seed=3)]
    assert compare(target, drafter, texts, are_own_texts=False).first_difference is None
    assert first_difference(compare(target, drafter, texts)) == "teacher"


@pytest.mark.parametrize("family", ["dflash2", "dspark"])
def test_a_head_that_training_holds_otherwise_is_found(family: str) -> None:
    pair = loaded(**FAMILIES[family])
    trained = training_drafter(pair[1])
    head = trained.markov_head if isinstance(trained, DSparkDrafter) else trained.candidate_selector
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(-parameter.roll(1, dims=0))
    assert first_difference(compared(pair, trained=trained)) == ("drafts" if family == "dflash2" else "scores")


def test_the_targets_arithmetic_is_given_back() -> None:
    pair = loaded(linear_mode="row_invariant")
    compared(pair)
    assert pair[0].model.layers[0].self_attn.qkv_proj.mode == "row_invariant"
    assert not pair[0].model._forward_hooks
    assert not pair[1].model.backbone._forward_hooks
