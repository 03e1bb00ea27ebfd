"""Features from disk instead of from the target: the same numbers for the same conversation, or a refusal.

E taps times width, B rows, S tokens, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.capture.feature_file import StoredConversations
from paceline.capture.feature_record import Texts, cut_texts, differences, feature_record
from paceline.capture.shards import ShardFolder
from paceline.checkpoint.contract import DrafterContract
from paceline.configuration.run import TrainRun
from paceline.errors import CompatibilityError, DataError
from paceline.models.attends import document_spans
from paceline.models.loading import LoadedTarget
from paceline.training.data import Batch, Conversations
from paceline.training.features import TargetFeatures
from paceline.training.objective import Features

_log = logging.getLogger(__name__)


class StoredFeatures(TargetFeatures):
    """Gives for a batch what `TargetFeatures` gives, read from a folder of `paceline capture features`.

    When a training step is bitwise the same with either:

    * The folder was captured by a target in the arithmetic `row_invariant`, and the online target computes in it too.
      A token's states then follow from its conversation alone, so neither the width of a row, nor its neighbours, nor
      packing shows in them. Measured in float32 and bf16 on a CPU.
    * In any other arithmetic the states depend on the shapes of the pass: a fused attention kernel sums the keys of a
      row of 64 padded tokens in another order than those of a row of 256. They agree to rounding: in float32 to about
      1e-5 of a state of size 1.
    * Under bf16 autocast on a GPU they agree to bf16 rounding.

    What stands at padded positions differs (here zeros) and reaches neither loss nor gradient, since no block sees it.

    Args:
        stored: conversations of a folder whose record was compared.
        target: lends its embedding and its head; its layers are not run.
        contract: of the drafter.
        needs_hidden: whether anything reads the last states; if not, they are NaN, so that a mistake shows.
    """

    def __init__(
        self, stored: StoredConversations, target: LoadedTarget, contract: DrafterContract, *, needs_hidden: bool
    ) -> None:
        super().__init__(target.model, contract.target_layer_ids, contract.aux_hidden_stream)
        self._stored, self._needs_hidden = stored, needs_hidden
        self._num_taps, self._width = len(contract.target_layer_ids), target.contract.hidden_size
        self._dtype = target.model.norm.weight.dtype

    @property
    def has_hidden(self) -> bool:
        """Whether anything reads the last states; if not, they are NaN."""
        return self._needs_hidden

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Features:
        """Features of a batch, on its device.

        Raises:
            DataError: a conversation is not in the folder.
        """
        ids_BS = batch.token_ids_BS.cpu().numpy()
        B, S = ids_BS.shape
        taps = [torch.zeros(B, S, self._width, dtype=self._dtype) for _ in range(self._num_taps)]
        missing = 0.0 if self._needs_hidden else float("nan")
        hidden_BSD = torch.full((B, S, self._width), missing, dtype=self._dtype)
        for row, documents in enumerate(batch.documents_BS.tolist()):
            for start, end in document_spans(documents):
                taps_SE, hidden_SD = self._stored.find(ids_BS[row, start:end])
                for tap_BSD, tap_SD in zip(taps, taps_SE.split(self._width, dim=1), strict=True):
                    tap_BSD[row, start:end] = tap_SD
                if self._needs_hidden and hidden_SD is not None:
                    hidden_BSD[row, start:end] = hidden_SD
        device = batch.token_ids_BS.device
        return Features([_moved(tap, device) for tap in taps], _moved(hidden_BSD, device))


def needs_last_hidden(run: TrainRun) -> bool:
    """Whether a run's loss compares with the target's distribution, which its last states give."""
    has_confidence = run.drafter.family == "dspark" and run.drafter.confidence_head
    return bool({"kl", "l1"} & run.objective.loss_weights.keys()) or has_confidence


def texts_of(conversations: Conversations, max_length: int) -> Texts:
    """Conversations as capture knows them, cut as training cuts them."""
    return cut_texts(conversations.tokens, conversations.supervised, conversations.starts, max_length)


def open_stored_features(
    run: TrainRun,
    target: LoadedTarget,
    contract: DrafterContract,
    parts: Sequence[Conversations],
    *,
    verify: bool = True,
) -> StoredFeatures:
    """Open the folder `data.features` of a run, if it holds what the run needs, to the last detail.

    Args:
        run: its settings.
        target: loaded as for training.
        contract: of the drafter.
        parts: all conversations of `data.files`, in any order: those to train on and those held out.
        verify: compare the hashes of all shards, which reads them once.
    Raises:
        CompatibilityError: the features are of another target, tokenizer, template, layer, stream, precision, norm,
            length or data; names every one of them.
        DataError: the folder is no complete capture, or damaged.
    """
    folder = run.data.features
    assert folder is not None, "asked for by data.features"
    shards = ShardFolder.read(folder, verify=verify)
    stored = shards.plan.get("capture")
    if shards.plan.get("kind") != "features" or not isinstance(stored, dict):
        raise DataError(f"{folder} holds {shards.plan.get('kind', 'something')!r}, not features")
    needs_hidden = needs_last_hidden(run)
    wanted = feature_record(
        target,
        [texts_of(part, run.data.max_length) for part in parts],
        layer_ids=contract.target_layer_ids,
        stream=contract.aux_hidden_stream,
        keeps_hidden=needs_hidden,
        max_length=run.data.max_length,
    )
    if lines := differences(stored, wanted):
        raise CompatibilityError(
            "the stored features are not those that this run needs:\n  " + "\n  ".join(lines),
            origin={"features": folder},
            hint="paceline capture features, with this run's settings and another folder",
        )
    mode = stored.get("engine", {}).get("linear_mode")
    if mode != target.linear_mode:
        _log.info("the features were captured in the arithmetic %r; the target's is %r", mode, target.linear_mode)
    conversations = StoredConversations(shards)
    _log.info("features of %d distinct conversations from %s", len(conversations), folder)
    return StoredFeatures(conversations, target, contract, needs_hidden=needs_hidden)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
