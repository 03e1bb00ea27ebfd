"""What a run is put together from: data, drafter, contract, settings of a step."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from paceline.capture.feature_record import conversation_key
from paceline.checkpoint.contract import DrafterContract
from paceline.configuration.run import TrainRun
from paceline.errors import ConfigError
from paceline.models.drafters.table import Drafter
from paceline.models.loading import LoadedTarget
from paceline.training.attention_choice import choose_attention
from paceline.training.batches import StepBatches
from paceline.training.chats import ChatEncoder, chat_encoder
from paceline.training.continuing import Start, start_of
from paceline.training.contract import drafter_contract
from paceline.training.data import Conversations, drop_short, join, read_conversations, split_held_out
from paceline.training.feature_source import open_stored_features
from paceline.training.features import TargetFeatures
from paceline.training.objective import Objective
from paceline.training.ranks import Ranks
from paceline.training.starting import starting_drafter
from paceline.training.step import StepSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """Conversations of a run.

    Attributes:
        train: to learn from.
        held_out: kept for evaluation, by file.
        before_dropping: those to learn from and those with too little to learn; what stored features were made of.
    """

    train: Conversations
    held_out: Mapping[str, Conversations]
    before_dropping: Conversations


@dataclass(frozen=True)
class RunParts:
    """A run before anything was written.

    Attributes:
        data: read and split.
        batches: of the training data, by step.
        contract: of the drafter.
        features: what the target contributes, computed on the spot or read from a folder.
        drafter: float32 masters as the run starts with them, the same on every rank.
        settings: of a step.
        start: what the run goes on from; None starts from random weights.
    """

    data: TrainingData
    batches: StepBatches
    contract: DrafterContract
    features: TargetFeatures
    drafter: Drafter
    settings: StepSettings
    start: Start | None = None


def read_data(run: TrainRun, vocab_size: int, encoder: ChatEncoder | None) -> TrainingData:
    """Read and split every file of a run.

    Args:
        run: its settings.
        vocab_size: of the target.
        encoder: renders and encodes chats; None where the target has no template for them.
    Raises:
        DataError: names the file and what is wrong with it.
    """
    train, held_out = [], {}
    names = Counter(path.name for path in run.data.files)
    for path in run.data.files:
        conversations = read_conversations(path, vocab_size=vocab_size, encoder=encoder)
        learned, kept = split_held_out(conversations, run.data.hold_out)
        train.append(learned)
        # Two folders may hold files of one name, and one of these folders may be the one that all paths start from.
        held_out[path.name if names[path.name] == 1 else str(path)] = kept
    whole = join(train)
    learned = drop_short(whole, max_length=run.data.max_length, min_supervised=run.data.min_supervised)
    _warn_of_repeats(whole, held_out)
    _warn_of_masks(whole, run.drafter.mask_token_id)
    return TrainingData(learned, held_out, whole)


def _warn_of_repeats(train: Conversations, held_out: Mapping[str, Conversations]) -> None:
    """Say how many held-out conversations are learnt word for word, from this file or from another."""
    learnt = set(_keys(train))
    for name, conversations in held_out.items():
        repeated = sum(key in learnt for key in _keys(conversations))
        if repeated:
            _log.warning(
                "%d of %d held-out conversations of %s are learnt word for word: what is measured on them comes out "
                "too high",
                repeated,
                len(conversations),
                name,
            )


def _warn_of_masks(train: Conversations, mask_token_id: int | None) -> None:
    """Say how often an answer holds the token that fills a block's rows: as an anchor it cannot be told from them."""
    found = 0 if mask_token_id is None else int(np.count_nonzero(train.tokens[train.supervised] == mask_token_id))
    if found:
        _log.warning(
            "drafter.mask_token_id %d stands %d times in the answers of the data: as an anchor it cannot be told from "
            "the rows behind it; an id that no text holds is better",
            mask_token_id,
            found,
        )


def _keys(conversations: Conversations) -> Iterator[bytes]:
    for start, end in itertools.pairwise(conversations.starts.tolist()):
        yield conversation_key(conversations.tokens[start:end])


def prepare_run(run: TrainRun, target: LoadedTarget, ranks: Ranks) -> RunParts:
    """Read the data and make the drafter.

    Args:
        run: validated settings.
        target: on the device of this rank.
        ranks: among which the batches will be shared; this talks to none.
    Raises:
        ConfigError: settings that do not fit the target or the number of ranks.
        DataError: data that cannot be used.
        CheckpointError: the drafter to go on from cannot be read.
        CompatibilityError: stored features are of another target or other data.
    """
    if target.model.norm.weight.dtype == torch.float16:
        raise ConfigError(
            "the target is in float16; drafters are trained in bfloat16 or float32 beside it",
            origin={"target": target.contract.origin},
            hint="target.dtype=bfloat16",
        )
    ranks.require_even(run.schedule.batch_size)
    data = read_data(run, target.contract.vocab_size, chat_encoder(target.tokenizer, run.data))
    batches = StepBatches(run, data.train)
    contract = drafter_contract(run, target.contract)
    features = _features(run, target, contract, data, ranks)
    drafter = starting_drafter(run, contract, target, data.train, ranks.device)
    settings = _step_settings(run, contract, ranks, features)
    start = None if run.drafter.start_from is None else start_of(run, run.drafter.start_from, drafter)
    return RunParts(data, batches, contract, features, drafter, settings, start)


def _features(
    run: TrainRun, target: LoadedTarget, contract: DrafterContract, data: TrainingData, ranks: Ranks
) -> TargetFeatures:
    if run.data.features is None:
        is_compiled = _is_compiled(run, ranks)
        return TargetFeatures(
            target.model, contract.target_layer_ids, contract.aux_hidden_stream, is_compiled=is_compiled
        )
    conversations = [data.before_dropping, *data.held_out.values()]
    # All ranks read the same files: hashing them once is enough.
    return open_stored_features(run, target, contract, conversations, verify=ranks.is_first)


def _is_compiled(run: TrainRun, ranks: Ranks) -> bool:
    wanted = run.schedule.compiled
    return wanted == "on" or (wanted == "auto" and ranks.device.type == "cuda")


def _step_settings(run: TrainRun, contract: DrafterContract, ranks: Ranks, features: TargetFeatures) -> StepSettings:
    weights = run.objective.loss_weights
    return StepSettings(
        objective=Objective(
            kl=weights.get("kl", 0.0),
            ce=weights.get("ce", 0.0),
            gamma=run.objective.gamma,
            chunk_rows=run.objective.chunk_rows,
            compiled=_is_compiled(run, ranks),
            selector=run.objective.selector_weight,
            l1=weights.get("l1", 0.0),
            confidence=run.objective.confidence_weight,
            is_adaptive=run.objective.weighting == "adaptive",
        ),
        num_anchors=run.schedule.num_anchors,
        clip_norm=run.optimizer.clip_norm,
        # States meet the target's head in its dtype, and the drafter's masters right behind it.
        mixed_precision=ranks.device.type == "cuda" or features.head_VD.dtype == torch.bfloat16,
        flex=choose_attention(run, contract, ranks.device, ranks.size),
    )
