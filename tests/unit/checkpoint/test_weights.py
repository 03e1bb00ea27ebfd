"""Strict loading, lazy reading, and writing that leaves either the old file or the new one."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.checkpoint import weights
from paceline.checkpoint.weights import (
    Destination,
    load_strict,
    open_safetensors,
    open_safetensors_file,
    read_safetensors_metadata,
    save_safetensors,
    write_index,
    write_text_atomic,
)
from paceline.errors import CapacityError, CheckpointError

FUSED = {"a": Destination("fused", (0, 2)), "b": Destination("fused", (2, 5)), "c": Destination("whole")}


class Source:
    """Tensors in memory."""

    origin = "memory"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def load(self, name: str) -> Tensor:
        return self.tensors[name]


def sound_tensors() -> dict[str, Tensor]:
    return {"a": torch.randn(2, 3), "b": torch.randn(3, 3), "c": torch.randn(4)}


def empty_parameters(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"fused": torch.zeros(5, 3, dtype=dtype), "whole": torch.zeros(4, dtype=dtype)}


def test_rows_land_where_they_belong() -> None:
    tensors, parameters = sound_tensors(), empty_parameters()
    load_strict(parameters, Source(tensors), FUSED)
    assert torch.equal(parameters["fused"], torch.cat([tensors["a"], tensors["b"]]))
    assert torch.equal(parameters["whole"], tensors["c"])


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_floats_are_cast_to_the_parameters_dtype(stored: torch.dtype, wanted: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in sound_tensors().items()}
    parameters = empty_parameters(wanted)
    load_strict(parameters, Source(tensors), FUSED)
    assert parameters["whole"].dtype == wanted
    assert torch.equal(parameters["whole"], tensors["c"].to(wanted))


def test_parameters_that_require_gradients_are_filled_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    load_strict({"whole": parameter}, Source({"c": torch.ones(4)}), {"c": Destination("whole")})
    assert parameter.requires_grad and parameter.is_leaf
    assert torch.equal(parameter.detach(), torch.ones(4))


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_each_missing_tensor_is_named(name: str) -> None:
    tensors = sound_tensors()
    del tensors[name]
    with pytest.raises(CheckpointError, match=rf"1 missing tensors: {name}\b"):
        load_strict(empty_parameters(), Source(tensors), FUSED)


def test_unused_tensor_is_named_unless_ignored() -> None:
    tensors = sound_tensors() | {"extra.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"1 unused tensors: extra\.weight"):
        load_strict(empty_parameters(), Source(tensors), FUSED)
    load_strict(empty_parameters(), Source(tensors), FUSED, ignored={"extra.weight", "never.there"})


def test_misshapen_tensor_shows_both_shapes_and_nothing_is_copied() -> None:
    parameters = empty_parameters()
    tensors = sound_tensors() | {"b": torch.randn(3, 4)}
    with pytest.raises(CheckpointError, match=r"b is \[3, 4\], expected \[3, 3\]"):
        load_strict(parameters, Source(tensors), FUSED)
    assert not parameters["fused"].any()


def test_transposed_square_free_shapes_do_not_broadcast_in() -> None:
    with pytest.raises(CheckpointError, match=r"c is \[1\], expected \[4\]"):
        load_strict(empty_parameters(), Source(sound_tensors() | {"c": torch.ones(1)}), FUSED)


def test_unfilled_parameter_and_rows_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"1 unfilled parameters: lost"):
        load_strict(empty_parameters() | {"lost": torch.zeros(1)}, Source(sound_tensors()), FUSED)
    gap = {"a": Destination("fused", (0, 2)), "b": Destination("fused", (3, 5)), "c": Destination("whole")}
    tensors = sound_tensors() | {"b": torch.randn(2, 3)}
    with pytest.raises(CheckpointError, match=r"not filled exactly once: fused \(rows \[\(0, 2\), \(3, 5\)\] of 5\)"):
        load_strict(empty_parameters(), Source(tensors), gap)
    overlap = {"a": Destination("fused", (0, 2)), "b": Destination("fused", (1, 5)), "c": Destination("whole")}
    tensors = sound_tensors() | {"b": torch.randn(4, 3)}
    with pytest.raises(CheckpointError, match="not filled exactly once"):
        load_strict(empty_parameters(), Source(tensors), overlap)


def test_destination_without_parameter_is_named() -> None:
    with pytest.raises(CheckpointError, match="the model has no parameters: nowhere"):
        load_strict(
            empty_parameters(), Source(sound_tensors() | {"d": torch.zeros(1)}), FUSED | {"d": Destination("nowhere")}
        )


def test_all_problems_are_listed_at_once_with_a_count() -> None:
    destinations = {f"t{index}": Destination(f"p{index}") for index in range(20)}
    parameters = {f"p{index}": torch.zeros(1) for index in range(20)}
    with pytest.raises(CheckpointError) as caught:
        load_strict(parameters, Source({"other": torch.zeros(1)}), destinations)
    assert "20 missing tensors: t0, t1, t2, t3, t4, t5, t6, t7 and 12 more" in str(caught.value)
    assert "1 unused tensors: other" in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused(value: float) -> None:
    tensors = sound_tensors()
    tensors["b"][1, 1] = value
    with pytest.raises(CheckpointError, match=r"1 tensors with NaN or infinity: b"):
        load_strict(empty_parameters(), Source(tensors), FUSED)


def test_overflow_in_the_cast_is_refused() -> None:
    tensors = sound_tensors()
    tensors["c"][0] = 1e6
    with pytest.raises(CheckpointError, match=r"c \(overflows torch.float16\)"):
        load_strict(empty_parameters(torch.float16), Source(tensors), FUSED)


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 18])
@pytest.mark.parametrize("shape", [(), (0, 4), (33,), (17, 5), (3, 4, 6)])
def test_every_piece_is_copied_and_looked_at(
    piece: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the value lies, and whatever the others add up to."""
    monkeypatch.setattr(weights, "_PIECE", piece)
    stored = torch.randn(shape)
    parameter, place = torch.full(shape, 9.0), {"t": Destination("p")}
    load_strict({"p": parameter}, Source({"t": stored}), place)
    assert torch.equal(parameter, stored)
    for index in range(0, stored.numel(), max(1, stored.numel() // 5)):
        for values in ([torch.nan], [torch.inf], [-torch.inf], [torch.inf, -torch.inf]):
            wrong = stored.clone()
            for offset, value in enumerate(values):
                wrong.view(-1)[(index + offset) % wrong.numel()] = value
            with pytest.raises(CheckpointError, match="NaN or infinity: t"):
                load_strict({"p": parameter}, Source({"t": wrong}), place)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 6e4), (torch.bfloat16, 3e38), (torch.float32, 3e38)])
