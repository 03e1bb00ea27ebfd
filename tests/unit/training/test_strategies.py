"""Steps shared by two gloo processes: the numbers of one process, whatever the ranks have to learn from."""

from __future__ import annotations

import functools
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tiny import tiny_target
from tests.unit.training.processes import run_ranks, values
from tests.unit.training.shared_steps import (
    FAMILIES,
    SCENARIOS,
    Trained,
    hash_of,
    train_scenario,
    train_scenarios,
    train_without_heads,
)

from paceline.errors import ConfigError
from paceline.training.ranks import Ranks

ALONE = Ranks.alone(torch.device("cpu"))
Found = dict[str, tuple[Trained, Trained]]


def difference(found: Trained, wanted: Trained) -> float:
    """The largest relative difference of a parameter."""
    assert found.parameters.keys() == wanted.parameters.keys()
    pairs = [(found.parameters[name], wanted.parameters[name]) for name in wanted.parameters]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def same_bits(left: Trained, right: Trained) -> bool:
    return all(np.array_equal(left.parameters[name], right.parameters[name]) for name in left.parameters)


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What both ranks hold after every scenario."""
    first, second = values(run_ranks(train_scenarios, tmp_path_factory.mktemp("shared") / "ranks", request.param))
    return {scenario: (first[scenario], second[scenario]) for scenario in SCENARIOS}


@functools.cache
def alone(scenario: str) -> Trained:
    """The same in this process."""
    return train_scenario(ALONE, "ddp", scenario)


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_of_two_ranks_are_those_of_one(shared: Found, family: str) -> None:
    """Two accumulation parts, AdamW with decay: 1e-6 apart at most, and the ranks bitwise equal."""
    (first, second), one = shared[f"even {family}"], alone(f"even {family}")
    assert difference(first, one) < 1e-6
    assert same_bits(first, second)
    assert first.losses == second.losses == pytest.approx(one.losses, rel=1e-6)
    assert first.norms == second.norms == pytest.approx(one.norms, rel=2e-6)
    assert first.counted != one.counted
    assert [sum(share) for share in zip(first.counted, second.counted, strict=True)] == one.counted


def test_flex_attention_learns_under_either_strategy_what_dense_masks_do(shared: Found) -> None:
    """Its masks and its padding on every rank, under shards too; the kernel itself needs a GPU."""
    (first, second), one, dense = shared["flex"], alone("flex"), alone("dense")
    assert difference(first, one) < 1e-6 and same_bits(first, second)
    assert difference(first, dense) < 1e-5 and not same_bits(one, dense), "it attended another way"
    assert first.norms == pytest.approx(dense.norms, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_without_labels_takes_part(shared: Found, family: str) -> None:
    """Heads of a rank that has no label would have no gradient."""
    first, second = shared[f"no label {family}"]
    assert set(second.counted) == {0} and min(first.counted) > 0
    assert difference(first, alone(f"no label {family}")) < 1e-6
    assert same_bits(first, second)


def test_a_rank_that_leaves_its_heads_out_would_be_seen(tmp_path: Path) -> None:
    """The planted fault: the others wait for its gradients, here for two seconds, or meet it at another exchange."""
    ended = run_ranks(train_without_heads, tmp_path / "ranks", "fsdp", timeout_s=2.0)
    assert all(end.exit_code != 0 or end.error for end in ended)


def test_denominators_are_pooled_over_ranks(shared: Found) -> None:
    """Many labels on one rank, few on the other. Plain descent, whose change is the gradient; Adam hides a factor."""
    (first, second), one = shared["uneven"], alone("uneven")
    assert first.counted[0] > 4 * second.counted[0]
    assert difference(first, one) < 1e-6 and first.norms == pytest.approx(one.norms, rel=1e-6)
    # The planted fault: the mean of the ranks' own means is another gradient.
    assert shared["uneven, unpooled"][0].norms != pytest.approx(one.norms, rel=1e-2)


def test_ranks_draw_different_anchors_which_do_not_depend_on_their_number(shared: Found) -> None:
    first, second = shared["alike"]
    pairs = zip(first.anchors, second.anchors, strict=True)
    assert [left + right for left, right in pairs] == alone("alike").anchors
    assert first.anchors[0] != second.anchors[0] and first.anchors[0] != first.anchors[1]
    # The planted fault: one seed for all ranks gives all the same anchors.
    first, second = shared["alike, own anchors"]
    assert first.anchors == second.anchors


def test_the_gradient_is_clipped_by_the_norm_of_the_whole_model(shared: Found, request: pytest.FixtureRequest) -> None:
    (first, second), one = shared["clipped"], alone("clipped")
    assert one.norms[0] > 0.01 and first.norms == second.norms == pytest.approx(one.norms, rel=1e-6)
    assert difference(first, one) < 1e-6
    if "fsdp" in request.node.callspec.id:
        # The planted fault: a rank that clips by the norm of its own shard.
        first, second = shared["clipped, own shard"]
        assert first.norms != second.norms and first.norms != pytest.approx(one.norms, rel=1e-3)


@pytest.mark.parametrize("poisoned_rank", [0, 1])
def test_a_nan_on_one_rank_skips_the_step_on_all(shared: Found, poisoned_rank: int) -> None:
    first, second = shared[f"poisoned {poisoned_rank}"]
    assert first.updated == second.updated == [True, False, True]
    assert same_bits(first, second)
    assert all(np.isfinite(value).all() for value in first.parameters.values())


def test_the_target_stays_as_it_was_on_every_rank(shared: Found) -> None:
    """Hash of embedding, layers and head before and after training."""
    before = hash_of(dict(tiny_target().named_parameters()))
    assert {rank.target_hash for found in shared.values() for rank in found} == {before}


def test_no_process_is_left_behind() -> None:
    assert multiprocessing.active_children() == []


def failing(ranks: Ranks, error: type[Exception] | None) -> str:
    def act() -> str:
        if ranks.rank == 1 and error is not None:
            raise error("a reason")
        return f"rank {ranks.rank}"

    return ranks.together(act) + ", " + ranks.first_only(lambda: f"from {ranks.rank}")


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    fine = values(run_ranks(failing, tmp_path / "fine", None))
    assert fine == ["rank 0, from 0", "rank 1, from 0"]
    first, second = run_ranks(failing, tmp_path / "failed", ValueError)
    assert "OtherRankFailedError: rank 1 failed" in first.error
    assert "ValueError: a reason" in second.error


def talk(ranks: Ranks) -> tuple[bool, bool, list[int], float, list[int]]:
    ranks.wait()
    return (
        ranks.any(ranks.rank == 1),
        ranks.any(False),
        ranks.gathered(ranks.rank * 10),
        float(ranks.total(torch.tensor(ranks.rank + 0.5))),
        list(range(6))[ranks.rows(6)],
    )


def test_what_ranks_tell_each_other(tmp_path: Path) -> None:
    three = values(run_ranks(talk, tmp_path / "three", size=3))
    assert three == [(True, False, [0, 10, 20], 4.5, rows) for rows in ([0, 1], [2, 3], [4, 5])]
    assert talk(ALONE) == (False, False, [0], 0.5, list(range(6)))


@pytest.mark.parametrize(("batch_size", "hint"), [(5, "4 or 6"), (1, "2"), (7, "6 or 8")])
def test_a_batch_that_cannot_be_shared_is_refused(batch_size: int, hint: str) -> None:
    ranks = Ranks(0, 2, torch.device("cpu"))
    ranks.require_even(4)
    with pytest.raises(ConfigError, match=f"batch_size {batch_size} cannot be shared evenly among 2") as caught:
        ranks.require_even(batch_size)
    assert caught.value.hint == f"schedule.batch_size={hint}"
