"""Tensor names of each layout, turned into canonical ones and back, and what they give away of the family.

Canonical are the names of the z-lab layout (`checkpoint/names.py`). Names are compared by whole path components, never
by substrings: `up_proj` and `gate_proj` also occur inside heads of other families.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.names import drafter_slots
from paceline.errors import CheckpointError

D2T, T2D = (
    "d2t",
    "t2d",
)  # offsets to target ids [draft vocabulary], and which target ids are drafted [target vocabulary]

# first components in a file -> first components of the canonical name
_TO_CANONICAL: Mapping[tuple[str, ...], tuple[str, ...]] = MappingProxyType(
    {
        ("midlayer",): ("layers", "0"),  # EAGLE-3 of SpecForge and SGLang
        ("context_proj",): ("fc",),  # TorchSpec, K3
        ("context_norm",): ("hidden_norm",),
        ("final_norm",): ("norm",),
        ("encoder", "fc"): ("fc",),  # Hugging Face assistant
        ("encoder", "output_norm_enc"): ("hidden_norm",),
        ("logit_head", "markov_head"): ("markov_head",),  # older SpecForge
        ("logit_head", "confidence_head"): ("confidence_head",),
    }
)
# projections that some writers stack, and their parts in row order
_QKV_A = ("q_a_proj", "kv_a_proj_with_mqa")
_FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj": _QKV_A,
        "fused_qkv_a": _QKV_A,
    }
)
_Renaming = Mapping[tuple[str, ...], tuple[str, ...]]
_TORCHSPEC: _Renaming = {("fc",): ("context_proj",), ("hidden_norm",): ("context_norm",), ("norm",): ("final_norm",)}
_FROM_CANONICAL: Mapping[str, _Renaming] = MappingProxyType(
    {
        "torchspec": _TORCHSPEC,
        "kimi": _TORCHSPEC,
        "assistant": {("fc",): ("encoder", "fc"), ("hidden_norm",): ("encoder", "output_norm_enc")},
        "midlayer": {("layers", "0"): ("midlayer",)},
    }
)
# copies of the target's, and tables that follow from the config
_COPIES = frozenset({"verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq"})


def canonical_name(name: str) -> str:
    """The canonical name of a file's tensor; a name that no layout renames is its own."""
    return _with_prefix(name, _TO_CANONICAL)


def canonical_names(names: Iterable[str], origin: str) -> dict[str, str]:
    """File name to canonical name.

    Raises:
        CheckpointError: two tensors of the file stand for one.
    """
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        found[name] = canonical_name(name)
        if found[name] in taken:
            raise CheckpointError(
                f"the tensors {taken[found[name]]} and {name} both stand for {found[name]}", origin={"file": origin}
            )
        taken[found[name]] = name
    return found


def file_name(canonical: str, renaming: str) -> str:
    """The name of a canonical tensor in a file.

    Args:
        canonical: as in `checkpoint/names.py`.
        renaming: "torchspec", "kimi", "assistant", "midlayer", or anything else for no renaming.
    """
    return _with_prefix(canonical, _FROM_CANONICAL.get(renaming, {}))


def has_module(names: Collection[str], *path: str) -> bool:
    """Whether any tensor lies at or under a module, given by its whole first components."""
    wanted = ".".join(path)
    return any(name == wanted or name.startswith(f"{wanted}.") for name in names)


def fused_parts(contract: DrafterContract, names: Collection[str]) -> dict[str, list[tuple[str, int]]]:
    """Fused projections of a file and the canonical parts that their rows are.

    Args:
        contract: for the number of layers and the sizes.
        names: of the file, not renamed.
    Returns:
        Name of a fused tensor to (name of a part, rows), in row order; only those that the file has.
    Source: rows of `qkv_proj` are q, k, v; those of `gate_up_proj` are gate, up; those of `fused_qkv_a_proj`, in
        latent attention, are q_a, kv_a.
    """
    heights: dict[str, int] = {slot.name: slot.shape[0] for slot in drafter_slots(contract)}
    fused: dict[str, list[tuple[str, int]]] = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        stem, _, projection = module.rpartition(".")
        parts = _FUSED.get(projection)
        if parts is None or kind not in ("weight", "weight_packed", "bias"):
            continue
        kind = "weight" if kind == "weight_packed" else kind  # as its numbers are called once they are unpacked
        apart = [f"{stem}.{part}.{kind}" for part in parts]
        if all(canonical_name(part) in heights for part in apart):
            fused[f"{module}.{kind}"] = [(part, heights[canonical_name(part)]) for part in apart]
    return fused


