"""A tiny Kimi-K3 and drafters of every family in folders, and what ranks do with them in processes of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tests.tiny import wrap_target
from tests.tiny_kimi import k3_tiny_config, kimi_target, kimi_tensors, small_kimi_config, write_kimi
from tests.tiny_run import write_drafter, write_tokenizer
from tests.trained_kimi import train_by_heart
from torch import Tensor

from paceline.checkpoint.contract import (
    AuxHiddenStream,
    CaptureId,
    LatentAttentionSettings,
    MarkovSettings,
    TargetLayerId,
)
from paceline.checkpoint.target_config import read_target_contract
from paceline.distributed import decoding, sharded_weights
from paceline.distributed.drafting import Drafting
from paceline.distributed.mesh import Layout, Mesh
from paceline.distributed.opening import DecodeSettings, open_target
from paceline.distributed.places import DecodeRequest, Place
from paceline.distributed.plan import Plan
from paceline.distributed.sharding import ShardedHead, share_of
from paceline.distributed.stage_pass import StagePass
from paceline.distributed.tensor_decoding import TensorDecoder
from paceline.distributed.world import World
from paceline.engine.engine import Engine
from paceline.errors import PacelineError
from paceline.models.attends import WholeSequence
from paceline.models.drafters.proposal import Proposal
from paceline.models.layers import set_linear_mode
from paceline.models.stepwise import StepwiseContext
from paceline.models.taps import TapCollector
from paceline.models.targets.kimi_stage import KimiStage
from paceline.models.targets.stage import HandOver
from paceline.training.ranks import Ranks

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {},
    "dspark": {},
    "dspark-latent": {
        "family": "dspark",
        "latent": LatentAttentionSettings(
            q_lora_rank=16, kv_lora_rank=16, qk_nope_head_size=8, qk_rope_head_size=8, v_head_size=16
        ),
        "head_size": 16,
        "markov": MarkovSettings(rank=8, kind="vanilla"),
    },
    "eagle3": {},
}
# Layer ids whose capture ids are EAGLE-3's for 8 layers, 2, 4 and 5: two stages of equal length are cut at one of them.
TAPPED = (TargetLayerId(1), TargetLayerId(3), TargetLayerId(4))
REQUESTS = (
    DecodeRequest((5, 6, 7), max_tokens=8),
    DecodeRequest(tuple(range(20, 43)), max_tokens=7, temperature=0.9, seed=11),
    DecodeRequest((9,), max_tokens=6, is_drafted=False),
    DecodeRequest((100, 101, 102, 103, 104), max_tokens=9, temperature=0.7, top_p=0.9, seed=3),
)
DEEP, DEEP_BLOCK = 32, 8
Case = Mapping[str, Any]  # `drafter`, and fields of DecodeSettings; `fault` names one of FAULTS


def write_models(folder: Path) -> Path:
    """The target in `target`, drafters under their families' names, a trained one, a deep target in `deep`."""
    config = k3_tiny_config()
    model = kimi_target(config)
    write_kimi(folder / "target", config, kimi_tensors(model, rates="padded"))
    write_tokenizer(folder / "target", config["vocab_size"])
    target: Any = wrap_target(model, "row_invariant")  # type: ignore[arg-type]
    for name, changes in FAMILIES.items():
        fields = {"family": name, "aux_hidden_stream": "attn_res", "target_layer_ids": TAPPED, **changes}
        write_drafter(folder / name, target, fingerprint=name != "eagle3", **fields)
    others = {"family": "dflash", "aux_hidden_stream": "attn_res", "target_layer_ids": (TargetLayerId(0), *TAPPED[1:])}
    write_drafter(folder / "other-taps", target, fingerprint=False, **others)
    moved: Any = wrap_target(kimi_target(config, seed=1), "row_invariant")  # type: ignore[arg-type]
    write_drafter(
        folder / "other-target", moved, family="dflash", aux_hidden_stream="attn_res", target_layer_ids=TAPPED
    )
    plain = decode(World(0, 1, CPU), folder, {})["tokens"]
    texts = [[*request.prompt_ids, *ids[:5]] for request, ids in zip(REQUESTS, plain, strict=True)]
    trained = train_by_heart(folder / "training", "dspark-latent", target, texts)
    trained.rename(folder / "trained-latent")
    deep = small_kimi_config(DEEP, DEEP_BLOCK, first_k_dense_replace=24)
    write_kimi(folder / "deep", deep, kimi_tensors(kimi_target(deep)))
    return folder


