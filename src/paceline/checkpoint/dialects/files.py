"""A drafter folder as a whole: config, weights under canonical names, vocabulary table, embedding of the mask token."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects.fields import says_tied
from paceline.checkpoint.dialects.keys import UNSTATED
from paceline.checkpoint.dialects.table import Dialect, contract_from_config, detect_dialect, is_drafter_config
from paceline.checkpoint.dialects.taps import log_taps
from paceline.checkpoint.dialects.tensors import D2T, T2D, canonical_names, fused_parts, ignored_names
from paceline.checkpoint.locate import read_json
from paceline.checkpoint.quantization_config import read_quantization_config
from paceline.checkpoint.quantized import open_dequantized
from paceline.checkpoint.sources import RenamedSource, SplitRowsSource
from paceline.checkpoint.torch_state import find_torch_state, open_weights
from paceline.checkpoint.weights import INDEX_FILE, SINGLE_FILE, TensorSource
from paceline.errors import CheckpointError

CONFIG_FILE = "config.json"
MASK_FILE = "mask_embedding.pt"
_WITH_MASK_FILE = ("dflash", "dflash2")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
_HAND_MADE = 16  # draft ids; a table with fewer may hold no two neighbours


@dataclass(frozen=True)
class DrafterFiles:
    """What a drafter folder holds, ready to be loaded."""

    folder: Path
    dialect: Dialect
    contract: DrafterContract
    source: TensorSource  # canonical names, dequantised, q, k, v and gate, up apart
    ignored: frozenset[str]  # names in the source that no module reads
    draft_to_target: Tensor | None  # int64 [draft vocabulary], the target id of every draft id; None where they are one
    mask_embedding: Tensor | None  # float [D], replaces the embedding row of the mask token


def read_drafter(folder: Path) -> DrafterFiles:
    """Open a drafter folder of any dialect; weights are read lazily.

    Args:
        folder: config.json and weights, safetensors or one state dict of `torch.save`; in some layouts also
            `mask_embedding.pt`.
    Returns:
        Contract and tensors; the small tables are read and checked.
    Raises:
        CheckpointError: a file is missing or damaged, the family, layout or quantisation is not supported, a key is
            unknown, a needed field is missing, or config, tensors and side files contradict.
    Source: the layouts of z-lab, transformers, speculators, SpecForge, TorchSpec, DeepSpec and Kimi K3.
    """
    config, origin = _read_config(folder)
    raw = open_weights(folder)
    dialect = detect_dialect(config, origin)
    contract = _with_side_files(contract_from_config(config, origin, raw.names()), config, folder)
    fused = fused_parts(contract, raw.names())
    plain, scheme = open_dequantized(raw, config.get("quantization_config"), origin=origin, fused=fused)
    apart = SplitRowsSource(plain, fused)
    source = RenamedSource(apart, canonical_names(apart.names(), apart.origin))
    contract = dataclasses.replace(contract, quantization=scheme)
    mask = read_mask_embedding(folder / MASK_FILE, contract) if contract.has_mask_embedding else None
    if contract.has_own_embedding and contract.has_own_head and says_tied(config, ConfigReader(config, origin)):
        _check_tie(source, origin)
    log_taps(contract, dialect)
    return DrafterFiles(
        folder=folder,
        dialect=dialect,
        contract=contract,
        source=source,
        ignored=ignored_names(contract, source.names()),
        draft_to_target=read_draft_to_target(source, contract),
        mask_embedding=mask,
    )


def read_drafter_contract(folder: Path) -> DrafterContract:
    """Read what a drafter folder promises, from its config, the names of its tensors and its side files.

    Args:
        folder: a drafter in any dialect; without a weights file the config's word is taken for what it brings along.
    Returns:
        The contract; `origin` is the config file.
    Raises:
        CheckpointError: as `read_drafter`, apart from what only the weights themselves show.
    """
    config, origin = _read_config(folder)
    has_weights = any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)) or find_torch_state(folder)
    names = open_weights(folder).names() if has_weights else []
    contract = _with_side_files(contract_from_config(config, origin, names), config, folder)
    quantization = config.get("quantization_config")
    if quantization is None:
        return contract
    return dataclasses.replace(contract, quantization=str(read_quantization_config(quantization, origin=origin)))


def is_drafter_folder(path: Path) -> bool:
    """Whether a folder's config describes a drafter; a damaged config is left to the strict readers."""
    try:
        config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and is_drafter_config(config)


