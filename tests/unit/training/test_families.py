"""Every family through the same loop: all parts are trained, a resume is exact, and the walk is what serving does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import chat_target, random_rows, tiny_settings, write_token_file
from tests.unit.training.runs import Act, Crash, crash_at, nothing
from torch import Tensor

from paceline.configuration.run import TrainRun
from paceline.engine.engine import Engine
from paceline.engine.request import SamplingParameters
from paceline.errors import ConfigError
from paceline.models.drafters.table import Drafter
from paceline.models.loading import LoadedTarget, load_drafter
from paceline.training import anchors as anchor_rules
from paceline.training import step as step_module
from paceline.training.contract import drafter_contract
from paceline.training.data import Batch, Conversations, read_conversations
from paceline.training.features import TargetFeatures
from paceline.training.loop import train
from paceline.training.objective import Objective
from paceline.training.resume import latest_checkpoint
from paceline.training.simulate import simulate
from paceline.training.starting import starting_drafter
from paceline.training.step import StepResult, StepSettings, train_step

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "dflash2": {"family": "dflash2", "selector_rank": 8, "selector_top_k": 4},
    "dspark": {"family": "dspark", "markov_rank": 8, "layout": "anchor_sampling", "block_size": 3},
    "dspark-fill-in": {"family": "dspark", "markov_rank": 8, "markov_kind": "gated"},
    "dspark-rnn": {"family": "dspark", "markov_rank": 8, "markov_kind": "rnn", "confidence_head": False},
    "eagle3": {"family": "eagle3", "mask_token_id": None},
    "eagle3-own-head": {"family": "eagle3", "mask_token_id": None, "own_head": True, "num_layers": 2},
    "eagle3-few-ids": {
        "family": "eagle3",
        "mask_token_id": None,
        "draft_vocab_size": 100,
        "min_vocab_coverage": 0.0,
        "norm_output": True,
    },
}


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return chat_target()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_token_file(tmp_path / "data.npz", random_rows(24, 20, vocab_size=400), num_prompt_tokens=4)


def settings(folder: Path, data: Path, family: str, **changes: object) -> TrainRun:
    drafter = {f"drafter_{key}": value for key, value in FAMILIES[family].items()}
    return tiny_settings(folder, data, **(drafter | changes))


def untrained(run: TrainRun, target: LoadedTarget, train: Conversations) -> Drafter:
    return starting_drafter(run, drafter_contract(run, target.contract), target, train, CPU)


def masters(run: TrainRun) -> dict[str, Tensor]:
    checkpoint = latest_checkpoint(run.output / "checkpoints")
    assert checkpoint is not None
    (file,) = checkpoint.glob("*.safetensors")
    return {name: value for name, value in load_file(file).items() if name.startswith("master.")}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_is_trained_and_a_resume_is_exact(
    target: LoadedTarget, tmp_path: Path, data: Path, at_step: Callable[[Act], None], family: str
) -> None:
    whole, parts = settings(tmp_path / "whole", data, family), settings(tmp_path / "parts", data, family)
    train(whole, target)
    text = read_conversations(data, vocab_size=512).select(range(20))
    before = dict(untrained(whole, target, text).named_parameters())
    after = masters(whole)
    assert {name.removeprefix("master.") for name in after} == set(before)
    assert [name for name, start in before.items() if torch.equal(after[f"master.{name}"], start.detach())] == []
    at_step(crash_at(13))
    with pytest.raises(Crash):
        train(parts, target)
    at_step(nothing)
    assert train(parts, target, resume=True).is_finished
    assert all(torch.equal(value, after[name]) for name, value in masters(parts).items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_in_bfloat16_is_trained_for_on_a_cpu(tmp_path: Path, data: Path, family: str) -> None:
    """What "auto" takes on a CPU that has it; states in the head's dtype meet masters in float32."""
    target = chat_target()
    target.model.to(torch.bfloat16)
    run = settings(tmp_path / "run", data, family, schedule_num_steps=2)
    outcome = train(run, target)
    assert outcome.drafter is not None and load_drafter(str(outcome.drafter), target).contract.dtype == "bfloat16"
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-0000002" / "state.json").read_text())
    assert state["identity"]["products"] == "bfloat16", "a run of before, in float32, must not be resumed in it"


