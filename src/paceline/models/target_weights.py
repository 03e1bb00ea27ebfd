"""Filling targets from their files, whole or as one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from paceline.checkpoint.contract import TargetContract
from paceline.checkpoint.gguf import open_gguf
from paceline.checkpoint.kimi_config import read_quantization
from paceline.checkpoint.kimi_names import boundary_names, kimi_slots, kimi_text_slots, mtp_names
from paceline.checkpoint.kimi_tensors import open_kimi
from paceline.checkpoint.locate import read_json
from paceline.checkpoint.names import dense_target_destinations, dense_target_ignored
from paceline.checkpoint.weights import Destination, TensorSource, load_strict, open_safetensors
from paceline.models.building import materialise
from paceline.models.layers import Linear
from paceline.models.stored_codes import find_codes
from paceline.models.targets.kimi_stage import KimiStage
from paceline.models.weight_copy import copy_weight


def fill_target(model: nn.Module, contract: TargetContract, path: Path) -> None:
    """Read all weights of a target.

    Args:
        model: from `empty_target`.
        contract: read from the same files.
        path: a folder, or a `.gguf` file.
    Raises:
        CheckpointError: a tensor is missing, unused, misshapen or not finite, or stored in a way that is not read.
    """
    parameters = dict(model.named_parameters())
    if contract.kimi is None:
        destinations = dense_target_destinations(contract)
        source = open_dense(path)
        load_strict(parameters, source, destinations, ignored=dense_target_ignored(contract), copy=copy_weight)
        _keep_codes(model, source, destinations)
        return
    source = open_kimi_folder(contract, path)
    destinations = {slot.name: slot.destination for slot in kimi_slots(contract)}
    load_strict(parameters, source, destinations, ignored=mtp_names(contract, source.names()), copy=copy_weight)


def _keep_codes(model: nn.Module, source: TensorSource, destinations: Mapping[str, Destination]) -> None:
    """Tell linears whose weights are stored in codes where those are."""
    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}  # tied ones once
    for part in model.modules():
        if isinstance(part, Linear):
            stored = find_codes(source, destinations, names[part.weight.data_ptr()], part.weight)
            if stored is not None:
                part.keep_codes(stored)


def load_stage(
    contract: TargetContract, path: Path, start: int, end: int, *, dtype: torch.dtype, device: torch.device
) -> KimiStage:
    """Build and fill one stage of a Kimi target; a multimodal one's tower belongs to no stage.

    The two score vectors of the layer behind the stage are copied if the files have them. If not, the stage runs, and
    `prepare_taps` refuses the capture id that needs them.

    Args:
        contract: of the whole target.
        path: its folder.
        start: first layer.
        end: behind the last layer.
        dtype: of the weights.
        device: of the weights.
    Raises:
        CheckpointError: as for `fill_target`, over the tensors of this stage.
        ConfigError: there are no such layers.
    """
    with torch.device("meta"):
        stage = KimiStage(contract, start, end)
    materialise(stage, dtype, device)
    source, parameters = open_kimi_folder(contract, path), dict(stage.named_parameters())
    destinations = {slot.name: slot.destination for slot in kimi_text_slots(contract) if slot.parameter in parameters}
    elsewhere = {slot.name for slot in kimi_slots(contract)}.difference(destinations)
    others = elsewhere | mtp_names(contract, source.names())
    load_strict(parameters, source, destinations, ignored=others, copy=copy_weight)
    names = boundary_names(contract, end)
    if stage.boundary is not None and set(names) <= set(source.names()):
        stage.boundary.set(*(source.load(name) for name in names))
    return stage.eval()


def open_dense(path: Path) -> TensorSource:
    """The tensors of a dense target's folder or `.gguf` file under their published names.

    Raises:
        CheckpointError: there are none, or they cannot be read.
    """
    return open_gguf(path) if path.suffix == ".gguf" else open_safetensors(path)


def open_kimi_folder(contract: TargetContract, path: Path) -> TensorSource:
    """The tensors of a Kimi target's folder under their published names, as plain numbers.

    Raises:
        CheckpointError: as for `open_kimi`.
    """
    quantization = read_quantization(read_json(path / "config.json"), contract.origin)
    return open_kimi(open_safetensors(path), contract, quantization)