def read_draft_to_target(source: TensorSource, contract: DrafterContract) -> Tensor | None:
    """The target id of every draft id, from the offsets that every known writer stores.

    Args:
        source: may hold `d2t`, offsets [draft vocabulary], and `t2d`, bool [target vocabulary].
        contract: the drafter.
    Returns:
        int64 [draft vocabulary], ascending; None where the drafter's ids are the target's.
    Raises:
        CheckpointError: the table is missing, misshapen, absolute, leaves the target's vocabulary, or does not agree
            with `t2d`.
    """
    names = source.names()
    origin = {"weights": source.origin, "config": contract.origin}
    if not contract.has_vocabulary_map:
        if D2T in names and bool(source.load(D2T).any()):
            raise CheckpointError(
                "d2t maps draft ids to other target ids, and the draft vocabulary is the target's, "
                f"{contract.draft_vocab_size} ids",
                origin=origin,
            )
        return None
    if D2T not in names:
        raise CheckpointError(
            f"the drafter proposes from {contract.draft_vocab_size} of {contract.target_vocab_size} ids, and the "
            "weights have no d2t that says which",
            origin=origin,
            hint="the file that was exported with this config; a d2t beside the weights is not read",
        )
    offsets = source.load(D2T)
    if offsets.dtype not in _INTEGERS or tuple(offsets.shape) != (contract.draft_vocab_size,):
        raise CheckpointError(
            f"d2t is {offsets.dtype} {list(offsets.shape)}, expected integers [{contract.draft_vocab_size}]",
            origin=origin,
        )
    offsets = offsets.long()
    table = torch.arange(contract.draft_vocab_size) + offsets
    if T2D in names:
        _check_against_t2d(table, offsets, source.load(T2D), contract, origin)
    else:
        _refuse_absolute(table, offsets, origin)
    if not bool((table[1:] > table[:-1]).all()) or int(table[0]) < 0 or int(table[-1]) >= contract.target_vocab_size:
        raise CheckpointError(
            f"d2t read as offsets gives target ids {_shown(table)}, which do not ascend inside the target's "
            f"{contract.target_vocab_size}",
            origin=origin,
            hint=_if_absolute(offsets, contract.target_vocab_size),
        )
    return table


def read_mask_embedding(path: Path, contract: DrafterContract) -> Tensor:
    """The row that a drafter was trained to read at masked positions.

    Args:
        path: a tensor, or `{embedding: tensor, mask_token_id: int}` with the second optional.
        contract: gives width and id.
    Returns:
        float [D].
    Raises:
        CheckpointError: the file is damaged or holds code or something else, or size or id differ.
    """
    origin = {"file": path, "config": contract.origin}
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path.name} cannot be read as tensors: {error}", origin=origin) from error
    embedding = content
    if isinstance(content, Mapping):
        unknown = sorted(str(key) for key in content if key not in ("embedding", "mask_token_id"))
        if unknown:
            raise CheckpointError(f"{path.name} has unknown keys {', '.join(unknown)}", origin=origin)
        embedding, token_id = content.get("embedding"), content.get("mask_token_id")
        if isinstance(token_id, Tensor) and token_id.numel() == 1:
            token_id = int(token_id)
        if token_id is not None and token_id != contract.mask_token_id:
            raise CheckpointError(
                f"{path.name} is for mask_token_id {token_id}, the config says {contract.mask_token_id}", origin=origin
            )
    if not isinstance(embedding, Tensor) or not embedding.is_floating_point():
        raise CheckpointError(f"{path.name} holds {type(embedding).__name__}, expected a float tensor", origin=origin)
    if embedding.numel() != contract.hidden_size:
        raise CheckpointError(
            f"{path.name} is {list(embedding.shape)}, expected {contract.hidden_size} numbers (hidden_size)",
            origin=origin,
        )
    if not bool(torch.isfinite(embedding).all()):
        raise CheckpointError(f"{path.name} holds NaN or infinity", origin=origin)
    return embedding.detach().flatten()


