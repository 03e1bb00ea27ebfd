"""Which reader a drafter's config is for, and which writer a dialect has: plain tables, a new form is a new row.

The architecture string decides, or `speculators_model_type`; where one string has two meanings, `model_type` or the
presence of a key does. Never a value, and never a tensor name: those are only cross-checked, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import assistant, deepspec, eagle3, kimi, specforge, speculators, torchspec, zlab
from paceline.checkpoint.dialects.fields import check_own, check_tie
from paceline.checkpoint.dialects.tensors import canonical_names, check_tensors, file_name, has_module
from paceline.checkpoint.names import drafter_slots
from paceline.errors import CheckpointError

# "zlab" is the native layout of every family: z-lab's own for DFlash and DFlash2, and where z-lab has none, the one
# that most engines read (Qwen3DSparkModel, K3DSparkModel, LlamaForCausalLMEagle3) with what it lacks beside it
Dialect = Literal["zlab", "assistant", "speculators", "specforge", "torchspec", "deepspec", "kimi"]

_Read = Callable[[Mapping[str, Any], str, Collection[str]], DrafterContract]
_Write = Callable[[DrafterContract], dict[str, Any]]


@dataclass(frozen=True)
class _Form:
    """One meaning of an architecture string."""

    dialect: Dialect
    read: _Read
    model_types: tuple[str | None, ...]
    marker: str | None = None  # a key that must be there


_QWEN3, _LLAMA = (None, "qwen3"), (None, "llama")
_LLAMA_EAGLE3 = (
    _Form("zlab", partial(eagle3.read, is_qwen3=False, is_specforge=False), _LLAMA, marker=eagle3.ENGINE_KEY),
    _Form("specforge", partial(eagle3.read, is_qwen3=False, is_specforge=True), _LLAMA),
)
_QWEN3_EAGLE3 = (
    _Form("zlab", partial(eagle3.read, is_qwen3=True, is_specforge=False), _QWEN3, marker=eagle3.ENGINE_KEY),
    _Form("specforge", partial(eagle3.read, is_qwen3=True, is_specforge=True), _QWEN3),
)
# architecture -> its forms, the first that fits
_FORMS: Mapping[str, tuple[_Form, ...]] = {
    "DFlashDraftModel": (
        _Form("torchspec", torchspec.read, ("dflash",)),
        _Form("zlab", partial(zlab.read, family="dflash"), _QWEN3),
    ),
    "DFlash2DraftModel": (_Form("zlab", partial(zlab.read, family="dflash2"), _QWEN3),),
    "MuseGlimmerAssistantModel": (_Form("assistant", assistant.read, (None, "muse_glimmer_assistant")),),
    "Qwen3DSparkModel": (
        _Form("zlab", deepspec.read_dspark, _QWEN3, marker="dflash_config"),
        _Form("deepspec", deepspec.read_dspark, _QWEN3),
    ),
    "Qwen3Eagle3Model": (_Form("deepspec", deepspec.read_eagle3, _QWEN3),),
    "DSparkDraftModel": (_Form("specforge", specforge.read_dspark, ("qwen3",)),),
    "K3DSparkModel": (_Form("kimi", kimi.read, (None, "k3_dspark")),),
    "LlamaForCausalLMEagle3": _LLAMA_EAGLE3,
    "Eagle3LlamaForCausalLM": _LLAMA_EAGLE3,
    "Eagle3Qwen3ForCausalLM": _QWEN3_EAGLE3,
}
# recognised, so that a refusal can say what it is
_REFUSED: Mapping[str, str] = {
    "DFlash2BeamDraftModel": "DFlash2 for Beam targets",
    "LiLiCorrDraftModel": "LiLiCorr",
    "DFlashLagunaForCausalLM": "Laguna DFlash",
    "Qwen3XPressModel": "XPress",
    "Qwen3OmniDSparkModel": "DSpark for Qwen3-Omni",
    "Gemma4DSparkModel": "DSpark for Gemma 4",
    "MuseSparkDSparkModel": "DSpark for Muse Spark",
    "PeagleLlamaForCausalLM": "P-EAGLE",
    "PeagleQwen3ForCausalLM": "P-EAGLE",
    "PEagleDraftModel": "P-EAGLE",
    "DSparkDraftModel": "DSpark of DeepSeek-V4, unless its model_type is 'qwen3'",
    "DFlashSpeculator": "a speculator without speculators_model_type",
    "DSparkSpeculator": "a speculator without speculators_model_type",
    "Eagle3Speculator": "a speculator without speculators_model_type",
    "XPressSpeculator": "XPress",
    "PEagleSpeculator": "P-EAGLE",
}
_SIGNS_OF_A_DRAFTER = ("dflash_config", "eagle_config", speculators.MARKER)
# markers of DFlash variants inside `dflash_config` that keep its architecture string
_REFUSED_PROJECTORS: Mapping[str, str] = {"domino": "Domino of SpecForge"}

_WRITERS: Mapping[str, _Write] = {
    "assistant": assistant.write,
    "speculators": speculators.write,
    "specforge": specforge.write,
    "torchspec": torchspec.write,
    "deepspec": deepspec.write,
    "kimi": kimi.write,
}
_NATIVE: Mapping[str, _Write] = {
    "dflash": zlab.write,
    "dflash2": zlab.write,
    "dspark": deepspec.write_dspark,
    "eagle3": eagle3.write,
}


def is_drafter_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a drafter, of whatever kind, supported or not."""
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    known = isinstance(first, str) and (first in _FORMS or first in _REFUSED or "draft" in first.lower())
    return known or any(key in config for key in _SIGNS_OF_A_DRAFTER)


