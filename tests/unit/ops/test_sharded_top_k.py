"""Candidates of a split vocabulary: those of the whole one, in the same order, on every rank.

Merging is tested in one process over any number of simulated ranks, and as a collective in two processes on gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import CompatibilityError, ConfigError, ShapeError
from paceline.ops import sharded_top_k as module
from paceline.ops.sharded_top_k import (
    IdRange,
    LogitTransform,
    VocabularyShard,
    check_shards,
    local_top_k,
    merge_lanes,
    pack_lanes,
    sharded_top_k,
    split_vocabulary,
)

AS_THEY_ARE = LogitTransform("softcap_then_scale")
PADDING = 1e4
BASE, ADDED = 150, 10  # two ranks: [96 base rows | 32 added rows] each, 42 and 22 + 32 of them padding
VOCAB = BASE + ADDED


def shards(num_ranks: int, base: int = BASE, added: int = ADDED) -> list[VocabularyShard]:
    return [split_vocabulary(base, added, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]


def scatter_rows(scores_RV: Tensor, shard: VocabularyShard) -> Tensor:
    """A shard's head scores; padding rows score +10000, which would win every row."""
    scores_RX = scores_RV.new_full((scores_RV.shape[0], shard.num_rows), PADDING)
    for one in shard.ranges:
        scores_RX[:, one.first_row : one.end_row] = scores_RV[:, one.first_id : one.end_id]
    return scores_RX


def merged(scores_RV: Tensor, parts: list[VocabularyShard], k: int) -> tuple[Tensor, Tensor]:
    packed = [pack_lanes(*local_top_k(scatter_rows(scores_RV, shard), k, shard)) for shard in parts]
    return merge_lanes(torch.stack(packed), k)[:2]


def expected(scores_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, ids = scores_RV.float().sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]


def tied_scores(num_levels: int, *, seed: int = 0, num_rows: int = 9, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Scores of magnitude 16 to 32 in bfloat16, where neighbours lie 0.125 apart: ties everywhere."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(num_levels, (num_rows, VOCAB), generator=generator)
    return (16.0 + 0.125 * levels).to(dtype)


# The description of a shard


def test_a_rank_holds_base_and_added_ids_with_padding_behind_each() -> None:
    first, second = shards(2)
    assert first == VocabularyShard(128, (IdRange(0, 0, 96), IdRange(96, 150, 10)))
    assert second == VocabularyShard(128, (IdRange(0, 96, 54),))
    assert first.num_ids + second.num_ids == VOCAB


def test_without_added_ids_only_the_last_ranks_are_padded() -> None:
    parts = shards(8, base=151_936, added=0)
    assert [part.num_rows for part in parts] == [18_992] * 8
    assert all(part.num_ids == 18_992 for part in parts)
    parts = shards(4, base=130, added=0)  # padded to 192, 48 rows each
    assert [part.num_ids for part in parts] == [48, 48, 34, 0]


@pytest.mark.parametrize(
    "ranges",
    [
        (IdRange(0, 0, 9),),
        (IdRange(0, 0, 4), IdRange(3, 4, 2)),
        (IdRange(0, 5, 2), IdRange(2, 0, 2)),
        (IdRange(0, 0, 0),),
        (IdRange(-1, 0, 2),),
    ],
    ids=["outside", "rows overlap", "ids go backwards", "empty", "negative"],
)
def test_an_impossible_shard_is_refused(ranges: tuple[IdRange, ...]) -> None:
    with pytest.raises(ConfigError, match="no range of a shard of 8 rows"):
        VocabularyShard(8, ranges)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"order": "scale"}, "order is 'scale'"),
        ({"order": "softcap_then_scale", "scale": 0.0}, "scale is 0.0"),
        ({"order": "softcap_then_scale", "scale": -1.0}, "scale is -1.0"),
        ({"order": "softcap_then_scale", "softcap": float("nan")}, "softcap is nan"),
    ],
)
def test_a_transform_that_would_reorder_ids_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LogitTransform(**values)


def test_softcap_and_scale_do_not_commute() -> None:
    """c = 30, s = 0.5, z = 40."""
    scores = torch.tensor([[40.0]])
    shard = VocabularyShard(1, (IdRange(0, 0, 1),))
    found = [
        sharded_top_k(scores, 1, shard, transform=LogitTransform(order, scale=0.5, softcap=30.0))[0].item()
        for order in ("softcap_then_scale", "scale_then_softcap")
    ]
    assert found == pytest.approx([13.0509, 17.4835], abs=1e-4)


def test_more_candidates_than_ids_are_refused_at_load() -> None:
    shard = VocabularyShard(64, (IdRange(0, 0, 20),))
    check_shards(shard, 20, group=None)
    for k in (0, 21):
        with pytest.raises(ConfigError, match=f"{k} candidates were asked for; the vocabulary has 20 ids"):
            check_shards(shard, k, group=None)


