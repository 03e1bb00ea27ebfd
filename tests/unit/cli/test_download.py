"""The verb against a small server of the hub's API: what it fetches, what it says, and what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.hub_server import Hub, ask, digest_of, files_of, serve_hub
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import write_drafter, write_target_folder
from tests.unit.cli.test_main import SOURCE, run

from paceline.checkpoint.weights import SINGLE_FILE

Files = Mapping[str, bytes]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a drafter of its own."""
    root, target = tmp_path_factory.mktemp("models"), tiny_target()
    write_target_folder(root / "target", target)
    write_drafter(root / "drafter", wrap_target(target))
    return root / "target", root / "drafter"


@pytest.fixture
def hub(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with both, which huggingface_hub asks."""
    with serve_hub() as hub:
        ask(hub, monkeypatch, tmp_path)
        hub.add("some/target", {**files_of(folders[0]), "README.md": b"read me"})
        hub.add("some/drafter", files_of(folders[1]))
        yield hub


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_both_are_fetched_whole_and_their_folders_told(
    hub: Hub, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["download", "some/target", "some/drafter"]) == 0
    captured = capsys.readouterr()
    target, drafter = map(Path, lines(captured.out))
    assert files_of(target) == files_of(folders[0]), "not the readme"
    assert files_of(drafter) == files_of(folders[1])
    assert target.name == hub.repositories["some/target"].branches["main"]
    assert "some/target: target, LlamaForCausalLM, whole" in captured.err
    assert "some/drafter: drafter, dflash, whole" in captured.err
    weights = files_of(folders[0])[SINGLE_FILE]
    assert f"sha256:{digest_of(SINGLE_FILE, weights)[:12]}  {SINGLE_FILE}" in captured.err
    assert target.name in captured.err
    assert "Fetching" not in captured.err and f"{SINGLE_FILE}: " in captured.err, (
        "plain lines where there is no terminal"
    )


def test_what_is_here_is_not_fetched_again(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["download", "some/target"]) == 0
    hub.requests.clear()
    hub.num_bytes = 0
    assert run(["download", "some/target"]) == 0
    assert hub.asked("GET", "/resolve/") == [] and hub.num_bytes == 0
    assert "of which 0 B are to be fetched" in capsys.readouterr().err


def test_the_name_is_found_afterwards_without_a_network(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["download", "some/drafter", "some/target"]) == 0
    hub.requests.clear()
    for name in ("some/drafter", "some/target"):
        assert run(["inspect", name, "--offline", "--json"]) == 0
    capsys.readouterr()
    assert run(["download", "some/target", "some/drafter", "--offline"]) == 0
    captured = capsys.readouterr()
    assert "in the local hub cache, nothing needs to be downloaded" in captured.err
    assert len(lines(captured.out)) == 2 and hub.requests == []


def test_a_dry_run_writes_nothing(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(tmp_path.rglob("*"))
    assert run(["download", "some/target", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert SINGLE_FILE in shown and "are free in" in shown and "README.md" not in shown
    assert run(["download", "some/target", "--dry-run", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["models"]
    sizes = {file["name"]: file["size"] for file in plan["files"]}
    assert sizes[SINGLE_FILE] == len(hub.repositories["some/target"].commits[plan["commit"]][SINGLE_FILE])
    assert plan["num_missing_bytes"] == plan["num_bytes"] == sum(sizes.values())
    assert not any(file["is_present"] for file in plan["files"])
    assert set(tmp_path.rglob("*")) == before and hub.asked("GET", "/resolve/") == []


def test_json_and_quiet(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["download", "some/target", "some/drafter", "--json", "-q"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    target, drafter = json.loads(captured.out)["models"]
    assert (target["kind"], target["architecture"]) == ("target", "LlamaForCausalLM")
    assert (drafter["kind"], drafter["family"]) == ("drafter", "dflash")
    assert Path(target["path"], SINGLE_FILE).is_file() and target["commit"] == Path(target["path"]).name
    assert run(["download", "some/target", "-q"]) == 0
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == ("", f"{target['path']}\n")


def test_a_revision_is_pinned(hub: Hub, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    old = hub.repositories["some/target"].branches["main"]
    new = hub.add("some/target", {**files_of(folders[0]), "notes.txt": b"newer"})
    hub.repositories["some/target"].branches["v1"] = old
    for asked in (["some/target", "--revision", "v1"], ["some/target@v1"], [f"some/target@{old}"]):
        assert run(["download", *asked]) == 0
        assert Path(capsys.readouterr().out.strip()).name == old
    hub.num_bytes = 0
    assert run(["download", "some/target"]) == 0
    assert Path(capsys.readouterr().out.strip()).name == new
    assert hub.num_bytes == len(b"newer"), "what both have is linked"
    for name in ("some/target@v1", f"some/target@{old}"):
        assert run(["inspect", name, "--offline"]) == 0
    assert run(["download", "some/target@v1", "--revision", "main"]) == 2
    assert "names a revision of its own" in capsys.readouterr().err


def test_a_folder_of_the_users_own(hub: Hub, folders: tuple[Path, Path], tmp_path: Path) -> None:
    place = tmp_path / "models" / "mine"
    assert run(["download", "some/target", "--to", str(place)]) == 0
    found = {name: content for name, content in files_of(place).items() if not name.startswith(".")}
    assert found == files_of(folders[0])
    record = json.loads((place / ".paceline-download.json").read_text())
    commit = hub.repositories["some/target"].branches["main"]
    assert (record["repository"], record["commit"]) == ("some/target", commit)
    assert record["files"][SINGLE_FILE]["digest"].startswith("sha256:")
    assert not (tmp_path / "hub").exists(), "nothing in the cache"
    assert run(["inspect", str(place)]) == 0
    hub.num_bytes = 0
    assert run(["download", "some/target", "--to", str(place)]) == 0
    assert hub.num_bytes == 0


def test_other_folders_are_left_alone(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    assert run(["download", "some/target", "--to", str(other)]) == 2
    assert "holds other files" in capsys.readouterr().err
    assert [file.name for file in other.iterdir()] == ["thesis.txt"]
    assert run(["download", "some/target", "--to", str(other / "thesis.txt")]) == 2
    place = tmp_path / "place"
    assert run(["download", "some/target", "--to", str(place)]) == 0
    before = files_of(place)
    assert run(["download", "some/drafter", "--to", str(place)]) == 2
    assert "holds some/target at" in capsys.readouterr().err
    assert files_of(place) == before


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["a/b", "c/d", "--revision", "v1"], "--revision is of one hub name; there are 2"),
        (["a/b", "c/d", "--to", "x"], "--to is of one hub name; there are 2"),
        (["{here}", "--to", "x"], "--to is of one hub name; there are 0"),
        (["{here}", "--revision", "v1"], "is on this machine, and has no revisions"),
        (["a/b", "--offline", "--to", "x"], "--to asks the hub"),
        (["a/b", "--offline", "--verify"], "--verify asks the hub"),
        (["a/b", "--offline", "--include", "*"], "--include asks the hub"),
        (["some/target", "--include", "*.onnx"], "fits no file of some/target"),
    ],
)
def test_contradictions(
    hub: Hub,
    folders: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    part: str,
) -> None:
    assert run(["download", *(text.replace("{here}", str(folders[0])) for text in arguments)]) == 2
    assert part in capsys.readouterr().err
    assert hub.asked("GET", "/resolve/") == []


def test_what_is_on_this_machine(
    hub: Hub,
    folders: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    smollm2_name: str = "smollm2-135m-instruct",
) -> None:
    assert run(["download", *map(str, folders), smollm2_name]) == 0
    captured = capsys.readouterr()
    assert lines(captured.out)[:2] == [str(folder) for folder in folders]
    assert captured.err.count("on this machine, nothing needs to be downloaded") == 3
    assert run(["download", str(folders[0]), "--dry-run"]) == 0
    assert "nothing needs to be downloaded" in capsys.readouterr().out
    assert hub.requests == []
    assert run(["download", "no-such-model"]) == 1
    assert "there is no target named 'no-such-model'" in capsys.readouterr().err


def test_a_full_disk_is_told_before_anything_is_written(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [
        sum(len(content) for file, content in files.items() if file != "README.md")
        for repository in hub.repositories.values()
        for files in repository.commits.values()
    ]
    before = set(tmp_path.rglob("*"))

    def free(path: Path, num_bytes: int) -> object:
        return shutil._ntuple_diskusage(10**12, 10**12 - num_bytes, num_bytes)  # type: ignore[attr-defined]

    monkeypatch.setattr(shutil, "disk_usage", lambda path: free(path, sum(sizes) - 1))
    for more in ([], ["--dry-run"]):
        assert run(["download", "some/target", "some/drafter", *more]) == 1
        assert f"{sum(sizes):,} bytes are to be fetched" in capsys.readouterr().err
    assert run(["download", "some/target", "--to", str(tmp_path / "place"), "--dry-run"]) == 0, "alone it fits"
    assert set(tmp_path.rglob("*")) == before and hub.asked("GET", "/resolve/") == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free(path, sum(sizes)))
    assert run(["download", "some/target", "some/drafter"]) == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free(path, 0))
    assert run(["download", "some/target", "some/drafter"]) == 0, "nothing is to be fetched"


def test_damage_is_found_by_verify(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["download", "some/target", "--verify"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    file = (folder / SINGLE_FILE).resolve()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # the last weight; no header knows
    file.write_bytes(content)
    assert run(["download", "some/target"]) == 0
    assert run(["download", "some/target", "--verify"]) == 3
    assert f"1 of 4 files of some/target are not what the hub lists: {SINGLE_FILE}" in capsys.readouterr().err


def test_an_incomplete_model_is_told_at_once(
    hub: Hub, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(folders[0] / SINGLE_FILE)
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "cut", {"format": "pt"})
    hub.add("some/target", {**files_of(folders[0]), SINGLE_FILE: (tmp_path / "cut").read_bytes()})
    assert run(["download", "some/target"]) == 1
    captured = capsys.readouterr()
    assert "1 missing tensors: model.norm.weight" in captured.err and captured.out == ""
    assert run(["download", "some/target", "--offline"]) == 1
    assert "1 missing tensors: model.norm.weight" in capsys.readouterr().err


def test_offline_names_what_is_missing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["download", "some/target", "--offline"]) == 1
    assert "missing: config.json" in capsys.readouterr().err
    assert run(["download", "some/target"]) == 0
    (Path(capsys.readouterr().out.strip()) / SINGLE_FILE).unlink()
    hub.requests.clear()
    assert run(["download", "some/target", "--offline"]) == 1
    assert f"(missing: {SINGLE_FILE}), and this run is offline" in capsys.readouterr().err
    # a cache without the listing that newer versions of huggingface_hub keep, also in memory
    leave_out = shutil.ignore_patterns("trees")
    shutil.copytree(tmp_path / "hub", tmp_path / "old" / "hub", symlinks=True, ignore=leave_out)
    ask(hub, monkeypatch, tmp_path / "old")
    assert run(["download", "some/target", "--offline"]) == 1
    assert f"and this run is offline; missing: {SINGLE_FILE}" in capsys.readouterr().err
    assert hub.requests == []


def test_inspect_reads_all_that_a_drafter_of_the_hub_has(
    hub: Hub, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its mask row lies in a file that no target has."""
    hub.add("some/drafter", {**files_of(folders[1]), "mask_embedding.pt": b"x"})
    assert run(["inspect", "some/drafter", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["has_mask_embedding"] is True


def test_gguf_files_are_named(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.checkpoint.locate import locate_target

    small = Path(locate_target("smollm2-135m-instruct"))
    hub.add("some/quantised", {"a.Q4.gguf": small.read_bytes()[: 2**16], "b.gguf": b"GGUF", "config.json": b"{}"})
    assert run(["download", "some/quantised"]) == 1
    message = capsys.readouterr().err
    assert "holds 2 GGUF files and no safetensors" in message and "a.Q4.gguf" in message
    assert hub.asked("GET", "/resolve/") == []
    assert run(["download", "some/quantised", "--include", "*Q4.gguf"]) == 1, "cut short"
    assert "a.Q4.gguf" in capsys.readouterr().err
    assert hub.asked("GET", "a.Q4.gguf") and not hub.asked("GET", "b.gguf")


def environment(hub: Hub, tmp_path: Path, **more: str) -> dict[str, str]:
    left_out = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PYTHONPATH": SOURCE, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, **more}


def test_the_environment_is_honoured_and_ctrl_c_leaves_what_is_whole(hub: Hub, tmp_path: Path) -> None:
    """In a process of its own: HF_ENDPOINT, HF_HOME, HF_TOKEN; then a signal in the middle of the weights."""
    hub.repositories["some/target"].needs_token = "secret"
    hub.stall = threading.Event()
    command = [sys.executable, "-m", "paceline", "download", "some/target"]
    with subprocess.Popen(
        command,
        env=environment(hub, tmp_path, HF_TOKEN="secret"),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it may be ignored where tests run unwatched
    ) as process:
        try:
            assert hub.stalled.wait(60)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "files that are complete stay" in said and said.endswith("interrupted\n")
    blobs = list((tmp_path / "home" / "hub").glob("models--some--target/blobs/*"))
    whole = {
        digest_of(name, content)
        for name, content in next(iter(hub.repositories["some/target"].commits.values())).items()
    }
    assert blobs and {blob.name for blob in blobs} <= whole, "no half of a file"