def test_a_target_in_float16_is_refused(tmp_path: Path, data: Path) -> None:
    target = chat_target()
    target.model.to(torch.float16)
    with pytest.raises(ConfigError, match="the target is in float16"):
        train(settings(tmp_path / "run", data, "dflash2"), target)


@pytest.mark.parametrize("family", ["dflash2", "dspark", "dspark-fill-in", "eagle3", "eagle3-few-ids"])
def test_what_was_learnt_by_heart_is_accepted_and_the_walk_is_what_serving_does(
    target: LoadedTarget, tmp_path: Path, family: str
) -> None:
    """Overfitted on the target's own greedy text; every step of every text, simulated and served."""
    prompts = random_rows(4, 4, vocab_size=400, seed=5)
    sampling = SamplingParameters(max_tokens=20, ignore_eos=True)
    plain = Engine(target).generate(prompts, sampling)
    texts = [[*prompt, *result.token_ids] for prompt, result in zip(prompts, plain, strict=True)]
    file = write_token_file(tmp_path / "texts.npz", [*texts, texts[0]], num_prompt_tokens=4)
    run = settings(
        tmp_path / "run",
        file,
        family,
        data_hold_out=1,
        evaluate_num_conversations=1,
        schedule_num_steps=100,
        schedule_batch_size=4,
        schedule_num_anchors=19,
        optimizer_learning_rate=1e-2,
        checkpoint_every=100,
    )
    outcome = train(run, target)
    assert outcome.drafter is not None
    drafter = load_drafter(str(outcome.drafter), target)
    results = Engine(target, drafter).generate(prompts, sampling)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    served = [(len(result.token_ids) - 1, len(result.trace.records)) for result in results]
    conversations = read_conversations(file, vocab_size=512).select(range(4))
    features = TargetFeatures(target.model, drafter.contract.target_layer_ids)
    found = simulate(drafter.model, features, conversations, batch_size=3, max_length=64, mixed_precision=False)
    assert list(found.per_conversation) == served
    assert found.acceptance_length > 2.0
    assert len(found.per_position) == drafter.num_draft_tokens == 3


# --- what a step counts ---


def batch(supervised: str, tokens: Tensor | None = None) -> Batch:
    """One conversation: '#' is supervised."""
    ids = torch.arange(10, 10 + len(supervised)) if tokens is None else tokens
    marks = torch.tensor([[mark == "#" for mark in supervised]])
    return Batch.of_rows(ids[None], marks, torch.tensor([len(supervised)]))


def seeded(part: int) -> torch.Generator:
    return torch.Generator().manual_seed(part)


def one_step(target: LoadedTarget, drafter: Drafter, data: Batch, **terms: float) -> StepResult:
    weights: dict[str, Any] = {"kl": 0.0, "ce": 1.0, "confidence": 0.0} | terms
    objective = Objective(gamma=4.0, chunk_rows=16, **weights)
    features = TargetFeatures(target.model, drafter.contract.target_layer_ids)
    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.0)
    steps = StepSettings(objective, num_anchors=100, clip_norm=1e9, mixed_precision=False)
    return train_step(
        drafter, features, optimizer, [data], lambda part: torch.Generator().manual_seed(part), 0.0, steps
    )


@pytest.fixture(params=FAMILIES)
def drafter(request: pytest.FixtureRequest, target: LoadedTarget, tmp_path: Path, data: Path) -> Drafter:
    run = settings(tmp_path / "run", data, request.param, drafter_block_size=4 - (request.param == "dspark"))
    return untrained(run, target, read_conversations(data, vocab_size=512))


TWO_TURNS = "....#####..####...."
COUNTED = [0, 7, 5, 3]  # drafts 1, 2 and 3 of the anchors of both turns: 4 and 3, 3 and 2, 2 and 1


def all_drafted(drafter: Drafter) -> bool:
    return not drafter.contract.has_vocabulary_map