def settings(folder: Path, case: Case) -> DecodeSettings:
    """Row-invariant float32 unless the case says otherwise."""
    fields = {key: value for key, value in case.items() if key not in ("drafter", "fault", "scripts")}
    drafter = case.get("drafter")
    defaults = {"target": str(folder / "target"), "dtype": "float32", "linear_mode": "row_invariant"}
    sizes = {"num_places": 2, "max_model_len": 48, "prefill_chunk_size": 12, "offline": True}
    return DecodeSettings(**{**defaults, **sizes, "drafter": drafter and str(folder / drafter), **fields})


class Helped(Drafting):
    """Drafts begin with the right tokens, none to all of them by where the anchor sits."""

    scripts: Sequence[Sequence[int]]

    def follow(self, places: Sequence[Place | None], *arguments: Any) -> None:
        """The drafter's own blocks, their beginnings replaced."""
        super().follow(places, *arguments)
        for place in places:
            if place is not None and place.drafts:
                done = len(place.text) - len(place.request.prompt_ids)
                num_helped = min(7 * place.num_run % 11 % (len(place.drafts) + 2), len(place.drafts))
                helped = list(self.scripts[place.index][done : done + num_helped])
                place.drafts[: len(helped)] = helped


class HelpedOnRank:
    """The same around an engine's proposer."""

    def __init__(self, inner: Any, engine: Engine, scripts: Sequence[Sequence[int]]) -> None:
        self._inner, self._engine, self._scripts = inner, engine, scripts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, rows: Any, *arguments: Any, **options: Any) -> Proposal:
        proposal = self._inner.propose(rows, *arguments, **options)
        ids_BK = proposal.ids_BK.clone()
        requests = self._engine._loop.requests
        state = arguments[0]
        slots = rows.slots_B.tolist()
        for row, (slot, length) in enumerate(zip(slots, state.lengths[rows.slots_B].tolist(), strict=True)):
            name = self._engine.request_in_slot(slot)
            if name is None:  # padding
                continue
            prompt = requests[name].prompt_ids
            (script,) = (self._scripts[index] for index, one in enumerate(REQUESTS) if one.prompt_ids == tuple(prompt))
            done = length + 1 - len(prompt)
            num_helped = min(7 * length % 11 % (ids_BK.shape[1] + 2), ids_BK.shape[1])
            for at, token in enumerate(script[done : done + num_helped]):
                ids_BK[row, at] = token
        # every draft is judged by equality here
        return proposal._replace(ids_BK=ids_BK)


def decode(world: World, folder: Path, case: Case) -> dict[str, Any]:
    """Open, generate; tokens and drafts of all requests, or the error."""
    fault = case.get("fault")
    try:
        with ExitStack() as stack:
            if fault is not None:
                stack.enter_context(FAULTS[fault](world.rank))
            opened = open_target(world, settings(folder, case))
            decoder = opened.decoder
            if case.get("drafter") and case.get("scripts"):
                if isinstance(decoder, TensorDecoder):
                    decoder.engine.wrap_proposer(lambda inner: HelpedOnRank(inner, decoder.engine, case["scripts"]))
                elif decoder._drafting is not None:
                    decoder._drafting.__class__ = Helped
                    decoder._drafting.scripts = case["scripts"]  # type: ignore[attr-defined]
            found = decoder.generate(REQUESTS)
            opened.close()
    except (PacelineError, AssertionError) as error:
        return {"error": type(error).__name__, "told": str(error)}
    return {
        "tokens": [one.token_ids for one in found],
        "accepted": [one.acceptance.num_accepted for one in found],
        "drafted": [one.acceptance.num_draft_tokens for one in found],
    }


