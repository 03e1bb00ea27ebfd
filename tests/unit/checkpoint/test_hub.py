"""Names of the hub, what of a model is missing, and one clear message for each way to be refused."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hub_server import Hub, ask, serve_hub

from paceline.checkpoint.hub import (
    DRAFTER_FILES,
    MODEL_FILES,
    HubName,
    at_revision,
    fetch,
    hub_errors,
    index_shards,
    missing_files,
    parse_hub_name,
)
from paceline.errors import CapacityError, CheckpointError, ConfigError, OfflineError, PacelineError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with one repository, which huggingface_hub asks."""
    with serve_hub() as hub:
        ask(hub, monkeypatch, tmp_path)
        hub.add("owner/name", {"config.json": b"{}", "model.safetensors": bytes(3000)})
        yield hub


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/name", HubName("owner/name")),
        ("owner/name@v1.0", HubName("owner/name", "v1.0")),
        ("Owner-1/na.me_2@refs/pr/7", HubName("Owner-1/na.me_2", "refs/pr/7")),
        ("owner/name@", None),
        ("owner/name@-x", None),
        ("name", None),
        ("./name", None),
        ("a/b/c", None),
        ("owner/model.gguf", None),
        ("owner/name@a b", None),
    ],
)
def test_names(text: str, expected: HubName | None) -> None:
    assert parse_hub_name(text) == expected
    assert expected is None or str(expected) == text


def test_a_revision_beside_a_name() -> None:
    name, pinned = HubName("owner/name"), HubName("owner/name", "v1")
    assert at_revision(name, None) == name and at_revision(name, "v1") == pinned
    assert at_revision(pinned, "v1") == at_revision(pinned, None) == pinned
    with pytest.raises(ConfigError, match=r"owner/name@v1 names a revision of its own; --revision asks for 'v2'"):
        at_revision(pinned, "v2")


def test_what_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert missing_files(folder) == ["config.json", "model.safetensors"]
    folder.mkdir()
    (folder / "mask_embedding.pt").touch()  # no weights
    (folder / "config.json").touch()
    assert missing_files(folder) == ["model.safetensors"]
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}))
    (folder / "m-1.safetensors").touch()
    assert missing_files(folder) == ["m-2.safetensors"]
    (folder / "m-2.safetensors").touch()
    assert missing_files(folder) == []
    for name in ("model.safetensors", "draft.bin", "model.gguf"):
        other = tmp_path / name
        other.mkdir()
        (other / name).touch()
        assert missing_files(other) == ([] if name.endswith(".gguf") else ["config.json"])


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map": ["a"]}', "[" * 100_000])
def test_a_damaged_index_names_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    assert index_shards(tmp_path / INDEX) == []


def refused(hub: Hub, name: str = "owner/name", *, offline: bool = False) -> PacelineError:
    with pytest.raises(PacelineError) as caught:
        fetch(HubName(*name.split("@")), MODEL_FILES, offline=offline)
    return caught.value


def test_files_come_by_their_patterns(hub: Hub) -> None:
    hub.add("owner/name", {name: b"x" for name in ("config.json", "a.txt", "mask_embedding.pt", "b.bin", "c.md")})
    assert {file.name for file in fetch(HubName("owner/name"), MODEL_FILES, offline=False).iterdir()} == {
        "config.json",
        "a.txt",
    }
    folder = fetch(HubName("owner/name"), DRAFTER_FILES, offline=False)
    assert (folder / "mask_embedding.pt").is_file() and not (folder / "b.bin").exists()


def test_no_such_repository_or_revision(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused(hub, "owner/other")
    assert isinstance(error, CheckpointError) and "HF_TOKEN" in str(error)
    assert "'owner/other' is no folder here, and the hub has no repository of that name" in str(error)
    monkeypatch.setenv("HF_TOKEN", "mine")
    assert isinstance(refused(hub, "owner/other"), CheckpointError), "404 in place of 401"
    error = refused(hub, "owner/name@v9")
    assert isinstance(error, CheckpointError) and "has no revision 'v9'" in str(error)


def test_gated_repositories(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["owner/name"].needs_token = "good"
    assert "its token in HF_TOKEN" in str(refused(hub))
    monkeypatch.setenv("HF_TOKEN", "bad")
    error = refused(hub)
    assert isinstance(error, CheckpointError) and "accept its terms on the hub with the account of the token" in str(
        error
    )
    monkeypatch.setenv("HF_TOKEN", "good")
    assert (fetch(HubName("owner/name"), MODEL_FILES, offline=False) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("status", "kind", "part"),
    [
        (401, CheckpointError, "status 401"),
        (403, CheckpointError, "status 403"),
        (429, OfflineError, "too many requests"),
        (500, OfflineError, "status 500"),
    ],
)
def test_refusals_of_the_server(hub: Hub, status: int, kind: type[Exception], part: str) -> None:
    from huggingface_hub import HfApi

    hub.status = status
    with pytest.raises(kind, match=part), hub_errors(HubName("owner/name")):
        HfApi().model_info("owner/name")


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    error = refused(hub)
    assert isinstance(error, OfflineError) and "the hub cannot be reached" in str(error)
    assert "http://127.0.0.1:9" in str(error)
    with (
        pytest.raises(OfflineError, match="the hub cannot be reached for owner/name"),
        hub_errors(HubName("owner/name")),
    ):
        HfApi().model_info("owner/name")


def test_offline_names_the_missing_file(hub: Hub) -> None:
    assert "missing: config.json" in str(refused(hub, offline=True))
    shards = {f"model-{part}-of-2.safetensors": b"" for part in (1, 2)}
    index = json.dumps({"weight_map": {name: name for name in shards}}).encode()
    hub.add("owner/large", {"config.json": b"{}", INDEX: index, **shards})
    folder = fetch(HubName("owner/large"), MODEL_FILES, offline=False)
    hub.requests.clear()
    assert fetch(HubName("owner/large"), MODEL_FILES, offline=True) == folder
    (folder / "model-2-of-2.safetensors").unlink()
    error = refused(hub, "owner/large", offline=True)
    assert isinstance(error, OfflineError) and "(missing: model-2-of-2.safetensors), and this run is offline" in str(
        error
    )
    assert "`paceline download owner/large`" in str(error)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("failure", "kind", "part"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), CapacityError, "the disk is full"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), CapacityError, "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "/cache"), CheckpointError, "/cache cannot be written"),
        (OSError("Consistency check failed\nmore"), OfflineError, "failed: Consistency check failed"),
        (RuntimeError(""), OfflineError, "failed: RuntimeError"),
        (ConfigError("ours"), ConfigError, "ours"),
    ],
)
def test_failures_on_this_side(failure: Exception, kind: type[Exception], part: str) -> None:
    with pytest.raises(kind, match=part), hub_errors(HubName("owner/name")):
        raise failure


def test_ctrl_c_is_no_error_of_the_hub() -> None:
    with pytest.raises(KeyboardInterrupt), hub_errors(HubName("owner/name")):
        raise KeyboardInterrupt