def test_large_values_whose_sum_overflows_are_not_refused(dtype: torch.dtype, value: float) -> None:
    parameter = torch.zeros(64, 64, dtype=dtype)
    load_strict({"p": parameter}, Source({"t": torch.full((64, 64), value)}), {"t": Destination("p")})
    assert torch.equal(parameter, torch.full((64, 64), value, dtype=dtype))


def test_a_sum_that_forgets_a_piece_would_be_seen() -> None:
    """The planted fault: the rows behind the last whole piece are copied and not looked at."""

    def forgetful(view: torch.Tensor, tensor: torch.Tensor) -> bool:
        view.copy_(tensor)
        return weights.copy_if_finite(view[:-1], tensor[:-1])

    tensor = torch.ones(9, 4)
    tensor[-1, -1] = torch.nan
    parameter = torch.zeros(9, 4)
    load_strict({"p": parameter}, Source({"t": tensor}), {"t": Destination("p")}, copy=forgetful)
    assert parameter[-1, -1].isnan(), "silently loaded: the tests above would fail"


def test_integer_weights_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"tensor c is stored as torch.int8"):
        load_strict(empty_parameters(), Source(sound_tensors() | {"c": torch.zeros(4, dtype=torch.int8)}), FUSED)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), drop=st.integers(0, 4), shift=st.sampled_from([0, 1, -1])
)
def test_any_gap_in_a_fused_parameter_is_noticed(sizes: list[int], drop: int, shift: int) -> None:
    bounds = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    places = {f"t{i}": Destination("fused", (bounds[i], bounds[i + 1])) for i in range(len(sizes))}
    tensors = {f"t{i}": torch.full((size, 2), float(i)) for i, size in enumerate(sizes)}
    fused = torch.empty(bounds[-1] + shift if bounds[-1] + shift > 0 else bounds[-1] + 1, 2)
    is_sound = fused.shape[0] == bounds[-1] and drop >= len(sizes)
    if drop < len(sizes):
        del places[f"t{drop}"], tensors[f"t{drop}"]
    if is_sound:
        load_strict({"fused": fused}, Source(tensors), places)
        assert torch.equal(fused, torch.cat(list(tensors.values())))
    else:
        with pytest.raises(CheckpointError):
            load_strict({"fused": fused}, Source(tensors), places)


def write_shards(folder: Path, *, weight_map: Mapping[str, str] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_safetensors(folder / "model-1.safetensors", {"a": torch.ones(2), "b": torch.ones(1)}, {})
    save_safetensors(folder / "model-2.safetensors", {"c": torch.full((3,), 2.0)}, {})
    mapping = weight_map or {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))


def test_one_file_is_read_as_written(tmp_path: Path) -> None:
    tensors = {"x": torch.randn(3, 2), "y": torch.randn(5).bfloat16()}
    save_safetensors(tmp_path / "model.safetensors", tensors, {"run": "7"})
    source = open_safetensors(tmp_path)
    assert sorted(source.names()) == ["x", "y"]
    assert source.shape("x") == (3, 2)
    assert torch.equal(source.load("y"), tensors["y"]) and source.load("y").dtype == torch.bfloat16
    assert read_safetensors_metadata(tmp_path / "model.safetensors")["run"] == "7"
    with pytest.raises(CheckpointError, match="has no tensor z"):
        source.load("z")


