"""Plans, and repositories that cannot become a model: told before their weights are fetched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hub_server import Hub, ask, digest_of, serve_hub
from tests.unit.cli.folders import TARGET, drafter_contract

from paceline.checkpoint import download as module
from paceline.checkpoint.dialects import write_drafter_config
from paceline.checkpoint.download import download, plan_download, require_digests, shown_size, usable_path
from paceline.checkpoint.hub import HubName
from paceline.checkpoint.locate import locate_drafter
from paceline.errors import CheckFailedError, CheckpointError, ConfigError, OfflineError

NAME = HubName("owner/name")
INDEX = "model.safetensors.index.json"
CONFIG = json.dumps(TARGET).encode()
WEIGHTS = bytes(range(250)) * 40


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with a target that is whole as far as its listing goes."""
    with serve_hub() as hub:
        ask(hub, monkeypatch, tmp_path)
        hub.add("owner/name", {"config.json": CONFIG, "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"})
        yield hub


def change(hub: Hub, **files: bytes | None) -> None:
    """Another commit: files added, replaced, or left out."""
    repository = hub.repositories["owner/name"]
    names = {"config": "config.json", "index": INDEX, "weights": "model.safetensors"}
    changed = {names.get(name, name.replace("__", ".")): content for name, content in files.items()}
    kept = {**repository.commits[repository.branches["main"]], **changed}
    repository.commit({name: content for name, content in kept.items() if content is not None})


def no_weights_asked(hub: Hub) -> bool:
    return not [request for request in hub.requests if "/resolve/" in request and "json" not in request]


def test_a_plan_is_the_hubs_listing(hub: Hub, tmp_path: Path) -> None:
    plan = plan_download(NAME)
    assert plan.commit == hub.repositories["owner/name"].branches["main"] and plan.pinned.revision == plan.commit
    assert [(file.name, file.size, file.digest) for file in plan.files] == [
        ("config.json", len(CONFIG), f"git:{digest_of('config.json', CONFIG)}"),
        ("model.safetensors", 10_000, f"sha256:{digest_of('model.safetensors', WEIGHTS)}"),
        ("tokenizer.json", 2, f"git:{digest_of('tokenizer.json', b'{}')}"),
    ]
    assert plan.num_missing_bytes == plan.num_bytes == len(CONFIG) + 10_002
    assert list(tmp_path.iterdir()) == []
    assert hub.asked("GET", "/resolve/") == hub.asked("HEAD", "/resolve/") == []


def test_what_is_here_is_known(hub: Hub, tmp_path: Path) -> None:
    for folder in (None, tmp_path / "mine"):
        plan = plan_download(NAME, folder=folder)
        path = download(plan)
        assert {file.name for file in plan.files} <= {file.name for file in path.iterdir()}
        again = plan_download(NAME, folder=folder)
        assert again.num_missing_bytes == 0
        (path / "tokenizer.json").resolve().unlink()
        (path / "tokenizer.json").unlink(missing_ok=True)
        assert plan_download(NAME, folder=folder).num_missing_bytes == 2
    (tmp_path / "mine" / "model.safetensors").write_bytes(WEIGHTS[:-1])
    assert plan_download(NAME, folder=tmp_path / "mine").num_missing_bytes == 2 + 10_000, "of another size"


def test_what_another_revision_has_is_here(hub: Hub) -> None:
    download(plan_download(NAME))
    change(hub, z__txt=b"new")
    assert plan_download(NAME).num_missing_bytes == len(b"new")


def test_a_broken_connection_goes_on_where_it_ended(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1_000)
    hub.breaks_behind = 6_000
    path = download(plan_download(NAME))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert [request.rpartition(" ")[2] for request in hub.asked("GET", "model.safetensors")][1:] == ["bytes=6000-"]


def test_what_came_before_a_failure_stays(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    change(hub, weights=None, index=json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}).encode())
    change(hub, a__safetensors=WEIGHTS, b__safetensors=WEIGHTS[::-1])
    real = module._fetch_file

    def fail(plan: module.DownloadPlan, file: module.HubFile) -> None:
        if file.name == "b.safetensors":
            raise KeyboardInterrupt
        real(plan, file)

    monkeypatch.setattr(module, "_fetch_file", fail)
    with pytest.raises(KeyboardInterrupt):
        download(plan_download(NAME))
    monkeypatch.setattr(module, "_fetch_file", real)
    plan = plan_download(NAME)
    assert [file.name for file in plan.files if not file.is_present] == ["b.safetensors"]
    hub.requests.clear()
    path = download(plan)
    assert (path / "b.safetensors").read_bytes() == WEIGHTS[::-1]
    assert [request for request in hub.asked("GET", "/resolve/") if "b.safetensors" not in request] == []


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({"config": None}, r"is no model: config.json is missing \(it holds model.safetensors, tokenizer.json\)"),
        ({"weights": None}, "holds no weights: model.safetensors is missing"),
        ({"weights": None, "mask_embedding__pt": b""}, "holds no weights"),
        ({"weights": None, "x__gguf": b"", "y__gguf": b""}, "holds 2 GGUF files and no safetensors"),
    ],
)
def test_a_listing_that_is_no_model(hub: Hub, files: dict[str, bytes | None], part: str) -> None:
    change(hub, **files)
    with pytest.raises(CheckpointError, match=part):
        plan_download(NAME)
    assert hub.asked("GET", "/resolve/") == []


