"""Quantised weights as plain float32 tensors, dequantised one at a time as they are read.

A scale on the wrong rows, or left out, costs acceptance without any error, so names, shapes and the config must agree
before the first value is read. A drafter is read by its own `quantization_config`, never by its target's. Scales of
activations are not used: the model computes in its own dtype.

On disk, for o output rows (of a fused tensor: the rows of all its parts) and i inputs:

    per tensor   `weight` [o, i]; `weight_scale` [] or [1], or one for each part of a fused tensor; w = code * scale
    per channel  `weight` [o, i]; `weight_scale` [o, 1]; w = code * scale
    per block    `weight` [o, i]; `weight_scale_inv` or `weight_scale`, one for each block, the last row and column of
                 blocks may be ragged; w = code * scale, for `weight_scale_inv` as well, despite its name
    NVFP4        `weight` or `weight_packed` uint8 [o, i/2], two E2M1 codes to a byte, the low nibble first;
                 `weight_scale` float8 [o, i/16]; and one factor for all, or one for each part:
                 `weight_scale_2` (Model Optimizer) multiplies; w = code * scale * factor
                 `weight_global_scale` (compressed-tensors) is its reciprocal; w = code * scale / factor
    MXFP4        `weight_packed` uint8 [o, i/2] as for NVFP4; `weight_scale` uint8 [o, i/32], the exponent of a power of
                 two plus 127 (E8M0); w = code * 2^(scale - 127)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.quantization_config import (
    MXFP4_GROUP_SIZE,
    NVFP4_GROUP_SIZE,
    Granularity,
    QuantizationPlan,
    WeightKind,
    WeightScheme,
    read_quantization_config,
)
from paceline.checkpoint.weights import FLOAT_DTYPES, TensorSource, cut, load_part
from paceline.errors import CheckpointError

Parts = Sequence[tuple[str, int]]  # names and numbers of rows of what a fused tensor holds, in row order

_WEIGHT, _PACKED, _SCALE, _SCALE_INV = "weight", "weight_packed", "weight_scale", "weight_scale_inv"
_FACTOR, _DIVISOR = "weight_scale_2", "weight_global_scale"
_SCALES = (_SCALE, _SCALE_INV, _FACTOR, _DIVISOR)
_ACTIVATION_SCALES = ("input_scale", "input_global_scale")
# parts of names that belong to schemes which are not read here
_OTHER_SCHEMES: Mapping[str, str] = {
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "g_idx": "GPTQ",
    "weight_g_idx": "GPTQ",
    "weight_shape": "packed integers of compressed-tensors",
    "weight_zero_point": "asymmetric integers",
    "SCB": "bitsandbytes",
    "absmax": "bitsandbytes",
    "quant_state": "bitsandbytes",
}
_SCALE_LIKE = re.compile(r"(^|_)(scales?|zero_points?|zeros)(_inv|_\d+)?$")
# read row by row or multiplied in full precision; no writer may have quantised them
ALWAYS_PLAIN = ("hidden_projection", "predecessor_codebook", "successor_codebook", "base_kernel", "markov_w1")
_CODE_DTYPE: Mapping[WeightKind, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "nvfp4": torch.uint8,
    "mxfp4": torch.uint8,
}
_GROUP_SIZES: Mapping[WeightKind, int] = {"nvfp4": NVFP4_GROUP_SIZE, "mxfp4": MXFP4_GROUP_SIZE}  # two codes to a byte
_CODE_DTYPES = (
    *_CODE_DTYPE.values(),
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_NO_PARTS: Mapping[str, Parts] = MappingProxyType({})


def open_dequantized(
    source: TensorSource,
    quantization_config: Mapping[str, Any] | None,
    *,
    origin: str,
    fused: Mapping[str, Parts] = _NO_PARTS,
) -> tuple[TensorSource, str | None]:
    """Present a model's file as plain tensors, whatever it is stored in.

    Args:
        source: the file, under its own names.
        quantization_config: that object of the model's own config.json, or None.
        origin: the config file, for messages.
        fused: name of a fused `weight` (`...qkv_proj.weight`) to the names and rows of its parts, in row order; entries
            without a tensor are left alone. It says which rows each of several scales is for; fused tensors stay fused.
    Returns:
        A lazy source in which a quantised weight is float32 under `....weight`, and everything else is as stored;
        scales of quantised modules are not among its names. Its `load` raises CheckpointError for a tensor in a
        quantised dtype that nothing gives a scale to, and for scales that are negative, NaN or infinite.
        What the weights were stored in (`fp8 per channel`), or None.
    Raises:
        CheckpointError: the scheme is not supported; config and tensors disagree on whether there is one; a scale is
            missing, left over or misshapen; or a part that must stay in the model's dtype is quantised.
    """
    names = source.names()
    _refuse_other_schemes(names, source)
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        if kind in _SCALES or kind == _PACKED:
            modules.setdefault(module, {})[kind] = name
    plan = None if quantization_config is None else read_quantization_config(quantization_config, origin=origin)
    if (plan is None) == bool(modules):
        raise _disagreement(plan, modules, source, origin)
    weights: dict[str, _QuantizedWeight] = {}
    hidden: set[str] = set()
    if plan is not None:
        for module, found in modules.items():
            present = {kind: f"{module}.{kind}" for kind in (_WEIGHT, *_ACTIVATION_SCALES)}
            found |= {kind: name for kind, name in present.items() if name in names}
            hidden.update(found.values())
            weights[f"{module}.{_WEIGHT}"] = _plan_weight(module, found, plan, source, fused.get(f"{module}.{_WEIGHT}"))
    left_over = [name for name in names if name not in hidden and _SCALE_LIKE.search(name.rpartition(".")[2])]
    if left_over:
        raise _refusal(f"scales of no quantised weight: {_listed(left_over)}", source)
    return _DequantizedSource(source, weights, hidden), None if plan is None else str(plan)


@dataclass(frozen=True)
class _QuantizedWeight:
    """One stored weight and how to turn it into numbers."""

    code_name: str
    scale_names: Mapping[str, str]  # kind of scale to tensor name
    kind: WeightKind
    granularity: Granularity
    shape: tuple[int, ...]  # of the numbers, not of the codes
    part_rows: tuple[int, ...]  # of a fused tensor; the whole height of any other
    block: tuple[int, int] | None


class _DequantizedSource:
    """The file with its quantised weights as float32 and without their scales."""

    def __init__(self, source: TensorSource, weights: Mapping[str, _QuantizedWeight], hidden: set[str]) -> None:
        self._source = source
        self._weights = dict(weights)
        of_code = {weight.code_name: name for name, weight in weights.items()}
        self._names = [of_code.get(name, name) for name in source.names() if name in of_code or name not in hidden]

    @property
    def origin(self) -> str:
        return self._source.origin

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights[name].shape if name in self._weights else self._source.shape(self._known(name))

    def load(self, name: str) -> Tensor:
        if name in self._weights:
            return _dequantize(self._weights[name], self._source)
        return self._plain(name, self._source.load(self._known(name)))

    def load_part(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None) -> Tensor:
        if name in self._weights:  # scales may span what is cut
            return cut(self.load(name), rows, columns)
        return self._plain(name, load_part(self._source, self._known(name), rows, columns))

    def _plain(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype in _CODE_DTYPES:
            raise _refusal(
                f"tensor {name} is stored as {tensor.dtype} and has no scale", self._source, hint="a complete export"
            )
        return tensor

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise CheckpointError(f"{self.origin} has no tensor {name}")
        return name


def _plan_weight(
    module: str, found: Mapping[str, str], plan: QuantizationPlan, source: TensorSource, parts: Parts | None
) -> _QuantizedWeight:
    """Check one module against the config, from names and shapes alone."""
    modules = [module, *(name.removesuffix(f".{_WEIGHT}") for name, _ in parts or ())]
    plain = [name for name in module.split(".") if name in ALWAYS_PLAIN]
    if plain:
        raise _refusal(f"{module} is quantised; {plain[0]} must be stored in the model's dtype", source)
    ignored = [name for name in modules if plan.ignores(name)]
    if ignored:
        raise _refusal(f"{module} has scales, and the quantization_config lists {ignored[0]} as stored plainly", source)
    scheme = plan.scheme_of(modules)
    if scheme is None:
        raise _refusal(f"{module} has scales, and no group of the quantization_config names it", source)
    codes = [kind for kind in (_WEIGHT, _PACKED) if kind in found]
    if len(codes) != 1 or (codes == [_PACKED] and scheme.kind not in _GROUP_SIZES):
        stored = " and ".join(codes) or "no weight"
        raise _refusal(f"{module} holds {stored} beside {_listed(sorted(found))}, which is not {scheme}", source)
    stored_shape = source.shape(found[codes[0]])
    if len(stored_shape) != 2:
        raise _refusal(f"{module} is quantised and {list(stored_shape)}; only matrices may be", source)
    shape = (stored_shape[0], stored_shape[1] * (2 if scheme.kind in _GROUP_SIZES else 1))
    rows = tuple(height for _, height in parts) if parts else (shape[0],)
    if sum(rows) != shape[0]:
        raise _refusal(f"{module} has {shape[0]} rows; its parts have {sum(rows)}, {list(rows)}", source)
    scale_names = {kind: name for kind, name in found.items() if kind in _SCALES}
    granularity = _check_scales(module, scheme, scale_names, shape, rows, source)
    return _QuantizedWeight(found[codes[0]], scale_names, scheme.kind, granularity, shape, rows, scheme.block)


def _check_scales(
    module: str,
    scheme: WeightScheme,
    scale_names: Mapping[str, str],
    shape: tuple[int, int],
    rows: tuple[int, ...],
    source: TensorSource,
) -> Granularity:
    """Which of the scheme's granularities the stored scales have."""
    legal = [{_SCALE}]
    if scheme.kind == "nvfp4":
        legal = [{_SCALE, _FACTOR}, {_SCALE, _DIVISOR}]
    elif scheme.block is not None:
        legal = [{_SCALE}, {_SCALE_INV}]
    if set(scale_names) not in legal:
        wanted = " or ".join(" and ".join(sorted(kinds)) for kinds in legal)
        raise _refusal(f"{module} has {_listed(sorted(scale_names)) or 'no scale'}; {scheme} needs {wanted}", source)
    height, width = shape
    single = [(), (1,), *([(len(rows),)] if len(rows) > 1 else [])]
    group_size = _GROUP_SIZES.get(scheme.kind, 1)
    if width % group_size:
        raise _refusal(f"{module} has {width} inputs; {scheme.kind.upper()} groups have {group_size}", source)
    expected: dict[Granularity, list[tuple[int, ...]]] = {
        "tensor": single,
        "channel": [(height, 1)],
        "group": [(height, width // group_size)],
    }
    if scheme.block is not None:
        expected["block"] = [(-(-height // scheme.block[0]), -(-width // scheme.block[1]))]
        uneven = [part for part in rows[:-1] if part % scheme.block[0]]
        if uneven:
            raise _refusal(
                f"{module} is fused from parts of {list(rows)} rows, and blocks have {scheme.block[0]}: a block would "
                "reach across two parts",
                source,
            )
    for kind, name in scale_names.items():
        is_factor = kind in (_FACTOR, _DIVISOR)
        shapes = single if is_factor else [found for key in scheme.granularities for found in expected[key]]
        if source.shape(name) not in shapes:
            wanted = " or ".join(str(list(found)) for found in shapes)
            raise _refusal(f"{name} is {list(source.shape(name))}; {scheme} of {list(shape)} has {wanted}", source)
    stored = source.shape(next(name for kind, name in scale_names.items() if kind in (_SCALE, _SCALE_INV)))
    return next(key for key in scheme.granularities if stored in expected[key])


def _dequantize(weight: _QuantizedWeight, source: TensorSource) -> Tensor:
    codes = source.load(weight.code_name)
    if codes.dtype != _CODE_DTYPE[weight.kind]:
        raise _refusal(f"{weight.code_name} is {codes.dtype}; {weight.kind} is {_CODE_DTYPE[weight.kind]}", source)
    scales = {kind: _load_scale(kind, name, weight.kind, source) for kind, name in weight.scale_names.items()}
    if weight.kind == "nvfp4":
        factors = scales[_SCALE]
        if _FACTOR in scales:
            factors = factors * _by_row(scales[_FACTOR], weight.part_rows)
        else:
            factors = factors / _by_row(scales[_DIVISOR], weight.part_rows)
        return _scale_groups(_unpack_e2m1(codes), factors)
    if weight.kind == "mxfp4":
        return _scale_groups(_unpack_e2m1(codes), scales[_SCALE])
    scale = scales[_SCALE] if _SCALE in scales else scales[_SCALE_INV]
    if weight.granularity == "block" and weight.block is not None:
        return _scale_blocks(codes.float(), scale, weight.block)
    return codes.float().mul_(scale if weight.granularity == "channel" else _by_row(scale, weight.part_rows))


def _load_scale(kind: str, name: str, weight_kind: WeightKind, source: TensorSource) -> Tensor:
    stored = source.load(name)
    allowed: tuple[torch.dtype, ...] = (*FLOAT_DTYPES, torch.float8_e8m0fnu)
    if weight_kind == "mxfp4":
        allowed = (torch.uint8, torch.float8_e8m0fnu)
    elif weight_kind == "nvfp4" and kind == _SCALE:
        allowed = (torch.float8_e4m3fn,)
    if stored.dtype not in allowed:
        raise _refusal(f"{name} is {stored.dtype}, expected {' or '.join(str(dtype) for dtype in allowed)}", source)
    scale = (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).float()
    # a group or a channel of zeros may have a scale of zero; a factor of zero would erase the whole weight
    is_sound = scale > 0 if kind in (_FACTOR, _DIVISOR) else scale >= 0
    if not bool((is_sound & scale.isfinite()).all()):
        raise _refusal(f"{name} holds a value that is no scale: negative, NaN, infinite or zero", source)
    return scale


def _by_row(scale: Tensor, part_rows: tuple[int, ...]) -> Tensor:
    """One scale per part as a column over the rows of a fused tensor, [o, 1]; a single scale as [1, 1]."""
    flat = scale.reshape(-1)
    if flat.numel() == 1:
        return flat.reshape(1, 1)
    return flat.repeat_interleave(torch.tensor(part_rows)).unsqueeze(1)


def _scale_blocks(values: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    height, width = block
    for index, first in enumerate(range(0, values.shape[0], height)):
        values[first : first + height] *= scale[index].repeat_interleave(width)[: values.shape[1]]
    return values


def _scale_groups(values: Tensor, factors: Tensor) -> Tensor:
    rows, width = values.shape
    grouped = values.view(rows, factors.shape[1], -1)
    return grouped.mul_(factors.unsqueeze(-1)).view(rows, width)


def _unpack_e2m1(packed: Tensor) -> Tensor:
    """Bytes [o, i/2] to float32 [o, i]; column 2j is the low nibble of byte j."""
    table = torch.tensor(_E2M1)
    codes = torch.stack((packed & 0x0F, packed >> 4), dim=-1)
    return table[codes.view(packed.shape[0], -1).int()]


def _refuse_other_schemes(names: Iterable[str], source: TensorSource) -> None:
    for name in names:
        sign = next((part for part in name.split(".") if part in _OTHER_SCHEMES), None)
        if sign is not None:
            raise _refusal(
                f"the weights are quantised as {_OTHER_SCHEMES[sign]} (tensor {name}), which is not supported",
                source,
                hint="an export in bfloat16, FP8, INT8, NVFP4 or MXFP4",
            )


def _disagreement(
    plan: QuantizationPlan | None, modules: Mapping[str, Mapping[str, str]], source: TensorSource, origin: str
) -> CheckpointError:
    places = {"weights": source.origin, "config": origin}
    if plan is not None:
        return CheckpointError(f"the quantization_config says {plan}, and no weight has a scale", origin=places)
    scales = [name for found in modules.values() for name in found.values()]
    return CheckpointError(
        f"the weights are quantised ({_listed(scales)}), and the config has no quantization_config",
        origin=places,
        hint="the config.json that the drafter was exported with; its target's does not apply to it",
    )


def _refusal(message: str, source: TensorSource, *, hint: str | None = None) -> CheckpointError:
    return CheckpointError(message, origin={"weights": source.origin}, hint=hint)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
