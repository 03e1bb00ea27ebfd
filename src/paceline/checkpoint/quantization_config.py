"""A model's `quantization_config`: which scheme each module's weight is stored in, and which modules are plain.

Three writers are read: `fp8` (DeepSeek and Qwen style), `compressed-tensors` and `modelopt`. As everywhere in this
package, a key that is not known is refused, since it might say how the numbers are to be read; other methods are
refused by name. What a config says of activations and of how scales were found has no effect on stored weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from paceline.checkpoint.config_reader import ConfigReader

WeightKind = Literal["fp8", "int8", "nvfp4", "mxfp4"]
Granularity = Literal["tensor", "channel", "block", "group"]

NVFP4_GROUP_SIZE = 16
MXFP4_GROUP_SIZE = 32
_ALL_LINEARS = "Linear"
_METHOD_KEYS: Mapping[str, frozenset[str]] = {
    "fp8": frozenset(
        {"quant_method", "activation_scheme", "fmt", "weight_block_size", "ignored_layers", "modules_to_not_convert"}
        | {"scale_fmt"}
    ),
    "compressed-tensors": frozenset(
        {"quant_method", "config_groups", "format", "ignore", "kv_cache_scheme", "quantization_status", "version"}
        | {"global_compression_ratio", "sparsity_config", "transform_config", "provider"}
    ),
    "modelopt": frozenset(
        {"quant_method", "quant_algo", "config_groups", "ignore", "exclude_modules", "group_size", "producer"}
        | {"kv_cache_scheme", "kv_cache_quant_algo"}
    ),
}
_WEIGHT_KEYS = frozenset(
    {"num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "dynamic", "actorder"}
    | {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
)
_GROUP_KEYS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_FORMATS: Mapping[str, tuple[WeightKind, ...]] = {
    "float-quantized": ("fp8",),
    "int-quantized": ("int8",),
    "naive-quantized": ("fp8", "int8"),
    "nvfp4-pack-quantized": ("nvfp4",),
    "mxfp4-pack-quantized": ("mxfp4",),
    "mixed-precision": ("fp8", "int8", "nvfp4", "mxfp4"),
}


@dataclass(frozen=True)
class WeightScheme:
    """How one module's weight is stored."""

    kind: WeightKind
    granularities: tuple[Granularity, ...]  # of its scales; the shape of the stored scale decides between several
    block: tuple[int, int] | None = None  # rows and columns that share a scale, for "block"

    def __str__(self) -> str:
        """For messages and for the contract."""
        if self.kind in ("nvfp4", "mxfp4"):
            return self.kind
        if self.block is not None:
            return f"{self.kind} per block of {self.block[0]}x{self.block[1]}"
        return f"{self.kind} per {' or '.join(self.granularities)}"


@dataclass(frozen=True)
class QuantizationPlan:
    """What a whole `quantization_config` says of stored weights."""

    groups: tuple[tuple[tuple[str, ...], WeightScheme], ...]  # module patterns, and what they are stored in
    ignored: tuple[str, ...]  # module patterns that are stored plainly

    def scheme_of(self, modules: Iterable[str]) -> WeightScheme | None:
        """The scheme of a weight, or None where no group names it.

        Args:
            modules: the module and, where it is a fused one, the modules that it was fused from.
        """
        for targets, scheme in self.groups:
            if any(target == _ALL_LINEARS or _matches(target, module) for target in targets for module in modules):
                return scheme
        return None

    def ignores(self, module: str) -> bool:
        """Whether a module is on the list of those stored plainly."""
        return any(_matches(pattern, module) for pattern in self.ignored)

    def __str__(self) -> str:
        """The schemes, for messages and for the contract."""
        return ", ".join(dict.fromkeys(str(scheme) for _, scheme in self.groups))