def test_equal_tensors_are_equal_files(tmp_path: Path) -> None:
    """The writer of safetensors leaves the order of the metadata to chance; hashes of exports must not."""
    metadata = {name: "é" + name for name in ("taps", "run", "contract", "seed", "data")}
    tensors = {"x": torch.arange(6.0).view(3, 2), "y": torch.ones(5).bfloat16()}
    for number in range(12):
        save_safetensors(tmp_path / f"{number}.safetensors", tensors, metadata)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    assert read_safetensors_metadata(tmp_path / "0.safetensors") == {"format": "pt", **metadata}
    assert torch.equal(open_safetensors_file(tmp_path / "0.safetensors").load("y"), tensors["y"])


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    source = open_safetensors(tmp_path)
    assert sorted(source.names()) == ["a", "b", "c"]
    assert torch.equal(source.load("c"), torch.full((3,), 2.0))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names 2 files, of which 1 do not exist: model-2\.safetensors"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"a": "model-1.safetensors", "c": "model-2.safetensors"}, "stored but not named: b"),
        (
            {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"},
            "not in the file that it names: a",
        ),
        ({"a": "../elsewhere.safetensors"}, "outside its folder"),
        ({"a": 3}, "no usable weight_map"),
    ],
)
def test_index_and_shards_must_agree(tmp_path: Path, mapping: dict[str, str], message: str) -> None:
    write_shards(tmp_path, weight_map=mapping)
    with pytest.raises(CheckpointError, match=message):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("named", ["model-1.safetensors", "model-2.safetensors"])
def test_a_tensor_of_two_shards_is_refused_whichever_is_named(tmp_path: Path, named: str) -> None:
    """A shard of another version may have stayed behind; readers that go shard by shard take the last one."""
    write_shards(tmp_path, weight_map={"a": "model-1.safetensors", "b": named, "c": "model-2.safetensors"})
    save_safetensors(tmp_path / "model-2.safetensors", {"b": torch.zeros(3), "c": torch.ones(3)}, {})
    with pytest.raises(CheckpointError, match="stored in several files: b"):
        open_safetensors(tmp_path)


def test_single_file_beside_an_index_that_does_not_name_it_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(2)}, {})
    with pytest.raises(CheckpointError, match=r"has both model\.safetensors and"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 9, 40, -1])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_safetensors(path, {"x": torch.randn(64)}, {})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or not a safetensors file"):
        open_safetensors(tmp_path)


def test_corrupt_header_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_safetensors(tmp_path)


def test_folder_without_weights_says_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .*pytorch_model\.bin"):
        open_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_safetensors(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_safetensors(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="does not exist"):
        open_safetensors_file(tmp_path / "nowhere.safetensors")


def test_views_are_written_as_they_are(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    save_safetensors(tmp_path / "v.safetensors", {"low": whole[:2], "high": whole[2:], "turned": whole.t()}, {})
    source = open_safetensors_file(tmp_path / "v.safetensors")
    assert torch.equal(source.load("low"), whole[:2])
    assert torch.equal(source.load("high"), whole[2:])
    assert torch.equal(source.load("turned"), whole.t())
    assert (tmp_path / "v.safetensors").stat().st_size < 500


def _save(path: Path) -> None:
    save_safetensors(path, {"x": torch.ones(4)}, {})


def _write_text(path: Path) -> None:
    write_text_atomic(path, "new")


@pytest.mark.parametrize("writer", [_save, _write_text])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Callable[[Path], None], code: int
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CapacityError, match="the disk is full"):
        writer(path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_full_disk_inside_the_safetensors_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors
    import safetensors.torch

    def fail(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(CapacityError):
        _save(tmp_path / "file")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("writer", [_save, _write_text])
def test_interrupt_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Callable[[Path], None]
) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        writer(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_other_disk_errors_stay_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="broken disk"):
        _write_text(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_written_files_obey_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        _save(tmp_path / "a")
        _write_text(tmp_path / "b")
    finally:
        os.umask(old)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in "ab"} == {0o644}
    assert weights.INDEX_FILE.endswith(".index.json")


def test_an_index_keeps_other_safetensors_out_of_the_weights(tmp_path: Path) -> None:
    """Some readers take every safetensors file of a folder without an index for weights."""
    save_safetensors(tmp_path / "model.safetensors", {"b": torch.ones(2), "a": torch.zeros(3)}, {})
    save_safetensors(tmp_path / "fingerprint.safetensors", {"probe_ids": torch.arange(4)}, {})
    write_index(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    assert json.loads(index.read_text())["weight_map"] == {"a": "model.safetensors", "b": "model.safetensors"}
    assert sorted(open_safetensors(tmp_path).names()) == ["a", "b"]
    before = index.read_bytes()
    write_index(tmp_path)
    assert index.read_bytes() == before