def test_scores_of_another_width_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"expected \[R, 128\]"):
        sharded_top_k(torch.zeros(2, 127), 1, shards(2)[0], transform=AS_THEY_ARE)


# Selection and merge, ranks simulated


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("k", [1, 4, 16, VOCAB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merge_is_the_top_k_of_the_whole_vocabulary(num_ranks: int, k: int, dtype: torch.dtype) -> None:
    """P22, P23, P27: padding never appears, added ids have their own numbers, ties fall to the lowest id."""
    scores = tied_scores(5, dtype=dtype)
    values, ids = merged(scores, shards(num_ranks), k)
    assert torch.equal(ids, expected(scores, k)[1]) and torch.equal(values, expected(scores, k)[0])


@given(
    seed=st.integers(0, 10_000),
    num_ranks=st.integers(1, 9),
    k=st.integers(1, 20),
    base=st.integers(20, 200),
    added=st.integers(0, 70),
    levels=st.integers(1, 30),
)
def test_any_split_gives_the_same_candidates(
    seed: int, num_ranks: int, k: int, base: int, added: int, levels: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (3, base + added), generator=generator).float()
    scores[0, torch.randperm(base + added, generator=generator)[: base + added - 3]] = -torch.inf
    parts = shards(num_ranks, base, added)
    assert sum(part.num_ids for part in parts) == base + added
    values, ids = merged(scores, parts, k)
    assert torch.equal(ids, expected(scores, k)[1]) and torch.equal(values, expected(scores, k)[0])


def test_a_shard_with_fewer_ids_than_candidates_fills_up_with_none() -> None:
    shard = VocabularyShard(64, (IdRange(0, 7, 2),))
    values, ids = local_top_k(torch.arange(64.0).expand(1, -1), 4, shard)
    assert ids.tolist() == [[8, 7, -1, -1]]
    assert values.tolist() == [[1.0, 0.0, -torch.inf, -torch.inf]]
    nothing = local_top_k(torch.ones(1, 64), 3, VocabularyShard(64, ()))
    assert nothing[1].tolist() == [[-1, -1, -1]]


def test_a_masked_real_id_comes_before_an_empty_lane() -> None:
    scores = torch.full((1, VOCAB), -torch.inf)
    scores[0, 77] = 1.0
    assert merged(scores, shards(8), 4)[1].tolist() == [[77, 0, 1, 2]]


def test_ids_above_the_range_of_float_pairs_survive() -> None:
    ids = torch.tensor([[2**24 + 1, 2**31 - 1, -1]])
    values = torch.tensor([[3.0, -0.5, -torch.inf]])
    back = merge_lanes(pack_lanes(values, ids).unsqueeze(0), 3)
    assert torch.equal(back[0], values) and torch.equal(back[1], ids)


def test_bytes_of_a_message() -> None:
    """256 requests of 7 drafts, 16 candidates, 8 ranks: 1.84 MB gathered, where bf16 logits would be 544.5 MB."""
    rows, k, num_ranks, vocab_size = 256 * 7, 16, 8, 151_936
    packed = pack_lanes(torch.zeros(rows, k), torch.zeros(rows, k, dtype=torch.int64))
    assert num_ranks * packed.numel() * packed.element_size() == rows * num_ranks * k * 8 == 1_835_008
    assert rows * vocab_size * 2 == 544_538_624
    assert rows * num_ranks * k * (2 + 8) == 2_293_760 == pytest.approx(rows * vocab_size * 2 / 237, rel=5e-3)


# Planted faults, each found by the comparison above


def matches(k: int = 16, num_ranks: int = 2) -> bool:
    scores = tied_scores(40)
    scores[:, 150:] += 4.0  # added ids are among the best
    return torch.equal(merged(scores, shards(num_ranks), k)[1], expected(scores, k)[1])


def tail_mask(scores_RX: Tensor, k: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """P23: takes padding to be at the end, and a row's id to be its number."""
    start = shard.ranges[0].first_id
    masked = scores_RX.float().clone()
    masked[:, shard.num_ids :] = -torch.inf
    values, rows = masked.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], rows[:, :k] + start


def no_mask(scores_RX: Tensor, k: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """P22: padding takes part."""
    return module.local_top_k(scores_RX, k, VocabularyShard(shard.num_rows, (IdRange(0, 0, shard.num_rows),)))


def clipped(scores_RX: Tensor, k: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """P24: real ids behind another vocabulary's end are cut off."""
    base_only = tuple(one for one in shard.ranges if one.first_id < BASE)
    return module.local_top_k(scores_RX, k, VocabularyShard(shard.num_rows, base_only))


def last_of_equals(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """P27: of equal values the later lane stays."""
    lanes = values.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    lanes = values.shape[-1] - 1 - lanes
    return values.gather(-1, lanes), ids.gather(-1, lanes)


@pytest.mark.parametrize("fault", [tail_mask, no_mask, clipped])
def test_a_wrong_mask_is_found(fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert matches()
    monkeypatch.setitem(globals(), "local_top_k", fault)
    assert not matches()


def test_another_tie_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert matches()
    monkeypatch.setattr(module, "_first", last_of_equals)
    assert not matches()


# Two processes

CASES: dict[str, dict[str, Any]] = {
    "fp32": {"k": 16},
    "bf16": {"k": 16, "dtype": torch.bfloat16},
    "argmax": {"k": 1, "dtype": torch.bfloat16},
    "log-probabilities": {"k": 4, "with_log_probs": True},
    "log-probabilities, capped and scaled": {
        "k": 4,
        "with_log_probs": True,
        "transform": LogitTransform("softcap_then_scale", scale=0.5, softcap=30.0),
    },
    "all equal": {"k": 16, "num_levels": 1},
}


def case_scores(options: dict[str, Any]) -> Tensor:
    """Equal scores on both sides of the shards' border, among the best and where the best end."""
    return tied_scores(options.get("num_levels", 6), dtype=options.get("dtype", torch.float32), seed=3)


def run_rank(rank: int, folder: str) -> None:
    """One process of two; its findings go to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group, shard, found = dist.group.WORLD, shards(2)[rank], {}
    gather, sizes = dist.all_gather, []

    def counted(outputs: list[Tensor], *arguments: Any, **options: Any) -> Any:
        sizes.append(sum(output.numel() * output.element_size() for output in outputs))
        return gather(outputs, *arguments, **options)

    dist.all_gather = counted
    for name, options in CASES.items():
        sizes.clear()
        values, ids = sharded_top_k(
            scatter_rows(case_scores(options), shard),
            options["k"],
            shard,
            transform=options.get("transform", AS_THEY_ARE),
            group=group,
            with_log_probs=options.get("with_log_probs", False),
        )
        found[name] = (values, ids, list(sizes))
    found["refusals"] = [refusal(shard, VOCAB + 1, group), refusal(shard, 4 + rank, group)]
    found["refusals"] += [refusal(shards(2)[0], 4, group), refusal(shards(2)[1], 4, group), refusal(shard, 4, group)]
    if rank == 1:  # the fault: this rank breaks ties its own way
        module._first = last_of_equals
    scores = tied_scores(2, seed=3)
    found["own tie order"] = sharded_top_k(scatter_rows(scores, shard), 4, shard, transform=AS_THEY_ARE, group=group)[1]
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def refusal(shard: VocabularyShard, k: int, group: Any) -> str:
    try:
        check_shards(shard, k, group=group)
    except (CompatibilityError, ConfigError) as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(run_rank, args=(str(folder),), nprocs=2)
    yield [torch.load(Path(folder, f"rank{rank}.pt")) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_get_the_candidates_of_the_whole_vocabulary(ranks: list[dict[str, Any]], name: str) -> None:
    """P27, P28: planted ties on both sides of the border, padding of +10000, added ids."""
    options = CASES[name]
    scores, k, transform = case_scores(options), options["k"], options.get("transform", AS_THEY_ARE)
    values, ids = expected(scores, k)
    values = transform.apply(values)
    if options.get("with_log_probs"):
        values = values - transform.apply(scores).logsumexp(-1, keepdim=True)
    for found_values, found_ids, _ in (rank[name] for rank in ranks):
        assert torch.equal(found_ids, ids)
        assert torch.allclose(found_values, values, rtol=1e-6)
    assert torch.equal(ranks[0][name][0], ranks[1][name][0])


def test_the_planted_ties_lie_across_the_border() -> None:
    values, ids = expected(case_scores({}), 17)
    tied_at_the_end = values[:, 15] == values[:, 16]
    is_on_both_ranks = (ids < 96).any(-1) & ((ids >= 96) & (ids < BASE)).any(-1)
    assert (tied_at_the_end & is_on_both_ranks).any()


@pytest.mark.parametrize("name", CASES)
def test_one_collective_carries_eight_bytes_per_lane(ranks: list[dict[str, Any]], name: str) -> None:
    options = CASES[name]
    columns = 2 * options["k"] + bool(options.get("with_log_probs"))
    assert [rank[name][2] for rank in ranks] == [[9 * 2 * columns * 4]] * 2


def test_what_does_not_fit_together_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["refusals"] for rank in ranks)
    assert first == second
    assert first[0] == "161 candidates were asked for; the vocabulary has 160 ids"
    assert first[1] == "the ranks were asked for different numbers of candidates: [4, 5]"
    assert first[2].startswith("two ranks hold id 0") and first[3].startswith("no rank holds id 0")
    assert first[4] == ""


def test_a_rank_with_its_own_tie_order_drafts_other_tokens(ranks: list[dict[str, Any]]) -> None:
    """The planted fault of P28: the comparison between ranks can tell."""
    assert not torch.equal(ranks[0]["own tie order"], ranks[1]["own tie order"])
