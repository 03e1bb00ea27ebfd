"""What a run came from: settings, data, target and versions, for a resume to compare and an export to state."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path

from paceline import __version__
from paceline.capture.shards import MANIFEST_FILE
from paceline.configuration.run import TrainRun
from paceline.models.layers import DecoderLayer
from paceline.models.targets.target import Target
from paceline.training.data import Conversations


def file_hashes(files: Sequence[Path]) -> dict[str, str]:
    """SHA-256 of every data file by name; of a captured folder, of its manifest, which holds those of the shards.

    Files of one name are told apart by their order: "data.npz", "data.npz (2)".
    """
    hashes: dict[str, str] = {}
    for path in files:
        taken = sum(name == path.name or name.startswith(f"{path.name} (") for name in hashes)
        with (path / MANIFEST_FILE if path.is_dir() else path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        hashes[f"{path.name} ({taken + 1})" if taken else path.name] = digest
    return hashes


def run_identity(
    run: TrainRun, train: Conversations, target: Target, start_sha256: str | None = None
) -> dict[str, object]:
    """What makes two attempts the same run: settings that change the numbers, data, target, first weights."""
    settings = run.model_dump(
        mode="json", exclude={"output", "device", "evaluate", "checkpoint", "tracking", "distributed"}
    )
    settings["data"].pop("files")
    settings["data"]["features"] = run.data.features is not None  # they may lie elsewhere, and are compared when opened
    settings["drafter"].pop("start_from")  # its weights say which it is, too
    settings["target"].pop("name")  # the weights below say which it is, wherever it lies
    sections = {section: values for section, values in settings.items() if isinstance(values, dict)}
    flat = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    digest = hashlib.sha256()
    last_layer = target.layers[-1]
    of_layer = [last_layer.mlp.down_proj.weight] if isinstance(last_layer, DecoderLayer) else last_layer.parameters()
    for parameter in (target.embed_tokens.weight, *of_layer):
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    begun = {} if start_sha256 is None else {"start_weights_sha256": start_sha256}
    return {
        **flat,
        **begun,
        "seed": run.seed,
        "data_sha256": train.fingerprint(),
        "target_weights_sha256": digest.hexdigest(),
    }


def versions() -> dict[str, str]:
    """Versions of what computed the weights."""
    return {name: importlib.metadata.version(name) for name in ("torch", "numpy")} | {
        "paceline": __version__,
        "python": platform.python_version(),
    }