def detect_dialect(config: Mapping[str, Any], origin: str) -> Dialect:
    """The layout that a drafter's config is in.

    Args:
        config: the content of config.json.
        origin: the file, for messages.
    Raises:
        CheckpointError: it is no drafter's, or one of a family or layout that is not supported; both are named.
    """
    return _find_form(config, ConfigReader(config, origin)).dialect


def contract_from_config(config: Mapping[str, Any], origin: str, tensor_names: Iterable[str] = ()) -> DrafterContract:
    """Turn the content of a drafter's config.json into a contract.

    Args:
        config: the whole object, in any dialect.
        origin: the file, for messages and for `DrafterContract.origin`.
        tensor_names: names in the weights file, as stored. They say which tables the drafter brings along, and are
            cross-checked with the family; without them the config's word is taken.
    Returns:
        The contract. What a layout does not say about the target (depth, vocabulary) is 0. `has_mask_embedding` and
        `quantization` follow from files beside the config and are left off here.
    Raises:
        CheckpointError: the drafter's family or layout is not supported, a key is unknown, a needed field is missing,
            or two fields, or config and tensors, contradict.
    """
    reader = ConfigReader(config, origin)
    form = _find_form(config, reader)
    stored = list(tensor_names)
    names = frozenset(canonical_names(stored, origin).values())
    contract = form.read(config, origin, names)
    if names:
        check_tensors(contract, names)
    if form.dialect == "zlab" and contract.eagle3 is not None and contract.eagle3.norm_output:
        _refuse_midlayer(stored, reader)
    check_own(config, contract, reader)
    check_tie(config, contract, reader)
    return contract


def write_drafter_config(contract: DrafterContract, dialect: Dialect = "zlab") -> dict[str, Any]:
    """Write a contract as the content of a config.json.

    Every optional field is explicit: readers differ in their defaults. Weights are described as they are written, in
    `contract.dtype`; `quantization`, a note on how they were once stored, is not.

    Args:
        contract: the drafter.
        dialect: whose layout; "zlab" is the native one of the contract's family.
    Returns:
        An object that `contract_from_config` reads back to the same contract.
    Raises:
        CheckpointError: the layout has no words for something in the contract; the message lists what.
    """
    if dialect not in get_args(Dialect):
        raise CheckpointError(f"there is no dialect {dialect!r}; known are {', '.join(get_args(Dialect))}")
    if dialect != "zlab":
        return _WRITERS[dialect](contract)
    return kimi.write(contract) if _is_kimi(contract) else _NATIVE[contract.family](contract)


def file_names(contract: DrafterContract, dialect: Dialect = "zlab") -> dict[str, str]:
    """The names of a drafter's tensors in a file of a dialect.

    Args:
        contract: the drafter.
        dialect: whose layout; "zlab" is the native one of the contract's family.
    Returns:
        Canonical name to file name, for every slot. The tables `d2t` and `t2d` have no slot and one name everywhere.
    Raises:
        CheckpointError: the layout has no words for something in the contract; the message lists what.
    """
    write_drafter_config(contract, dialect)
    renaming: str = dialect
    if _is_kimi(contract):
        renaming = "kimi"
    elif dialect == "specforge" and contract.family == "eagle3":
        renaming = "midlayer"
    return {slot.name: file_name(slot.name, renaming) for slot in drafter_slots(contract)}


def _is_kimi(contract: DrafterContract) -> bool:
    """Latent DSpark has a layout of its own; latent DFlash2 is written as z-lab writes DFlash2."""
    return contract.latent is not None and contract.family == "dspark"


def _find_form(config: Mapping[str, Any], reader: ConfigReader) -> _Form:
    supported = f"supported are {', '.join(_FORMS)} and the speculators layout"
    if speculators.MARKER in config:
        return _Form("speculators", speculators.read, ())
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise reader.error(f"architectures is {architectures!r}, expected one; {supported}")
    found, model_type = architectures[0], config.get("model_type")
    inner = config.get("dflash_config")
    projector = str(inner.get("projector_type")) if isinstance(inner, Mapping) else ""
    if projector in _REFUSED_PROJECTORS:
        raise _not_supported(_REFUSED_PROJECTORS[projector], found, supported, reader)
    for form in _FORMS.get(found, ()):
        if model_type in form.model_types and (form.marker is None or config.get(form.marker) is not None):
            return form
    if found in _REFUSED:
        raise _not_supported(_REFUSED[found], found, supported, reader)
    if found in _FORMS:
        types = dict.fromkeys(kind for form in _FORMS[found] for kind in form.model_types if kind)
        raise reader.error(
            f"the drafter's architecture is {found} and its model_type is {model_type!r}; "
            f"supported is {' or '.join(repr(kind) for kind in types)}"
        )
    if not is_drafter_config(config):
        raise reader.error(
            f"the folder is a model of its own ({found}), not a drafter",
            hint="this folder as the target, and a drafter's folder as the drafter",
        )
    raise reader.error(f"the drafter's architecture {found!r} is not supported; {supported}")


def _not_supported(family: str, found: str, supported: str, reader: ConfigReader) -> CheckpointError:
    return reader.error(f"the drafter is of the family {family} ({found}), which is not supported; {supported}")


def _refuse_midlayer(stored: Collection[str], reader: ConfigReader) -> None:
    if has_module(stored, "midlayer"):
        raise reader.error(
            "norm_output is true, the taps are spelled as in vLLM's form and the tensors as in SpecForge's (midlayer); "
            "the two mean different things by norm_output",
            hint="writing the taps as SpecForge does, in eagle_config only, or the tensors as layers.0",
        )
