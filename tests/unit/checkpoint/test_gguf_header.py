"""Parsing GGUF headers: the same as the gguf package reads, quickly, and damage is told apart."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.gguf_header import read_gguf_header
from paceline.errors import CheckpointError


def test_metadata_and_tensors_match_the_reference_reader(tiny_gguf: Any) -> None:
    import gguf

    tiny_gguf.general |= {"a.list": [1, 2, 3], "a.words": ["x", "äö", ""], "a.flag": True, "a.number": 0.5}
    path = tiny_gguf.write()
    header, reference = read_gguf_header(path), gguf.GGUFReader(path)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert header.metadata[key] == field.contents(), key
    for tensor in reference.tensors:
        found = header.tensors[tensor.name]
        assert found.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert header.data_offset + found.offset == tensor.data_offset
    assert len(header.tensors) == len(reference.tensors)
    assert header.architecture == "llama"


def test_real_header_takes_a_fraction_of_a_second(smollm2: Path) -> None:
    start = time.process_time()
    header = read_gguf_header(smollm2)
    assert time.process_time() - start < 1.0
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(header.tensors) == 272


def test_every_cut_of_the_header_is_called_truncated(tiny_gguf: Any, tmp_path: Path) -> None:
    data = tiny_gguf.write().read_bytes()
    end = read_gguf_header(tiny_gguf.path).data_offset
    cut = tmp_path / "cut.gguf"
    for keep in range(24, end - 32, 37):
        cut.write_bytes(data[:keep])
        with pytest.raises(CheckpointError, match="is truncated"):
            read_gguf_header(cut)


def test_missing_folder_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_gguf_header(tmp_path / "nowhere.gguf")
    with pytest.raises(CheckpointError, match="is not a file"):
        read_gguf_header(tmp_path)
    for content in (b"", b"GG", b"PK\x03\x04" + bytes(100)):
        path = tmp_path / "other.gguf"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is not a GGUF file"):
            read_gguf_header(path)


@pytest.mark.parametrize(
    ("version", "message"), [(1, "of version 1"), (9, "of version 9"), (3 << 24, "of the other byte order")]
)
def test_unsupported_versions(tmp_path: Path, version: int, message: str) -> None:
    path = tmp_path / "v.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(CheckpointError, match=message):
        read_gguf_header(path)


def test_absurd_counts_do_not_allocate(tmp_path: Path) -> None:
    path = tmp_path / "absurd.gguf"
    key = struct.pack("<Q", 1) + b"k"
    for value in (struct.pack("<IIQ", 9, 4, 2**60), struct.pack("<IQ", 8, 2**60), struct.pack("<IIQ", 9, 8, 2**40)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + value + bytes(64))
        with pytest.raises(CheckpointError, match="is truncated"):
            read_gguf_header(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", 77) + bytes(64))
    with pytest.raises(CheckpointError, match="metadata value of unknown type 77"):
        read_gguf_header(path)


def test_parts_of_a_split_file_are_refused(tiny_gguf: Any) -> None:
    tiny_gguf.general["split.count"] = 3
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        read_gguf_header(tiny_gguf.write())