def read_quantization_config(config: Mapping[str, Any], *, origin: str) -> QuantizationPlan:
    """Read the `quantization_config` object of a config.json.

    Args:
        config: the object.
        origin: the file, for messages.
    Returns:
        Schemes by module pattern. Patterns are module names as the checkpoint spells them, with `*` or `?` as in a
        shell, or a regular expression after `re:`.
    Raises:
        CheckpointError: the method or scheme is not supported, or a key is unknown, missing or malformed.
    Source: config files of DeepSeek-V3, Qwen FP8, llm-compressor and Model Optimizer exports.
    """
    reader = ConfigReader(config, origin)
    method = reader.text("quant_method")
    if method not in _METHOD_KEYS:
        raise reader.error(
            f"quant_method {method!r} is not supported; supported are {', '.join(_METHOD_KEYS)}",
            hint="an export in bfloat16, FP8, INT8, NVFP4 or MXFP4",
        )
    _refuse_unknown(config, _METHOD_KEYS[method], "quantization_config", reader)
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if config.get(key) is not None:
            raise reader.error(f"{key} is {config[key]!r}; supported is null: the cache is not quantised")
    if method == "fp8":
        return _fp8(config, reader)
    return _compressed_tensors(config, reader) if method == "compressed-tensors" else _modelopt(config, reader)


def _fp8(config: Mapping[str, Any], reader: ConfigReader) -> QuantizationPlan:
    if config.get("fmt") not in (None, "e4m3"):
        raise reader.error(f"fmt is {config['fmt']!r}; supported is 'e4m3'")
    ignored = (*_patterns(config, "ignored_layers", reader), *_patterns(config, "modules_to_not_convert", reader))
    if config.get("weight_block_size") is None:
        scheme = WeightScheme("fp8", ("tensor", "channel"))
    else:
        scheme = WeightScheme("fp8", ("block",), _block(config["weight_block_size"], "weight_block_size", reader))
    return QuantizationPlan((((_ALL_LINEARS,), scheme),), ignored)


def _modelopt(config: Mapping[str, Any], reader: ConfigReader) -> QuantizationPlan:
    algorithm = reader.text("quant_algo").upper()
    ignored = (*_patterns(config, "ignore", reader), *_patterns(config, "exclude_modules", reader))
    if algorithm == "FP8":
        scheme = WeightScheme("fp8", ("tensor",))
    elif algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        scheme = WeightScheme("fp8", ("channel",))
    elif algorithm == "FP8_PB_WO":
        size = reader.whole("group_size")
        scheme = WeightScheme("fp8", ("block",), (size, size))
    elif algorithm in ("NVFP4", "W4A16_NVFP4"):
        group_size = reader.whole("group_size", default=NVFP4_GROUP_SIZE)
        if group_size != NVFP4_GROUP_SIZE:
            raise reader.error(f"group_size is {group_size}; NVFP4 has {NVFP4_GROUP_SIZE}")
        scheme = WeightScheme("nvfp4", ("group",))
    else:
        raise reader.error(
            f"quant_algo {config['quant_algo']!r} is not supported; supported are FP8, FP8_PER_CHANNEL_PER_TOKEN, "
            "FP8_PB_WO, NVFP4 and W4A16_NVFP4"
        )
    targets: tuple[str, ...] = (_ALL_LINEARS,)
    groups = config.get("config_groups")
    if groups is not None:
        only = next(iter(groups.values())) if isinstance(groups, Mapping) and len(groups) == 1 else None
        if not isinstance(only, Mapping):
            raise reader.error(f"config_groups is {groups!r}; supported is one group")
        targets = _patterns(only, "targets", reader) or targets
    return QuantizationPlan(((targets, scheme),), ignored)