def test_only_supervised_labels_count_and_a_shifted_mask_would_be_seen(
    target: LoadedTarget, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.arange(10, 10 + len(TWO_TURNS))
    behind = tokens.clone()
    behind[[9, 15]] += 200  # the token after each turn: read in the second turn's context, but never a label
    first = one_step(target, drafter, batch("....#####.........."))
    other = one_step(target, drafter, batch("....#####..........", behind))
    assert float(first.loss) == float(other.loss) > 0
    if all_drafted(drafter):
        assert one_step(target, drafter, batch(TWO_TURNS)).counted_Q.tolist() == COUNTED
    make_blocks = anchor_rules.make_blocks

    def shifted(ids: Tensor, supervised: Tensor, *arguments: Any) -> anchor_rules.Blocks:
        """The planted fault: the mark is read one token early."""
        return make_blocks(ids, supervised.roll(1, dims=1) | supervised, *arguments)

    monkeypatch.setattr(step_module, "make_blocks", shifted)
    if all_drafted(drafter):
        assert one_step(target, drafter, batch(TWO_TURNS)).counted_Q.tolist() != COUNTED
        faulty = [one_step(target, drafter, batch("....#####..........", ids)).loss for ids in (tokens, behind)]
        assert float(faulty[0]) != float(faulty[1])


def test_a_batch_without_an_anchor_costs_nothing_and_touches_every_parameter(
    target: LoadedTarget, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[str] = []
    clip = torch.nn.utils.clip_grads_with_norm_

    def noted(parameters: Any, *arguments: Any) -> None:
        for name, parameter in drafter.named_parameters():
            if parameter.grad is not None:
                touched.append(name)
                assert torch.count_nonzero(parameter.grad) == 0, name
        clip(parameters, *arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", noted)
    result = one_step(target, drafter, batch("....#...."), kl=0.5, confidence=1.0)
    assert float(result.loss) == 0.0 and bool(result.is_finite)
    assert set(touched) == {name for name, _ in drafter.named_parameters()}


def test_bf16_products_on_float32_masters_stay_close(drafter: Drafter, data: Path) -> None:
    """As on a GPU: a target in bf16, autocast around both; losses and gradients of every family keep their meaning."""
    tokens = read_conversations(data, vocab_size=512)
    objective = Objective(kl=0.5, ce=0.5, gamma=4.0, chunk_rows=16, confidence=1.0)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        target = wrap_target(tiny_target().to(dtype), "plain")
        steps = StepSettings(objective, 8, clip_norm=1e9, mixed_precision=dtype == torch.bfloat16)
        features = TargetFeatures(target.model, drafter.contract.target_layer_ids)
        optimizer = torch.optim.SGD(drafter.parameters(), lr=0.0)
        found.append(train_step(drafter, features, optimizer, [tokens.batch(range(4), 24)], seeded, 0.0, steps))
    assert float(found[1].loss) == pytest.approx(float(found[0].loss), rel=0.05)
    assert float(found[1].gradient_norm) == pytest.approx(float(found[0].gradient_norm), rel=0.2)
    assert found[0].counted_Q.tolist() == found[1].counted_Q.tolist()
    assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())


def test_groups_must_divide_the_width(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    with pytest.raises(ConfigError, match="conv_group_size 24 does not divide the width, 64"):
        train(settings(tmp_path / "run", data, "dflash2", drafter_conv_group_size=24), target)


def test_too_few_ids_are_refused_with_their_coverage(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    """B21: a drafter that can't say most of the text looks healthy in its own metrics."""
    run = settings(tmp_path / "run", data, "eagle3-few-ids", drafter_min_vocab_coverage=0.95)
    with pytest.raises(ConfigError, match=r"draft_vocab_size 100 covers \d\d\.\d% of the response tokens") as caught:
        train(run, target)
    assert caught.value.hint is not None and "larger draft_vocab_size" in caught.value.hint
    with pytest.raises(ConfigError, match="draft_vocab_size 513 is more than the vocabulary of 512"):
        train(settings(tmp_path / "run", data, "eagle3", drafter_draft_vocab_size=513), target)
    assert not (tmp_path / "run").exists()