def changed_config(**values: Any) -> bytes:
    return json.dumps({**TARGET, **values}).encode()


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({"config": changed_config(model_type="gpt2", architectures=["GPT2LMHeadModel"])}, "'gpt2'.*is not supported"),
        ({"config": changed_config(hidden_act="relu")}, "hidden_act"),
        ({"config": b"{"}, "is not valid JSON"),
        ({"config": json.dumps({"architectures": ["DFlashDraftModel"]}).encode()}, "config.json"),
        ({"index": json.dumps({"weight_map": {"a": "a-1.safetensors"}}).encode()}, "have: a-1.safetensors"),
        ({"weights": None, "pytorch_model__bin": WEIGHTS}, "targets are read from safetensors"),
    ],
)
def test_a_foreign_model_is_told_before_its_weights_are_fetched(
    hub: Hub, files: dict[str, bytes | None], part: str
) -> None:
    change(hub, **files)
    with pytest.raises(CheckpointError, match=part):
        download(plan_download(NAME))
    assert no_weights_asked(hub)


def test_a_config_that_leaves_its_dtype_to_the_weights(hub: Hub) -> None:
    config = {key: value for key, value in TARGET.items() if key != "torch_dtype"}
    change(hub, config=json.dumps(config).encode())
    assert (download(plan_download(NAME)) / "model.safetensors").is_file()


def test_a_drafter_may_be_a_state_dict(hub: Hub, tmp_path: Path) -> None:
    config = json.dumps(write_drafter_config(drafter_contract())).encode()
    torch.save({"fc.weight": torch.zeros(2)}, tmp_path / "state.pt")
    change(hub, config=config, weights=None, draft__pt=(tmp_path / "state.pt").read_bytes(), mask_embedding__pt=b"x")
    path = download(plan_download(NAME))
    assert {"draft.pt", "mask_embedding.pt"} <= {file.name for file in path.iterdir()}
    hub.requests.clear()
    assert locate_drafter("owner/name", offline=True) == path and hub.requests == []


def test_the_cache_is_left_as_locate_leaves_it(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files, so that neither fetches what the other does not."""
    files = {"x__txt": b"1", "y__md": b"2", "z__jinja": b"3", "tokenizer__model": b"5", "optimizer__bin": b"6"}
    change(hub, mask_embedding__pt=b"4", **files)
    path = download(plan_download(NAME))
    ours = {file.name for file in path.iterdir()}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "other"))
    assert {file.name for file in locate_drafter("owner/name").iterdir()} == ours
    assert "y.md" not in ours and "tokenizer.model" in ours


def test_more_files_on_demand(hub: Hub) -> None:
    change(hub, y__md=b"2", z__onnx=b"3")
    assert {file.name for file in plan_download(NAME, include=["*.onnx"]).files} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "z.onnx",
    }
    assert len(plan_download(NAME, include=["*"]).files) == 5
    with pytest.raises(ConfigError, match=r"--include '\*.onx' fits no file of owner/name"):
        plan_download(NAME, include=["*.onx"])


def test_a_branch_that_moves_meanwhile_is_told(hub: Hub) -> None:
    plan = plan_download(NAME)
    change(hub, config=changed_config(vocab_size=65))
    with pytest.raises(CheckpointError, match=f"moved from commit {plan.commit} to .* while it was downloaded"):
        download(plan)
    pinned = plan_download(HubName("owner/name", plan.commit))
    assert download(pinned).name == plan.commit


def test_a_folder_gets_the_commit_that_was_planned(hub: Hub, tmp_path: Path) -> None:
    plan = plan_download(NAME, folder=tmp_path / "mine")
    change(hub, weights=WEIGHTS[::-1], config=changed_config(vocab_size=65))
    path = download(plan)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS and (path / "config.json").read_bytes() == CONFIG


def test_digests(hub: Hub) -> None:
    plan = plan_download(NAME)
    path = download(plan)
    require_digests(plan, path)
    for name in ("config.json", "model.safetensors"):
        file = (path / name).resolve()
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + b"\0")
        with pytest.raises(CheckFailedError, match=f"1 of 3 files of owner/name .*: {name}"):
            require_digests(plan, path)
        file.unlink()
        with pytest.raises(CheckFailedError, match=name):
            require_digests(plan, path)
        file.write_bytes(whole)
    require_digests(plan, path)


def test_names_that_look_like_patterns(hub: Hub, tmp_path: Path) -> None:
    change(hub, **{"a[1]?__json": b"{}"})
    for folder in (None, tmp_path / "mine"):
        assert (download(plan_download(NAME, folder=folder)) / "a[1]?.json").read_bytes() == b"{}"


def test_what_other_verbs_take(tmp_path: Path) -> None:
    assert usable_path(tmp_path) == tmp_path
    (tmp_path / "a.gguf").touch()
    assert usable_path(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    assert usable_path(tmp_path) == tmp_path
    (tmp_path / "b.gguf").rename(tmp_path / "model.safetensors")
    assert usable_path(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**19, "1.5 MiB"), (2**41, "2048.0 GiB")],
)
def test_sizes_for_people(num_bytes: int, text: str) -> None:
    assert shown_size(num_bytes) == text


def test_no_hub_to_ask(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OfflineError, match="the hub cannot be reached for owner/name"):
        plan_download(NAME)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OfflineError, match="this run is offline"):
        plan_download(NAME)


def test_a_folder_that_cannot_be_written(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Callable[..., object]:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(CheckpointError, match="cannot be written: Permission denied"):
        download(plan_download(NAME))
