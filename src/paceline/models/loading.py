"""From a name to a model that is ready to run: locate, read the contract, check the fit, load strictly, replay."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from paceline import __version__
from paceline.checkpoint.calibration import Calibration, read_calibration
from paceline.checkpoint.compatibility import check_fit, complete_contract
from paceline.checkpoint.contract import AuxHiddenStream, DrafterContract, TargetContract, capture_id
from paceline.checkpoint.dialects import read_drafter
from paceline.checkpoint.export import FINGERPRINT_FILE, PROVENANCE_FILE, TEMPLATE_KEY
from paceline.checkpoint.locate import locate_drafter, locate_target, read_json
from paceline.checkpoint.names import drafter_destinations
from paceline.checkpoint.target_config import read_target_contract
from paceline.checkpoint.token_counts import read_token_counts
from paceline.checkpoint.tokenizer import TextTokenizer, open_tokenizer
from paceline.checkpoint.weights import (
    load_strict,
    open_safetensors_file,
    save_safetensors,
    write_index,
    write_text_atomic,
)
from paceline.errors import ConfigError
from paceline.models.building import empty_drafter, empty_target
from paceline.models.capabilities import require_taps
from paceline.models.drafters.table import Drafter
from paceline.models.fingerprint import check_fingerprint as replay
from paceline.models.fingerprint import is_old
from paceline.models.layers import CODE_MODES, Linear, LinearMode, set_linear_mode
from paceline.models.target_weights import fill_target
from paceline.models.targets.target import Target
from paceline.models.weight_copy import copy_weight
from paceline.ops.dispatch import HAS_TRITON
from paceline.ops.linear import can_pack
from paceline.ops.native.attention import LARGEST_HEAD
from paceline.ops.native.build import has_amx
from paceline.ops.native.integers import can_run_integers
from paceline.ops.native.quantized import can_run_quantized
from paceline.ops.native.rows import can_run as can_run_native

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedTarget:
    """A target with its promises, its tokenizer and the arithmetic of its linears."""

    model: Target
    contract: TargetContract
    tokenizer: TextTokenizer
    linear_mode: LinearMode


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter that was checked against its target, and how many tokens it will propose per step."""

    model: Drafter
    contract: DrafterContract
    num_draft_tokens: int
    checked_on: Target | None = None  # the target that it was checked on, and whose tables it may share
    token_counts_W: Tensor | None = None  # int64, by target id: how often it is in the answers of the training data
    calibration: Calibration | None = None  # what it accepted where it was measured; serving is held against it


def resolve_device(device: str) -> torch.device:
    """Turn a name into a device; "auto" is the first GPU where there is one, else the CPU.

    Raises:
        ConfigError: a GPU was named that torch cannot see.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    # Not asked of torch.device, which keeps 8 bits of an index: of 256 it would make the first GPU.
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {device} was asked for; torch sees {torch.cuda.device_count()} GPUs", hint="--device cpu"
        )
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Turn a name into a dtype; "auto" is bf16 where the device computes it natively, else float32."""
    if dtype != "auto":
        return DTYPES[dtype]
    is_fast = device.type == "cuda" or can_pack(torch.empty(1, 1, dtype=torch.bfloat16))
    return torch.bfloat16 if is_fast else torch.float32


def load_target(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    linear_mode: LinearMode | Literal["auto"] = "auto",
    takes_codes: bool = True,
    offline: bool = False,
) -> LoadedTarget:
    """Load a target.

    Args:
        name: folder, `.gguf` file, hub name or alias.
        dtype: "auto", "bfloat16", "float16" or "float32".
        device: "auto", "cpu", "cuda" or "cuda:N".
        linear_mode: "auto" takes fused layers of bf16 on a GPU, native products of bf16 on CPUs that have the
            instructions, with the codes of a quantised file where it has some, and else packs the weights.
        takes_codes: whether "auto" may multiply codes. Not where states are learned from, recorded or held against
            those of the weights themselves, from which rounded rows differ as a small fault does.
        offline: never touch the network.
    Raises:
        CheckpointError: missing, damaged, incomplete or unsupported files.
        ConfigError: a device or arithmetic that this machine does not have.
    """
    path = locate_target(name, offline=offline)
    contract = read_target_contract(path, name)
    where = resolve_device(device)
    model = empty_target(contract, resolve_dtype(dtype, where), where)
    fill_target(model, contract, path)
    has_codes = _has_codes(model) and (takes_codes or linear_mode != "auto")
    mode = resolve_linear_mode(linear_mode, model.norm.weight, contract, has_codes=has_codes)
    set_linear_mode(model, mode)
    _log.info("target %s: %s on %s, linear mode %s", contract.name, model.norm.weight.dtype, where, mode)
    return LoadedTarget(model, contract, open_tokenizer(path), mode)


