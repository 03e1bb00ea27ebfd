"""Ranks that run an engine each: recorded steps are those that were not, and what one rank cannot do, none does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import write_drafter, write_target_folder
from tests.unit.distributed.spread import CPU, HelpedOnRank, decode, settings
from tests.unit.distributed.spread import REQUESTS as ANY_REQUESTS
from tests.unit.training.processes import run_ranks, values

from paceline.checkpoint.contract import TargetLayerId
from paceline.distributed.mesh import Layout, Mesh
from paceline.distributed.opening import open_target
from paceline.distributed.sharding import ShardedHead
from paceline.distributed.tensor_decoding import TensorDecoder
from paceline.distributed.told_drafts import ToldDrafts
from paceline.distributed.world import World
from paceline.engine import loop as loop_module
from paceline.engine.attends import AttentionChoice
from paceline.engine.proposal import BlockProposer
from paceline.engine.recordings import Recording, Repeated
from paceline.training.ranks import Ranks

TAPS = (TargetLayerId(0), TargetLayerId(1), TargetLayerId(2))
FAMILIES = ("plain", "dflash", "dflash2", "eagle3")
CASE = {"tensor_size": 2, "linear_mode": "plain"}
Found = list[dict[str, Any]]


@contextmanager
def recording(*, fails: bool = False) -> Iterator[None]:
    """Engines go by tables and record their steps, as on a GPU."""
    paged = AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True)

    def record(body: Any) -> Recording:
        if fails:
            raise RuntimeError("no graph today")
        return Repeated(body)

    with (
        patch.object(AttentionChoice, "for_device", classmethod(lambda *_args, **_options: paged)),
        patch.object(loop_module, "make_recorder", lambda *_args, **_options: record),
    ):
        yield


def run(world: World, folder: Path, family: str, scripts: Any) -> dict[str, Any]:
    case: dict[str, Any] = {**CASE, "target": str(folder / "target")}
    if family != "plain":
        case["drafter"] = family
    opened = open_target(world, settings(folder, case))
    decoder = opened.decoder
    assert isinstance(decoder, TensorDecoder)
    if family != "plain":
        decoder.engine.wrap_proposer(lambda inner: HelpedOnRank(inner, decoder.engine, scripts))
    whole = []
    gathered = ShardedHead.forward

    def watched(self: ShardedHead, hidden: Any) -> Any:
        whole.append(hidden.shape)
        return gathered(self, hidden)

    with patch.object(ShardedHead, "forward", watched):
        tokens = [one.token_ids for one in decoder.generate(ANY_REQUESTS)]
    stats = decoder.engine.stats()
    opened.close()
    return {
        "tokens": tokens,
        "num_recordings": stats.num_recordings,
        "num_replayed": stats.num_replayed_steps,
        "num_unrecorded": stats.num_unrecorded_steps,
        "num_steps": stats.num_steps,
        "num_whole": sum(shape[1] > 1 for shape in whole),
    }


def on_rank(ranks: Ranks, folder: Path, scripts: Any) -> dict[str, Any]:
    world = World(ranks.rank, ranks.size, CPU)
    found: dict[str, Any] = {}
    for family in FAMILIES:
        with recording():
            found[family] = run(world, folder, family, scripts)
    with recording(fails=ranks.rank == 1):
        found["one cannot record"] = run(world, folder, "dflash", scripts)
    found["too long"] = decode(world, folder, {**CASE, "target": str(folder / "target"), "max_model_len": 20})
    found["head"] = best_scores(world)
    propose = BlockProposer.propose

    def others(self: BlockProposer, *arguments: Any, **options: Any) -> Any:
        proposal = propose(self, *arguments, **options)
        return proposal._replace(ids_BK=(proposal.ids_BK + ranks.rank) % 512)

    with patch.object(BlockProposer, "propose", others):
        found["drafts differ"] = run(world, folder, "dflash", scripts)
        with patch.object(ToldDrafts, "propose", lambda self, *args, **options: self._inner.propose(*args, **options)):
            found["and are not told"] = drafts_of(world, folder)
    return found


def best_scores(world: World) -> dict[Any, Any]:
    """Of whole numbers, so that many are equal; the second rank has fewer ids than the first."""
    contract = tiny_target(vocab_size=301).contract
    head = ShardedHead(contract, Mesh.of(world, Layout((), 2), contract.num_layers).tensor)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-1, 2, (302, contract.hidden_size), generator=generator).float()
    hidden = torch.randint(-1, 2, (2, 3, contract.hidden_size), generator=generator).float()
    with torch.no_grad():
        head.weight.copy_(weight[151 * world.rank :][: head.shard.num_rows])
        return {"whole": head(hidden), **{number: head.best_scores(hidden, number) for number in (1, 5, 200)}}


def drafts_of(world: World, folder: Path) -> list[list[int]]:
    """What waits behind a prompt."""
    case = {**CASE, "target": str(folder / "target"), "drafter": "dflash"}
    decoder: Any = open_target(world, settings(folder, case)).decoder
    decoder.engine.add_request(ANY_REQUESTS[0].prompt_ids, ANY_REQUESTS[0].sampling())
    decoder.engine._loop.run_step = lambda _batch: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            decoder.engine.step()
    drafts: list[list[int]] = decoder.engine._loop.parts.state.draft_ids[:1].tolist()
    decoder.close()
    return drafts


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    model = tiny_target()
    write_target_folder(folder / "target", model)
    target = wrap_target(model, "plain")
    for family in FAMILIES[1:]:
        write_drafter(folder / family, target, family=family, target_layer_ids=TAPS)
    return folder


@pytest.fixture(scope="module")
def alone(dense: Path) -> list[tuple[int, ...]]:
    """The text of one process without drafts."""
    case = {"target": str(dense / "target"), "linear_mode": "plain"}
    found: list[tuple[int, ...]] = decode(World(0, 1, CPU), dense, case)["tokens"]
    return found


@pytest.fixture(scope="module")
def ranks(dense: Path, alone: Any, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return values(run_ranks(on_rank, tmp_path_factory.mktemp("two") / "run", dense, alone))


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_over_two_ranks_give_the_text_of_one(family: str, ranks: Found, alone: Any) -> None:
    first, second = (rank[family] for rank in ranks)
    assert first == second, "the same recordings, played back as often"
    assert first["tokens"] == alone
    assert first["num_recordings"] > 0 < first["num_replayed"]


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_gather_no_whole_logits(family: str, ranks: Found) -> None:
    """Neither to verify, truncated requests included, nor to draft with a borrowed head."""
    assert ranks[0][family]["num_whole"] == 0


@pytest.mark.parametrize("num_best", [1, 5, 200])
def test_the_best_scores_of_a_head_in_parts_are_those_of_the_whole(num_best: int, ranks: Found) -> None:
    for rank in ranks:
        whole, best = rank["head"]["whole"], rank["head"][num_best]
        assert torch.equal(best.isfinite().sum(-1), torch.full((2, 3), num_best))
        order = (-whole).argsort(dim=-1, stable=True)[..., :num_best]  # of equal ones the lowest ids
        expected = torch.full_like(whole, -torch.inf).scatter(-1, order, whole.gather(-1, order))
        assert torch.equal(best, expected)


def test_what_one_rank_cannot_record_runs_unrecorded_on_all(ranks: Found, alone: Any) -> None:
    for rank in ranks:
        found = rank["one cannot record"]
        assert found["tokens"] == alone
        assert found["num_recordings"] == found["num_replayed"] == 0 < found["num_unrecorded"]


def test_every_rank_verifies_the_deciders_drafts(ranks: Found, alone: Any) -> None:
    assert all(rank["drafts differ"]["tokens"] == alone for rank in ranks)
    untold = [rank["and are not told"] for rank in ranks]
    assert untold[0] != untold[1], "were they not told, each would verify a text of its own"


def test_a_request_that_cannot_be_served_is_told_by_one_rank(ranks: Found) -> None:
    first, second = (rank["too long"] for rank in ranks)
    assert first["error"] == "RequestError" and "request 1 has a prompt of 23 tokens" in first["told"]
    assert second["error"] == "OtherRankFailedError"
    assert ranks[0]["head"], "and the ranks go on in step"
