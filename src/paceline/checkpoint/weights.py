"""Tensors in files: lazy reading of safetensors, strict loading into parameters, atomic writing.

Verification hides a lost or random weight, so nothing here is lenient: `load_strict` checks names, shapes and coverage
of every parameter before it copies the first value, and lists all that is wrong at once. Whatever is written appears
under its final name only when it is complete and on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.checkpoint.locate import read_json
from paceline.errors import CapacityError, CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAX_LISTED = 8
_PIECE = 1 << 18  # elements, a megabyte of float32


class TensorSource(Protocol):
    """Named tensors that can be read one at a time."""

    @property
    def origin(self) -> str:
        """The file or folder that is read, for messages."""
        ...

    def names(self) -> list[str]:
        """All tensor names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def load(self, name: str) -> Tensor:
        """The tensor in its stored dtype, on the CPU."""
        ...


@runtime_checkable
class ReadsParts(Protocol):
    """A source that can read a part of a tensor without the rest of it."""

    def load_part(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None) -> Tensor:
        """What `load_part` gives."""
        ...


def load_part(source: TensorSource, name: str, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> Tensor:
    """Some rows of a tensor, and of these some columns; of the file no more is read than that, where it can be done.

    Args:
        source: any.
        name: of the tensor.
        rows: half-open.
        columns: half-open, along the second dimension; None is all.
    """
    if isinstance(source, ReadsParts):
        return source.load_part(name, rows, columns)
    return cut(source.load(name), rows, columns)


def cut(tensor: Tensor, rows: tuple[int, int], columns: tuple[int, int] | None) -> Tensor:
    """A view of a part."""
    part = tensor[rows[0] : rows[1]]
    return part if columns is None else part[:, columns[0] : columns[1]]


CopyIfFinite = Callable[[Tensor, Tensor], bool]  # fills the first with the second; whether all that arrived is finite


@dataclass(frozen=True)
class Destination:
    """Where a checkpoint tensor goes."""

    parameter: str
    rows: tuple[int, int] | None = None  # half-open row range inside a fused parameter; None is the whole of it


class _SafetensorsSource:
    """Tensors of one or more safetensors files, opened once and read lazily."""

    def __init__(self, origin: str, file_of: Mapping[str, Path], handles: Mapping[Path, Any]) -> None:
        self.origin = origin
        self._file_of = dict(file_of)
        self._handles = dict(handles)

    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    def load(self, name: str) -> Tensor:
        return self._read(name, lambda handle: handle.get_tensor(name))

    def load_part(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None) -> Tensor:
        places: tuple[slice, ...] = (slice(*rows),) if columns is None else (slice(*rows), slice(*columns))
        return self._read(name, lambda handle: handle.get_slice(name)[places])

    def _read(self, name: str, read: Callable[[Any], Tensor]) -> Tensor:
        from safetensors import SafetensorError

        try:
            return read(self._handle(name))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{self._file_of[name]}: tensor {name} cannot be read: {error}") from error

    def _handle(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"{self.origin} has no tensor {name}")
        return self._handles[self._file_of[name]]


def open_safetensors(folder: Path) -> TensorSource:
    """Open the weights of a model folder.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and the shards that it names.
    Returns:
        A lazy source; opening reads only the headers.
    Raises:
        CheckpointError: no weights, a missing shard, a truncated or corrupt file, or an index and shards that disagree.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist")
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if index.is_file():
        return _open_shards(folder, index, has_single=single.is_file())
    if not single.is_file():
        others = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f" (found {', '.join(others[:_MAX_LISTED])}, which is not read here)" if others else ""
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}")
    return open_safetensors_file(single)


def open_safetensors_file(path: Path) -> TensorSource:
    """Open one safetensors file, such as `fingerprint.safetensors`.

    Args:
        path: the file.
    Returns:
        A lazy source; opening reads only the header.
    Raises:
        CheckpointError: the file is missing, truncated or corrupt.
    """
    handle = _open_file(path)
    return _SafetensorsSource(str(path), dict.fromkeys(handle.keys(), path), {path: handle})


def read_safetensors_metadata(path: Path) -> dict[str, str]:
    """The string metadata in a safetensors header.

    Args:
        path: the file.
    Returns:
        Metadata; empty when the file has none.
    Raises:
        CheckpointError: the file is missing, truncated or corrupt.
    """
    return dict(_open_file(path).metadata() or {})


def _open_file(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({size} bytes): {error}", hint="a fresh copy of the file"
        ) from error


def _open_shards(folder: Path, index: Path, *, has_single: bool) -> TensorSource:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no usable weight_map (tensor name to file name)")
    shards = sorted(set(weight_map.values()))
    if has_single and SINGLE_FILE not in shards:
        raise CheckpointError(
            f"{folder} has both {SINGLE_FILE} and {INDEX_FILE}, and the index does not name the former",
            hint="removing the one that is out of date",
        )
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {_listed(outside)}")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names {len(shards)} files, of which {len(missing)} do not exist: {_listed(missing)}",
            hint="downloading the model again",
        )
    handles = {folder / shard: _open_file(folder / shard) for shard in shards}
    file_of = {name: folder / shard for name, shard in weight_map.items()}
    stored: dict[str, list[Path]] = {}
    for path, handle in handles.items():
        for name in handle.keys():  # noqa: SIM118
            stored.setdefault(name, []).append(path)
    wrong = [name for name, path in file_of.items() if path not in stored.get(name, ())]
    unlisted = [name for name in stored if name not in file_of]
    twice = [name for name, paths in stored.items() if len(paths) > 1]
    if wrong or unlisted or twice:
        parts = [f"not in the file that it names: {_listed(wrong)}"] if wrong else []
        parts += [f"stored but not named: {_listed(unlisted)}"] if unlisted else []
        parts += [f"stored in several files: {_listed(twice)}"] if twice else []
        raise CheckpointError(f"{index} and its files disagree: {'; '.join(parts)}")
    return _SafetensorsSource(str(folder), file_of, handles)


def copy_if_finite(view: Tensor, tensor: Tensor) -> bool:
    """Copy a tensor and say whether what arrived is finite in every element, with what torch has.

    A sum is finite only if all that it adds is. On a CPU, pieces are added up while they are in its cache, which costs
    half of what a second pass over memory does. A sum may also overflow; then both ends of the values decide, since NaN
    passes through, forty times as fast as looking at each element for itself.
    """
    if view.dim() == 0:
        view, tensor = view.view(1), tensor.view(1)
    num_rows = len(view)
    step = max(1, num_rows if view.device.type != "cpu" else _PIECE * num_rows // max(1, view.numel()))
    sums = [view[first : first + step].copy_(tensor[first : first + step]).sum() for first in range(0, num_rows, step)]
    if not sums or bool(torch.stack(sums).isfinite().all()):
        return True
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(view))


def load_strict(
    parameters: Mapping[str, Tensor],
    source: TensorSource,
    destinations: Mapping[str, Destination],
    *,
    ignored: Collection[str] = (),
    copy: CopyIfFinite = copy_if_finite,
) -> None:
    """Fill parameters from a source, in place, casting to each parameter's dtype and device.

    Names, shapes and coverage are checked before anything is copied.

    Args:
        parameters: module parameter name to tensor.
        source: the checkpoint.
        destinations: checkpoint tensor name to its place.
        ignored: checkpoint names that may exist and are not read.
        copy: fills a place and says whether all that arrived is finite.
    Raises:
        CheckpointError: a tensor is missing, unused, misshapen, not floating, or holds NaN or infinity (also after the
            cast), or a parameter is not filled exactly once. All names of a kind are listed, the first eight in full.
    """
    present = set(source.names())
    problems = _plan_problems(parameters, destinations)
    problems += _kind("missing tensors", [name for name in destinations if name not in present])
    unused = sorted(present.difference(destinations).difference(ignored))
    problems += _kind("unused tensors", unused)
    misshapen = []
    for name, place in destinations.items():
        if name in present and place.parameter in parameters:
            expected, found = _expected_shape(parameters[place.parameter], place), source.shape(name)
            if expected != found:
                misshapen.append(f"{name} is {list(found)}, expected {list(expected)}")
    problems += _kind("misshapen tensors", misshapen)
    if problems:
        message = f"the weights do not fit the model: {'; '.join(problems)}"
        raise CheckpointError(message, origin={"file": source.origin})
    bad_values = []
    with torch.no_grad():
        for name, place in destinations.items():
            tensor = source.load(name)
            if tensor.dtype not in FLOAT_DTYPES:
                kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
                raise CheckpointError(
                    f"tensor {name} is stored as {tensor.dtype}; supported are {kinds}", origin={"file": source.origin}
                )
            parameter = parameters[place.parameter]
            view = parameter if place.rows is None else parameter[place.rows[0] : place.rows[1]]
            if not copy(view, tensor):
                stored_finite = bool(torch.isfinite(tensor).all())
                bad_values.append(f"{name} (overflows {view.dtype})" if stored_finite else name)
    if bad_values:
        raise CheckpointError(
            "; ".join(_kind("tensors with NaN or infinity", bad_values)), origin={"file": source.origin}
        )


def _expected_shape(parameter: Tensor, place: Destination) -> tuple[int, ...]:
    if place.rows is None:
        return tuple(parameter.shape)
    return (place.rows[1] - place.rows[0], *parameter.shape[1:])


def _plan_problems(parameters: Mapping[str, Tensor], destinations: Mapping[str, Destination]) -> list[str]:
    """What is wrong with the plan itself: unknown parameters, and rows that no tensor or two tensors fill."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for place in destinations.values():
        if place.parameter in parameters:
            height = parameters[place.parameter].shape[0] if parameters[place.parameter].dim() else 1
            spans.setdefault(place.parameter, []).append(place.rows or (0, height))
    unknown = sorted({place.parameter for place in destinations.values()}.difference(parameters))
    problems = _kind("the model has no parameters", unknown)
    problems += _kind("unfilled parameters", [name for name in parameters if name not in spans])
    uneven = []
    for name, ranges in spans.items():
        end = 0
        for first, last in sorted(ranges):
            if first != end:
                break
            end = last
        if end != (parameters[name].shape[0] if parameters[name].dim() else 1):
            uneven.append(f"{name} (rows {sorted(ranges)} of {parameters[name].shape[0]})")
    return problems + _kind("parameters not filled exactly once", uneven)


def _kind(title: str, names: Collection[str]) -> list[str]:
    return [f"{len(names)} {title}: {_listed(names)}"] if names else []


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return ", ".join(listed[:_MAX_LISTED]) + more


def save_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file that appears only when complete.

    Args:
        path: the file; an existing one is replaced.
        tensors: any device; views of a larger tensor are written as they are.
        metadata: strings for the header.
    Raises:
        CapacityError: the disk is full; nothing is left behind.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    own = {name: _standalone(tensor) for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        try:
            save_file(own, temporary, metadata={"format": "pt", **metadata})
        except SafetensorError as error:
            # the writer wraps the operating system's error into text
            if any(f"os error {code}" in str(error) or f"code: {code}," in str(error) for code in _FULL):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
            raise
        _sort_metadata(temporary)


def write_index(folder: Path) -> None:
    """Write the index of a folder's single weights file, where there is no index yet.

    A reader that finds none may take every `*.safetensors` for weights (vLLM does), a fingerprint beside them included.

    Args:
        folder: holds `model.safetensors`.
    Raises:
        CheckpointError: the weights file is missing or damaged.
        CapacityError: the disk is full.
    """
    if (folder / INDEX_FILE).exists():
        return
    names = sorted(open_safetensors_file(folder / SINGLE_FILE).names())
    size = (folder / SINGLE_FILE).stat().st_size
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(names, SINGLE_FILE)}
    write_text_atomic(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def _sort_metadata(path: Path) -> None:
    """Put the header's metadata in order: the writer leaves it to chance, and equal weights shall be equal files."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= size:  # always so, unless the writer spells a character otherwise; then chance stays
            file.seek(8)
            file.write(text.ljust(size))


def _standalone(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().to("cpu").contiguous()
    is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.clone() if is_view else tensor


def write_text_atomic(path: Path, text: str) -> None:
    """Write a UTF-8 text file that appears only when complete.

    Args:
        path: the file; an existing one is replaced.
        text: its content.
    Raises:
        CapacityError: the disk is full; nothing is left behind.
    """
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file under a temporary name in the same folder; on success flush it to disk and rename it.

    Args:
        path: the final name.
    Yields:
        The temporary path to write to.
    Raises:
        CapacityError: the disk is full. In that case, and on any other exception, the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    with disk_full_as_capacity_error(path):
        try:
            temporary.touch()
            mode = temporary.stat().st_mode  # what the umask allows; the safetensors writer makes files private
            yield temporary
            temporary.chmod(mode)
            sync_to_disk(temporary)
            temporary.replace(path)
            sync_to_disk(path.parent)
        except BaseException:  # Ctrl-C included: a half-written file helps nobody
            temporary.unlink(missing_ok=True)
            raise


def sync_to_disk(path: Path) -> None:
    """Flush a file or a folder's entries to the disk, so that a rename never points at unwritten data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_full_as_capacity_error(path: Path) -> Iterator[None]:
    """Turn "no space left" into a `CapacityError` that names the path."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise CapacityError(
            f"the disk is full: {path} could not be written ({os.strerror(error.errno)}); nothing was left behind",
            hint="freeing space, or another output folder",
        ) from error