def resolve_linear_mode(
    asked: LinearMode | Literal["auto"],
    weight: Tensor,
    contract: TargetContract | None = None,
    *,
    has_codes: bool = False,
) -> LinearMode:
    """The arithmetic that will really run: fused, native or packed wherever it can be, unless another was asked for.

    Fused layers are chosen on a GPU with Triton; elsewhere they are their operations' definitions, for tests.
    With AMX, packed products have instructions that the native ones have not: those have to be asked for there.

    Args:
        asked: what the caller wants.
        weight: one of the model's.
        contract: of a target that one process holds; None for one that is spread, which has no native form.
        has_codes: whether weights of the model are stored in codes that native products read.
    """
    is_packable = can_pack(weight)
    has_native_codes = has_codes and _can_be_native(weight, contract)
    can_be_quantized = has_native_codes and can_run_quantized()
    can_be_int8 = has_native_codes and can_run_integers()
    if asked == "auto" and not has_amx() and _can_be_native(weight, contract):
        return "int8" if can_be_int8 else "quantized" if can_be_quantized else "native"
    if asked == "auto" and _can_be_fused(weight, contract):
        return "fused"
    if asked == "auto":
        return "packed" if is_packable else "plain"
    if asked == "fused" and contract is None:
        raise ConfigError(
            "linear mode 'fused' was asked for; only targets that one process holds have fused layers",
            hint="--linear-mode auto",
        )
    if asked == "native" and not _can_be_native(weight, contract):
        raise ConfigError(
            f"linear mode 'native' was asked for; this target in {weight.dtype} on {weight.device} has no native form",
            hint="--dtype bfloat16 for a dense target on a Linux CPU with AVX512-bf16 and gcc, or --linear-mode auto",
        )
    if asked in CODE_MODES and contract is None:
        raise ConfigError(
            f"linear mode {asked!r} was asked for; only targets that one process holds have their codes multiplied",
            hint="--linear-mode auto",
        )
    if (asked == "quantized" and not can_be_quantized) or (asked == "int8" and not can_be_int8):
        instructions = "AVX512-VBMI" if asked == "quantized" else "AVX512-VNNI"
        raise ConfigError(
            f"linear mode {asked!r} was asked for; this target in {weight.dtype} on {weight.device} has no such form",
            hint="a GGUF file of type Q4_0, Q4_1 or Q8_0, --dtype bfloat16, on a Linux CPU with AVX512-bf16, "
            f"{instructions} and gcc; or --linear-mode auto",
        )
    if asked == "packed" and not is_packable:
        raise ConfigError(
            f"linear mode 'packed' was asked for; {weight.dtype} on {weight.device} has no packed product",
            hint="--dtype bfloat16 on a CPU with bf16 instructions, or --linear-mode plain",
        )
    return asked


def _can_be_fused(weight: Tensor, contract: TargetContract | None) -> bool:
    """Whether a target's layers have fused forms that are faster here: bf16 on a GPU, through Triton.

    A hybrid target's layers stay as they are, with norms of one launch and what follows from the weights kept; those of
    its drafter are fused.
    """
    if contract is None or (contract.kimi is None and contract.head_size % 2):
        return False
    return HAS_TRITON and weight.device.type == "cuda" and weight.dtype == torch.bfloat16


def _has_codes(model: nn.Module) -> bool:
    """Whether any weight is stored in codes that native products may read."""
    return any(isinstance(part, Linear) and part.has_codes for part in model.modules())


def _can_be_native(weight: Tensor, contract: TargetContract | None) -> bool:
    """Whether a target's layers and its attention have native forms on this machine."""
    if contract is None:
        return False
    is_dense = contract.kimi is None and contract.head_size % 2 == 0 and contract.head_size <= LARGEST_HEAD
    return is_dense and can_run_native(weight)