def _compressed_tensors(config: Mapping[str, Any], reader: ConfigReader) -> QuantizationPlan:
    status = reader.text("quantization_status", default="compressed")
    if status != "compressed":
        raise reader.error(f"quantization_status is {status!r}; supported is 'compressed'")
    if config.get("transform_config"):
        raise reader.error("transform_config asks for rotations of weights and activations, which are not supported")
    sparsity = config.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format") not in (None, "dense")):
        raise reader.error(f"sparsity_config is {sparsity!r}; supported is 'dense'")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise reader.error(f"config_groups is {groups!r}, expected an object with at least one group")
    read = tuple(_group(f"config_groups.{name}", group, config.get("format"), reader) for name, group in groups.items())
    return QuantizationPlan(read, _patterns(config, "ignore", reader))


def _group(
    place: str, group: object, file_format: object, reader: ConfigReader
) -> tuple[tuple[str, ...], WeightScheme]:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise reader.error(f"{place} is {group!r}, expected an object with `weights`")
    _refuse_unknown(group, _GROUP_KEYS, place, reader)
    targets = _patterns(group, "targets", reader)
    if not targets:
        raise reader.error(f"{place}.targets is missing")
    weights = group["weights"]
    _refuse_unknown(weights, _WEIGHT_KEYS, f"{place}.weights", reader)
    for key, allowed in {"symmetric": (None, True), "dynamic": (None, False), "actorder": (None, False)}.items():
        if weights.get(key) not in allowed:
            raise reader.error(f"{place}.weights.{key} is {weights[key]!r}; supported is {allowed[1]}")
    scheme = _weight_scheme(place, weights, reader)
    stored = str(group.get("format") or file_format)
    if stored not in _FORMATS or scheme.kind not in _FORMATS[stored]:
        raise reader.error(
            f"{place}: {scheme} in the format {stored!r} is not supported; supported formats are {', '.join(_FORMATS)}"
        )
    return targets, scheme


def _weight_scheme(place: str, weights: Mapping[str, Any], reader: ConfigReader) -> WeightScheme:
    kind, strategy = (weights.get("type"), weights.get("num_bits")), weights.get("strategy")
    if kind in (("float", 8), ("int", 8)):
        name: WeightKind = "fp8" if kind[0] == "float" else "int8"
        if strategy == "tensor":
            return WeightScheme(name, ("tensor",))
        if strategy == "channel":
            return WeightScheme(name, ("channel",))
        if strategy == "block":
            return WeightScheme(name, ("block",), _block(weights.get("block_structure"), "block_structure", reader))
    if kind == ("float", 4) and strategy == "tensor_group" and weights.get("group_size") == NVFP4_GROUP_SIZE:
        return WeightScheme("nvfp4", ("group",))
    if kind == ("float", 4) and strategy == "group" and weights.get("group_size") == MXFP4_GROUP_SIZE:
        return WeightScheme("mxfp4", ("group",))
    raise reader.error(
        f"{place} stores weights as {kind[0]!r} of {kind[1]!r} bits by {strategy!r}, group size "
        f"{weights.get('group_size')!r}; supported are 8-bit float and int by tensor, channel or block, NVFP4 and MXFP4"
    )


def _block(value: object, key: str, reader: ConfigReader) -> tuple[int, int]:
    if not isinstance(value, Sequence) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise reader.error(f"{key} is {value!r}, expected two positive numbers, rows and columns")
    return int(value[0]), int(value[1])


def _patterns(config: Mapping[str, Any], key: str, reader: ConfigReader) -> tuple[str, ...]:
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(pattern, str) for pattern in value):
        raise reader.error(f"{key} is {value!r}, expected a list of module names")
    for pattern in value:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise reader.error(f"{key} has {pattern!r}, which is no regular expression: {error}") from error
    return tuple(value)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatchcase(module, pattern)


def _refuse_unknown(config: Mapping[str, Any], known: frozenset[str], place: str, reader: ConfigReader) -> None:
    unknown = sorted(set(config).difference(known))
    if unknown:
        raise reader.error(f"{place} has unknown keys {', '.join(unknown[:8])}: they might say how weights are stored")
