"""From trained masters to a drafter folder that can be served, in bf16, with a fingerprint of its target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.calibration import Calibration
from paceline.checkpoint.export import TEMPLATE_KEY, split_fused, write_drafter_folder
from paceline.checkpoint.names import drafter_destinations
from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.configuration.run import TrainRun
from paceline.models.building import empty_drafter
from paceline.models.fingerprint import PROBE_TOKENS, record_fingerprint
from paceline.models.loading import LoadedTarget
from paceline.training.preparing import RunParts
from paceline.training.provenance import file_hashes, versions
from paceline.training.ranks import Ranks
from paceline.training.strategies import full_tensor
from paceline.training.vocabulary import count_response_tokens


def export_folder(output: Path, step: int, *, is_last: bool) -> Path:
    """Where the drafter goes after a step: the run's own, or one of those on the way."""
    return output / "drafter" if is_last else output / "exports" / f"step-{step:07d}"


def export_drafter(
    folder: Path,
    run: TrainRun,
    parts: RunParts,
    target: LoadedTarget,
    identity: Mapping[str, object],
    step: int,
    ranks: Ranks,
    calibration: Calibration | None = None,
) -> Path:
    """Write the folder, whole or not at all.

    Args:
        folder: where it shall be; one of an earlier attempt is replaced.
        run: settings.
        parts: the drafter as it is, and what it was made for.
        target: what it was trained on.
        identity: of the run, for the record.
        step: steps done.
        ranks: all of them must call; the first one writes.
        calibration: of these very weights, if they were measured.
    Raises:
        CapacityError: the disk is full; nothing is left behind.
    """
    masters = {name: full_tensor(parameter) for name, parameter in parts.drafter.named_parameters()}
    is_text = isinstance(target.tokenizer, TextTokenizer)
    template = target.tokenizer.template_sha256 if is_text else None
    record = {"step": step, **identity, TEMPLATE_KEY: template}
    if parts.start is not None and parts.start.history:
        record["start"] = dict(parts.start.history)
    return ranks.first_only(lambda: _write(folder, run, parts, target, record, masters, calibration))


def _write(
    folder: Path,
    run: TrainRun,
    parts: RunParts,
    target: LoadedTarget,
    record: Mapping[str, object],
    masters: Mapping[str, Tensor],
    calibration: Calibration | None,
) -> Path:
    contract, data = parts.contract, parts.data
    exported = empty_drafter(contract, torch.bfloat16, next(iter(masters.values())).device)
    with torch.no_grad():
        for name, parameter in exported.named_parameters():
            parameter.copy_(masters[name])
    exported.vocabulary.set_tables(parts.drafter.vocabulary.target_ids_V, None)
    probe_source = next((c for c in data.held_out.values() if len(c.tokens) >= PROBE_TOKENS), data.train)
    probe = [int(token) for token in probe_source.tokens[:PROBE_TOKENS]]  # across borders, if texts are short
    write_drafter_folder(
        folder,
        contract,
        split_fused(exported.checkpoint_parameters(), drafter_destinations(contract)),
        record_fingerprint(target.model, exported, probe),
        {**record, "data.files": file_hashes(run.data.files), "versions": versions()},
        draft_to_target=exported.vocabulary.target_ids_V,
        token_counts=count_response_tokens(data.train, contract.target_vocab_size),
        calibration=calibration,
    )
    return folder
