"""Training steps that ranks share, on tiny models: the work that `test_strategies.py` gives to processes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import pytest
import torch
from tests.tiny import PARTS_OF_FAMILY, tiny_drafter, tiny_target
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from paceline.ops.attention import attention
from paceline.training import flex_attend
from paceline.training import step as step_file
from paceline.training.anchors import Blocks
from paceline.training.data import Batch
from paceline.training.features import TargetFeatures
from paceline.training.flex_attend import FlexBlocks
from paceline.training.objective import Features, Objective, Scores
from paceline.training.optimizer import make_optimizer
from paceline.training.ranks import Ranks
from paceline.training.step import StepSettings, train_step
from paceline.training.strategies import DraftScoring, full_tensor, make_strategy

StrategyName = Literal["ddp", "fsdp"]
FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {},
    **{family: {"family": family, **parts} for family, parts in PARTS_OF_FAMILY.items()},
}
Row = tuple[int, int]  # lengths of prompt and response
EVEN: list[list[Row]] = [[(4, 9), (5, 12), (6, 8), (4, 14)], [(5, 10), (7, 9), (4, 8), (6, 11)]]
UNEVEN: list[list[Row]] = [[(4, 18), (4, 17), (14, 3), (12, 4)]]
NO_LABEL_ON_RANK_1: list[list[Row]] = [[(4, 12), (5, 9), (14, 0), (12, 1)]]
ALIKE: list[list[Row]] = [[(4, 18)] * 4]  # only the draw of anchors can differ
DESCENT: dict[str, Any] = {"optimizer_name": "sgd", "num_steps": 1, "clip_norm": 1e9}


class Trained(NamedTuple):
    """What a rank holds after some steps; as numpy, since it crosses processes."""

    parameters: dict[str, Any]
    norms: list[float]
    losses: list[float]
    counted: list[int]  # of this rank
    updated: list[bool]
    anchors: list[list[list[int]]]  # of each step's parts, of this rank
    target_hash: str


class UnpooledRanks(Ranks):
    """The planted fault: every rank divides by its own count, and the mean of means is taken."""

    def total(self, tensor: Tensor) -> Tensor:
        return tensor


def batch_of(rows: Sequence[Row], width: int = 24) -> Batch:
    """Rows whose tokens depend on their lengths alone."""
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    supervised = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (prompt, response) in enumerate(rows):
        generator = torch.Generator().manual_seed(1000 * prompt + response)
        tokens[row, : prompt + response] = torch.randint(4, 500, (prompt + response,), generator=generator)
        supervised[row, prompt : prompt + response] = True
    return Batch.of_rows(tokens, supervised, torch.tensor([sum(row) for row in rows]))


def train_steps(
    ranks: Ranks,
    name: StrategyName,
    family: str,
    parts: Sequence[Sequence[Row]],
    *,
    num_steps: int = 3,
    num_anchors: int = 5,
    clip_norm: float = 1.0,
    poisoned_rank: int | None = None,
    optimizer_name: Literal["adamw", "sgd"] = "adamw",
    fault: str | None = None,
    flex: FlexBlocks | None = None,
) -> Trained:
    """Some steps on the same parts.

    Args:
        ranks: among which they are shared.
        name: how.
        family: of the drafter.
        parts: rows of each accumulation part, of all ranks together.
        num_steps, num_anchors, clip_norm: of the training.
        poisoned_rank: its features hold a NaN in the second step.
        optimizer_name: with "sgd" the change of a parameter is its gradient.
        fault: one of the functions below whose names start with `plant_`.
        flex: attention of the blocks; a CPU has no gradients of it, so the dense operation reads its masks.
    """
    with pytest.MonkeyPatch.context() as patch:
        anchors = _note_anchors(patch)
        if flex is not None:
            patch.setattr(flex_attend, "flex_attention", _masked_attention)
        if fault is not None:
            globals()[f"plant_{fault}"](patch, ranks)
        if ranks.rank == poisoned_rank:
            _poison(patch)
        if fault == "unpooled":
            ranks = UnpooledRanks(ranks.rank, ranks.size, ranks.device)
        return _train_steps(
            ranks, name, family, parts, num_steps, num_anchors, clip_norm, optimizer_name, anchors, flex
        )


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
    """What flex attention computes."""
    B, _, R, K = block_mask.shape
    return attention(q, k, v, visible=create_mask(block_mask.mask_mod, B, None, R, K, device="cpu"))


def _train_steps(
    ranks: Ranks,
    name: StrategyName,
    family: str,
    parts: Sequence[Sequence[Row]],
    num_steps: int,
    num_anchors: int,
    clip_norm: float,
    optimizer_name: str,
    anchors: list[list[list[int]]],
    flex: FlexBlocks | None,
) -> Trained:
    model = tiny_target()
    drafter = tiny_drafter(model.contract, **FAMILIES[family]).requires_grad_(True)
    features = TargetFeatures(model, drafter.contract.target_layer_ids)
    objective = Objective(kl=0.5, ce=0.5, gamma=4.0, chunk_rows=64)
    settings = StepSettings(objective, num_anchors, clip_norm, mixed_precision=False, flex=flex)
    strategy = make_strategy(drafter, features, objective, ranks, name, flex)
    optimizer: torch.optim.Optimizer = make_optimizer(drafter, weight_decay=0.1, betas=(0.9, 0.95))
    if optimizer_name == "sgd":
        optimizer = torch.optim.SGD(drafter.parameters())
    results = []
    for step in range(num_steps):

        def generator(part: int, step: int = step) -> torch.Generator:
            return torch.Generator().manual_seed(100 * step + part)

        batches = [batch_of(rows) for rows in parts]
        results.append(train_step(drafter, features, optimizer, batches, generator, 1e-3, settings, strategy))
    return Trained(
        parameters={key: full_tensor(value).numpy() for key, value in drafter.named_parameters()},
        norms=[float(result.gradient_norm) for result in results],
        losses=[float(result.loss) for result in results],
        counted=[int(result.counted_Q.sum()) for result in results],
        updated=[bool(result.is_finite) for result in results],
        anchors=anchors,
        target_hash=hash_of(dict(model.named_parameters())),
    )


def hash_of(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(key.encode() + tensors[key].detach().numpy().tobytes())
    return digest.hexdigest()


SCENARIOS: dict[str, tuple[list[list[Row]], dict[str, Any]]] = {
    **{f"even {family}": (EVEN, {"family": family}) for family in FAMILIES},
    **{f"no label {family}": (NO_LABEL_ON_RANK_1, {"family": family}) for family in FAMILIES},
    "dense": (EVEN, DESCENT),
    "flex": (EVEN, DESCENT | {"flex": FlexBlocks(24, 5, is_compiled=False)}),
    "uneven": (UNEVEN, DESCENT | {"num_anchors": 30}),
    "uneven, unpooled": (UNEVEN, DESCENT | {"num_anchors": 30, "fault": "unpooled"}),
    "alike": (ALIKE, {"num_steps": 2}),
    "alike, own anchors": (ALIKE, {"num_steps": 2, "fault": "own_anchors"}),
    "clipped": (EVEN, DESCENT | {"clip_norm": 0.01}),
    "clipped, own shard": (EVEN, DESCENT | {"clip_norm": 0.01, "fault": "own_shard"}),
    "poisoned 0": (UNEVEN, {"poisoned_rank": 0}),
    "poisoned 1": (UNEVEN, {"poisoned_rank": 1}),
}


def train_scenario(ranks: Ranks, name: StrategyName, scenario: str) -> Trained:
    parts, options = SCENARIOS[scenario]
    return train_steps(
        ranks, name, options.get("family", "dflash"), parts, **{k: v for k, v in options.items() if k != "family"}
    )


def train_scenarios(ranks: Ranks, name: StrategyName) -> dict[str, Trained]:
    """All in turn, which is quicker than as many groups of processes."""
    return {scenario: train_scenario(ranks, name, scenario) for scenario in SCENARIOS}


def train_without_heads(ranks: Ranks, name: StrategyName) -> Trained:
    return train_steps(ranks, name, "dflash", NO_LABEL_ON_RANK_1, fault="absent_heads")


def plant_unpooled(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    """Every rank divides by its own count, and the mean of means is taken: `UnpooledRanks`."""


def plant_own_shard(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    """A rank clips by the norm of its own shard."""
    whole = torch.nn.utils.get_total_norm

    def own_shard(gradients: list[Any]) -> Tensor:
        return whole([getattr(gradient, "_local_tensor", gradient) for gradient in gradients])

    patch.setattr(torch.nn.utils, "get_total_norm", own_shard)


def plant_own_anchors(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    """Every rank draws anchors for its own rows, from the same seed."""
    draw = step_file.sample_anchors

    def own(supervised_BS: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        anchors, valid = draw(supervised_BS[ranks.rows(len(supervised_BS))], *arguments)
        return anchors.repeat(ranks.size, 1), valid.repeat(ranks.size, 1)

    patch.setattr(step_file, "sample_anchors", own)


def plant_absent_heads(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    """A rank that has nothing to learn leaves most parameters out of its backward."""
    forward = DraftScoring.forward

    def skipping(self: DraftScoring, features: Features, batch: Batch, blocks: Blocks) -> Scores:
        self._touches_all = False
        scores = forward(self, features, batch, blocks)
        if bool(blocks.counts_BAQ.any()):
            return scores
        return scores._replace(loss_sum=0.0 * next(self.parameters()).sum())

    patch.setattr(DraftScoring, "forward", skipping)


def _poison(patch: pytest.MonkeyPatch) -> None:
    """A NaN in the second step's features, on this rank."""
    original, calls = TargetFeatures.__call__, iter(range(100))

    def features(self: TargetFeatures, batch: Batch) -> Features:
        found = original(self, batch)
        if next(calls) == 1:
            found.taps[0][0, 0, 0] = float("nan")
        return found

    patch.setattr(TargetFeatures, "__call__", features)


def _note_anchors(patch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Anchors of the blocks that this rank makes, from now on."""
    noted: list[list[list[int]]] = []
    make = step_file.make_blocks

    def make_blocks(tokens: Tensor, supervised: Tensor, anchors_BA: Tensor, *arguments: Any) -> Blocks:
        noted.append(anchors_BA.tolist())
        return make(tokens, supervised, anchors_BA, *arguments)

    patch.setattr(step_file, "make_blocks", make_blocks)
    return noted