def _read_config(folder: Path) -> tuple[dict[str, Any], str]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist")
    file = folder / CONFIG_FILE
    return read_json(file), str(file)


def _with_side_files(contract: DrafterContract, config: Mapping[str, Any], folder: Path) -> DrafterContract:
    path = folder / MASK_FILE
    if not path.exists():
        return contract
    if contract.family not in _WITH_MASK_FILE:
        raise CheckpointError(
            f"{MASK_FILE} replaces the embedding of the mask token, and a drafter of family {contract.family} reads "
            "the vocabulary's own row",
            origin={"file": path, "config": contract.origin},
        )
    return dataclasses.replace(contract, has_mask_embedding=True)


def _check_tie(source: TensorSource, origin: str) -> None:
    """Refuse a head that is said to be the embedding and holds other numbers; engines differ in which they take."""
    embedding, head = source.load("embed_tokens.weight"), source.load("lm_head.weight")
    if not torch.equal(embedding, head):
        raise CheckpointError(
            f"tie_word_embeddings is true, and the weights have an embedding {list(embedding.shape)} and an lm_head "
            f"{list(head.shape)} that is not equal to it",
            origin={"config": origin, "weights": source.origin},
            hint="tie_word_embeddings false, if the drafter was trained with this lm_head",
        )


def _check_against_t2d(
    table: Tensor, offsets: Tensor, t2d: Tensor, contract: DrafterContract, origin: Mapping[str, object]
) -> None:
    if t2d.dim() != 1 or (contract.target_vocab_size != UNSTATED and t2d.shape[0] != contract.target_vocab_size):
        raise CheckpointError(f"t2d is {list(t2d.shape)}, expected [{contract.target_vocab_size}]", origin=origin)
    drafted = t2d.nonzero().flatten()
    if torch.equal(drafted, table):
        return
    if torch.equal(drafted, offsets):
        raise CheckpointError(
            f"d2t is absolute: its values {_shown(offsets)} are the target ids of t2d themselves; expected are "
            "offsets, target id minus draft id",
            origin=origin,
            hint="storing d2t - arange(draft_vocab_size)",
        )
    raise CheckpointError(
        f"d2t gives the target ids {_shown(table)}, and t2d marks {drafted.numel()} ids, {_shown(drafted)}",
        origin=origin,
    )


def _refuse_absolute(table: Tensor, offsets: Tensor, origin: Mapping[str, object]) -> None:
    """Refuse values that rise at every step where there is no `t2d` to tell what they are.

    Target ids always rise. Offsets stay the same wherever two neighbouring ids are kept, which any vocabulary chosen by
    frequency does somewhere; only a short table, written by hand, may keep none and still be meant as offsets.
    """
    rises = offsets.numel() > 1 and int(offsets[0]) >= 0 and bool((offsets.diff() > 0).all())
    if rises and (int(offsets[0]) == 0 or offsets.numel() >= _HAND_MADE):
        raise CheckpointError(
            f"d2t looks absolute: its values {_shown(offsets)} rise at every step, as target ids do and offsets do "
            f"not. Read as target ids they are {_shown(offsets)}, read as offsets they give {_shown(table)}",
            origin=origin,
            hint="storing d2t - arange(draft_vocab_size) if these are target ids; if they are offsets after all, a t2d "
            "beside them that marks the same ids",
        )


def _if_absolute(values: Tensor, target_vocab_size: int) -> str | None:
    ascends = bool((values[1:] > values[:-1]).all()) and int(values[0]) >= 0 and int(values[-1]) < target_vocab_size
    return "storing d2t - arange(draft_vocab_size): these values look like target ids themselves" if ascends else None


def _shown(ids: Tensor) -> str:
    head = [int(value) for value in ids[:4]]
    return f"[{', '.join(map(str, head))}{', ...' if ids.numel() > 4 else ''}]"