def decode_cases(ranks: Ranks, folder: Path, cases: Mapping[str, Case]) -> dict[str, Any]:
    """A rank's findings for every case, one after the other."""
    world = World(ranks.rank, ranks.size, CPU)
    return {name: decode(world, folder, case) for name, case in cases.items()}


def refuse_cases(ranks: Ranks, folder: Path, cases: Mapping[str, Sequence[Case]]) -> dict[str, Any]:
    """The same where each rank is started with a case of its own, and none may come so far as to read weights."""
    world, read = World(ranks.rank, ranks.size, CPU), []

    def watched(*arguments: Any, **options: Any) -> None:
        read.append(arguments)
        raise AssertionError("weights were read")

    with patch.object(sharded_weights, "load_strict", watched):
        found = {name: decode(world, folder, each[world.rank]) for name, each in cases.items()}
    return {**found, "read": len(read)}


# Taps and logits of whole stages, without a decoder.

Cut = tuple[tuple[int, ...], AuxHiddenStream, str]  # borders, stream, dtype


def same_bits(ranks: Ranks, folder: Path, cuts: Sequence[Cut], fault: str | None = None) -> list[list[str]]:
    """Per cut, what differs from the whole target on the last stage: taps by id, logits; nothing on other ranks."""
    world, path = World(ranks.rank, ranks.size, CPU), folder / "deep"
    contract = read_target_contract(path, "deep")
    tokens = torch.randint(0, contract.vocab_size, (2, 4), generator=torch.Generator().manual_seed(1))
    ids = [CaptureId(capture) for capture in range(contract.num_layers + 1)]
    found: list[list[str]] = []
    for borders, stream, dtype in cuts:
        mesh = Mesh.of(world, Layout(borders), contract.num_layers)
        kind = getattr(torch, dtype)
        stage = sharded_weights.load_sharded_stage(contract, path, *mesh.layers, mesh.tensor, dtype=kind, device=CPU)
        stage_pass = StagePass(mesh, contract, stage)
        stage_pass.prepare_taps(ids, stream)
        with ExitStack() as stack:
            if fault is not None:
                stack.enter_context(FAULTS[fault](world.rank))
            passed = stage_pass.run(tokens, WholeSequence())
        if passed is None:
            found.append([])
            continue
        whole = kimi_target(small_kimi_config(DEEP, DEEP_BLOCK, first_k_dense_replace=24), dtype=kind)
        taps = TapCollector(ids, stream)
        logits = whole.logits(whole(tokens, tokens, WholeSequence(), taps))
        pairs: list[tuple[str, Tensor, Tensor]] = [("logits", stage_pass.logits(passed[0]), logits)]
        pairs += [(str(at), one, two) for at, one, two in zip(ids, passed[1], taps.collected(), strict=True)]
        found.append([name for name, one, two in pairs if not torch.equal(one, two)])
    return found


