"""From a loaded drafter to what drafts in an engine, with a cache over the engine's blocks."""

from __future__ import annotations

from torch import Tensor

from paceline.checkpoint.contract import DraftSampleMethod
from paceline.engine.attends import AttentionChoice
from paceline.engine.block_tables import BlockTables
from paceline.engine.cache import KeyValueCache
from paceline.engine.proposal import BlockProposer, Proposer
from paceline.engine.sequential_proposal import SequentialProposer, spare_positions
from paceline.engine.settings import EngineSettings
from paceline.errors import CompatibilityError
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.drafters.short_list import ShortList, shortened
from paceline.models.loading import LoadedDrafter, LoadedTarget


def make_proposer(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    choice: AttentionChoice,
    settings: EngineSettings,
    *,
    num_draft_tokens: int,
    tables: BlockTables,
    short_list: ShortList | None = None,
) -> Proposer:
    """Prepare a drafter for serving.

    Args:
        target: lends embedding and head.
        drafter: of any family.
        choice: form of attention.
        settings: how drafts are drawn and judged.
        num_draft_tokens: K.
        tables: those of the target's cache; slots have `spare_positions_of` the drafter more than the target writes.
        short_list: the ids to draft; None is all that the drafter can.
    """
    model, contract = drafter.model, drafter.contract
    if short_list is not None:
        model = shortened(model, short_list, target.model)
    is_coupled = settings.verify_method == "coupled"
    # Coupled drafts agree with the target's draws because they use the same noise, so they have to be drawn.
    own: DraftSampleMethod = "probabilistic" if is_coupled else contract.draft_sample_method
    method = settings.draft_sample_method or own

    def cache(shape: tuple[int, int], weight: Tensor) -> KeyValueCache:
        num_kv_heads, head_size = shape
        return KeyValueCache(
            tables,
            num_layers=contract.num_layers,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=weight.dtype,
            device=weight.device,
        )

    if isinstance(model, Eagle3Drafter):
        return SequentialProposer(
            target.model,
            model,
            cache(model.cache_shape, model.fc.weight),
            choice,
            num_draft_tokens=num_draft_tokens,
            method=method,
            is_coupled=is_coupled,
        )
    return BlockProposer(
        target.model,
        model,
        cache(model.backbone.cache_shape, model.backbone.fc.weight),
        choice,
        num_draft_tokens=num_draft_tokens,
        method=method,
        is_coupled=is_coupled,
    )


def spare_positions_of(drafter: LoadedDrafter | None, num_draft_tokens: int) -> int:
    """Positions that a slot needs beyond those of the target's rows, as some drafters go on behind a block."""
    goes_on = drafter is not None and isinstance(drafter.model, Eagle3Drafter)
    return spare_positions(num_draft_tokens) if goes_on else 0


def refuse_another_target(target: LoadedTarget, drafter: LoadedDrafter | None) -> None:
    """A drafter that was checked on one target may fit no other, however equal their sizes.

    Raises:
        CompatibilityError: it was loaded for another one.
    """
    if drafter is not None and drafter.checked_on is not None and drafter.checked_on is not target.model:
        raise CompatibilityError(
            "the drafter was loaded for another target than this engine's; what was checked there says nothing here",
            origin={"drafter": drafter.contract.origin, "target": target.contract.origin},
            hint="load_drafter(name, target) with this engine's target",
        )