def load_drafter(
    name: str,
    target: LoadedTarget,
    *,
    num_draft_tokens: int | None = None,
    check_contract: bool = True,
    check_fingerprint: bool = True,
    offline: bool = False,
    aux_hidden_stream: AuxHiddenStream | None = None,
) -> LoadedDrafter:
    """Load a drafter for a loaded target, in the target's dtype, on its device and in its linear mode.

    Args:
        name: drafter folder or hub name.
        target: what it will ride on.
        num_draft_tokens: proposals per step; by default what it was trained for.
        check_contract: refuse what does not fit the target by its config; turn off only to study a mismatch.
        check_fingerprint: replay the stored probe; turn off only to study a mismatch.
        offline: never touch the network.
        aux_hidden_stream: feed it another stream of the target than it was trained on, to compare the two.
    Raises:
        CheckpointError: missing, damaged, incomplete or unsupported files.
        CompatibilityError: it does not fit this target, or the target has no such stream; says in what.
        ConfigError: more draft tokens than it was trained to propose.
    """
    folder = locate_drafter(name, offline=offline)
    files = read_drafter(folder)
    contract = complete_contract(files.contract, target.contract)
    if num_draft_tokens is not None:
        _check_num_draft_tokens(num_draft_tokens, contract)
    if check_contract:
        check_fit(contract, target.contract)
        require_taps(target.model, contract.aux_hidden_stream)
    if aux_hidden_stream is not None:
        require_taps(target.model, aux_hidden_stream)
    token_counts_W = read_token_counts(folder, target.contract.vocab_size)
    calibration = read_calibration(folder)
    if calibration is None:
        _log.info(
            "%s has no calibration: the alarm knows no acceptance of its own to hold serving against, only the general "
            "limit; `paceline evaluate ... --calibrate` measures one",
            folder,
        )
    _compare_template(folder, target)
    weight = target.model.norm.weight
    drafter = empty_drafter(contract, weight.dtype, weight.device)
    destinations = drafter_destinations(contract)
    parameters = drafter.checkpoint_parameters()
    load_strict(parameters, files.source, destinations, ignored=files.ignored, copy=copy_weight)
    drafter.vocabulary.set_tables(files.draft_to_target, files.mask_embedding)
    shared = drafter.vocabulary.drop_copies(target.model.embed_tokens.weight, target.model.lm_head.weight)
    drafter.prepare_for_serving(target.linear_mode)
    if check_fingerprint:  # of the arithmetic that will serve
        _replay_stored(folder, target, drafter)
    if aux_hidden_stream not in (None, contract.aux_hidden_stream):  # after the replay, which is of its own stream
        _log.warning("it was trained on the stream %r and is fed another", contract.aux_hidden_stream)
        contract = drafter.contract = dataclasses.replace(contract, aux_hidden_stream=aux_hidden_stream)
    capture_ids = [int(capture_id(layer)) for layer in contract.target_layer_ids]
    _log.info("drafter %s: taps %s of the stream %r", folder.name, capture_ids, contract.aux_hidden_stream)
    if shared:
        _log.info("drafter %s: its %s is the target's, bit for bit, and shared", folder.name, " and ".join(shared))
    return LoadedDrafter(
        drafter,
        contract,
        num_draft_tokens or contract.num_draft_tokens,
        target.model,
        token_counts_W=token_counts_W,
        calibration=calibration,
    )


def _compare_template(folder: Path, target: LoadedTarget) -> None:
    """Warn where chats will be rendered otherwise than those that the drafter learned from, if it says with what."""
    file = folder / PROVENANCE_FILE
    trained_with = read_json(file).get(TEMPLATE_KEY) if file.is_file() else None
    is_text = isinstance(target.tokenizer, TextTokenizer)
    served_with = target.tokenizer.template_sha256 if is_text else None
    if trained_with is not None and trained_with != served_with:
        _log.warning(
            "%s was trained on chats of the template %.12s, %s renders them with %s: expect fewer accepted drafts",
            folder,
            trained_with,
            target.contract.name,
            "none" if served_with is None else f"{served_with:.12}",
        )


def _check_num_draft_tokens(asked: int, contract: DrafterContract) -> None:
    """A block has the rows it was trained with; a drafter that goes token by token goes on for as long as asked."""
    limit = contract.num_draft_tokens if contract.layout != "autoregressive" else asked
    if not 1 <= asked <= limit:
        raise ConfigError(
            f"{asked} draft tokens per step were asked for; the drafter was trained for 1 to "
            f"{contract.num_draft_tokens}",
            origin={"drafter": contract.origin},
            hint=f"at most {contract.num_draft_tokens} draft tokens per step",
        )


def _replay_stored(folder: Path, target: LoadedTarget, drafter: Drafter) -> None:
    stored = read_fingerprint(folder)
    if stored is None:
        _log.warning(
            "%s has no fingerprint: what its drafts depend on cannot be checked; `paceline check` tries without", folder
        )
        return
    replay(target.model, drafter, stored)
    if is_old(stored):
        _log.warning(
            "%s has a fingerprint of format 1, which covers taps and context features only: its RoPE, mask row, "
            "windows, layers and heads were not checked. `paceline check %s --target MODEL --record` scores them on "
            "prompts and, if they are right, records a fingerprint that covers all",
            folder,
            folder,
        )


def read_fingerprint(folder: Path) -> dict[str, Tensor] | None:
    """The fingerprint in a drafter's folder, or None where it has none.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / FINGERPRINT_FILE
    if not path.is_file():
        return None
    source = open_safetensors_file(path)
    return {name: source.load(name) for name in source.names()}


def write_fingerprint(folder: Path, fingerprint: Mapping[str, Tensor], target: LoadedTarget) -> None:
    """Put another fingerprint into a drafter's folder, and say in its provenance where it comes from.

    Args:
        folder: of a drafter.
        fingerprint: from `record_fingerprint`.
        target: that it was recorded with.
    Raises:
        CheckpointError: the provenance is no JSON object.
        CapacityError: the disk is full.
    """
    history = folder / PROVENANCE_FILE
    provenance = read_json(history) if history.is_file() else {}
    weight = target.model.norm.weight
    provenance["fingerprint"] = {
        "recorded_after_training": True,
        "target": target.contract.name,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": weight.device.type,
        "paceline": __version__,
        "torch": torch.__version__,
    }
    write_index(folder)  # first: without it some readers would take the fingerprint for weights
    save_safetensors(folder / FINGERPRINT_FILE, fingerprint, {})
    write_text_atomic(history, json.dumps(provenance, indent=2, allow_nan=False) + "\n")