def shared_logits(ranks: Ranks, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """How far logits of two ranks are from the whole target's; folders differ in how decay rates are stored."""
    world = World(ranks.rank, ranks.size, CPU)
    tokens = torch.arange(5, 17)[None]
    found: dict[str, Any] = {}
    for name in names:
        for fault in (None, "rates not narrowed"):
            path = folder / name
            contract = read_target_contract(path, name)
            mesh = Mesh.of(world, Layout((), world.size), contract.num_layers)
            with ExitStack() as stack:
                if fault is not None:
                    stack.enter_context(FAULTS[fault](world.rank))
                try:
                    stage = sharded_weights.load_sharded_stage(
                        contract, path, *mesh.layers, mesh.tensor, dtype=torch.float32, device=CPU
                    )
                except (PacelineError, RuntimeError) as error:
                    found[f"{name}, {fault}"] = type(error).__name__
                    continue
            stage_pass = StagePass(mesh, contract, stage)
            ids = [CaptureId(capture) for capture in range(contract.num_layers + 1)]
            stage_pass.prepare_taps(ids, "attn_res")
            passed = stage_pass.run(tokens, WholeSequence())
            assert passed is not None
            found[f"{name}, {fault}"] = (stage_pass.logits(passed[0]), passed[1], mesh.tensor.index)
            if "rows alone" not in found:
                found["rows alone"] = _same_rows_alone(stage_pass, mesh, tokens)
            found["parameters"] = {key: tuple(one.shape) for key, one in stage.named_parameters()}
    return found


def _same_rows_alone(stage_pass: StagePass, mesh: Mesh, tokens: Tensor) -> bool:
    """Whether logits have the same bits in one pass of all rows and in a pass of each."""
    set_linear_mode(stage_pass.stage, "row_invariant")
    found = []
    for size in (tokens.shape[1], 1):
        share = share_of(stage_pass.contract, mesh.tensor.size)
        context = StepwiseContext(share, 1, 32, dtype=torch.float32, device=CPU, layers=mesh.layers)
        logits = []
        for rows in tokens.split(size, dim=1):
            passed = stage_pass.run(rows, context)
            assert passed is not None
            logits.append(stage_pass.logits(passed[0]))
            context.commit_all()
        found.append(torch.cat(logits, dim=1))
    return torch.equal(*found)


# Faults to plant; each is a function of the rank.

Fault = Callable[[int], AbstractContextManager[Any]]


def _prefix_at_the_boundary(_rank: int) -> AbstractContextManager[Any]:
    mix = KimiStage._mixed_tap

    def fall_back(self: KimiStage, folded: Tensor, stream: Any, capture: int) -> Tensor:
        is_boundary = self.boundary is not None and capture == self.end
        return folded if is_boundary else mix(self, folded, stream, capture)

    return patch.object(KimiStage, "_mixed_tap", fall_back)


def _taps_stay_behind(_rank: int) -> AbstractContextManager[Any]:
    """Zeros arrive in their place: the message keeps its shape."""
    hand_over = KimiStage.hand_over

    def wrong(self: KimiStage, *arguments: Any) -> HandOver:
        handed = hand_over(self, *arguments)
        return dataclasses.replace(handed, taps={at: torch.zeros_like(tap) for at, tap in handed.taps.items()})

    return patch.object(KimiStage, "hand_over", wrong)


def _one_row_counts(_rank: int) -> AbstractContextManager[Any]:
    """Ranks that only follow never learn how many drafts were accepted, and commit the anchor alone."""
    hear = decoding.hear

    def deaf(*arguments: Any) -> Plan:
        plan = hear(*arguments)
        is_block_B = plan.counts_B <= 8  # longer ones are a prompt's
        return dataclasses.replace(plan, counts_B=torch.where(is_block_B, plan.counts_B.clamp(max=1), plan.counts_B))

    return patch.object(decoding, "hear", deaf)


@contextmanager
def _noise_on_rank_1(rank: int) -> Iterator[None]:
    own = ShardedHead.own

    def noisy(self: ShardedHead, hidden: Tensor) -> Tensor:
        found = own(self, hidden)
        return found + 1e-3 * torch.randn(found.shape) if rank == 1 else found

    with patch.object(ShardedHead, "own", noisy):
        yield


def _rates_not_narrowed(rank: int) -> AbstractContextManager[Any]:
    """The buffer as it is stored is cut among the ranks, padding and all."""
    load = sharded_weights.PartialSource.load

    def wrong(self: sharded_weights.PartialSource, name: str) -> Tensor:
        if not name.endswith(".A_log"):
            return load(self, name)
        kimi: Any = self._source
        stored = kimi._source.load(kimi._stored[name]).flatten()
        (num_own,) = self.shape(name)
        return stored.chunk(2)[rank][:num_own]

    return patch.object(sharded_weights.PartialSource, "load", wrong)


FAULTS: dict[str, Fault] = {
    "prefix at the boundary": _prefix_at_the_boundary,
    "taps stay behind": _taps_stay_behind,
    "one row counts": _one_row_counts,
    "noise on rank 1": _noise_on_rank_1,
    "rates not narrowed": _rates_not_narrowed,
}