def ignored_names(contract: DrafterContract, names: Collection[str]) -> frozenset[str]:
    """Canonical names that may be in a file and that no module reads: vocabulary tables, copies, rotary tables."""
    rotary = {f"layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(contract.num_layers)}
    return frozenset(name for name in names if name in {D2T, T2D} | _COPIES | rotary)


def check_tensors(contract: DrafterContract, names: Collection[str]) -> None:
    """Refuse a file whose tensors belong to another drafter than the config describes, by name.

    Args:
        contract: as the config says.
        names: canonical names of the file.
    Raises:
        CheckpointError: a part is stored that the config does not have, or the reverse.
    """
    where = {"config": contract.origin}
    for sign, family in _FOREIGN.items():
        if has_module(names, sign):
            raise CheckpointError(
                f"the config describes {_spoken(contract)}, and the weights have {sign}, which is {family}'s",
                origin=where,
            )
    parts = [set(name.split(".")) for name in names]
    for part, is_promised, key in _PARTS:
        spellings = {part, *(fused for fused, apart in _FUSED.items() if part in apart)}
        is_stored, promised = any(spellings & path for path in parts), is_promised(contract)
        if is_stored and not promised:
            raise CheckpointError(
                f"the weights have {part}, and the config describes {_spoken(contract)} without it ({key})",
                origin=where,
                hint="the config.json that these weights were exported with",
            )
        if promised and not is_stored:
            raise CheckpointError(
                f"the config describes {_spoken(contract)} with {part} ({key}), and the weights do not have it",
                origin=where,
                hint="the weights that belong to this config.json",
            )


_FOREIGN: Mapping[str, str] = MappingProxyType(
    {
        "mask_hidden": "P-EAGLE",
        "lilicorr": "LiLiCorr",
        "xpress_head": "XPress",
        "refiner_head": "XPress",
        "prefix_gru": "Domino",
        "embed_proj": "Domino",
        "logit_head": "Domino",  # what is left of it once Markov and confidence heads are renamed
        "aux_hidden_norms": "Laguna DFlash",
        "mtp": "DSpark of DeepSeek-V4",
    }
)
_Promise = Callable[[DrafterContract], bool]
_PARTS: tuple[tuple[str, _Promise, str], ...] = (
    ("candidate_selector", lambda c: c.selector is not None, "the architecture, selector_rank"),
    ("attention_conv", lambda c: c.convolution is not None, "the architecture, conv_kernel_size"),
    ("mlp_conv", lambda c: c.convolution is not None, "the architecture, conv_kernel_size"),
    ("markov_head", lambda c: c.markov is not None, "markov_rank"),
    ("confidence_head", lambda c: c.confidence is not None, "enable_confidence_head"),
    ("kv_a_proj_with_mqa", lambda c: c.latent is not None, "kv_lora_rank"),
    ("fc_norm", lambda c: c.has_tap_norm, "fc_norm"),
    ("input_norm", lambda c: c.eagle3 is not None and c.eagle3.norm_before_fc, "norm_before_fc"),
    ("q_norm", lambda c: c.has_qk_norm and c.latent is None, "the architecture"),
    ("attention_sink_bias", lambda c: c.has_attention_sink, "attention_sink_bias"),
    ("g_proj", lambda c: False, "Laguna's output gate is not supported"),
)


def _spoken(contract: DrafterContract) -> str:
    names = {"dflash": "a DFlash drafter", "dflash2": "a DFlash2 drafter", "dspark": "a DSpark drafter"}
    return names.get(contract.family, "an EAGLE-3 drafter")


def _with_prefix(name: str, renamings: Mapping[tuple[str, ...], tuple[str, ...]]) -> str:
    components = tuple(name.split("."))
    for old, new in renamings.items():
        if components[: len(old)] == old and len(components) > len(old):
            return ".".join((*new, *components[len(old) :]))
    return name
