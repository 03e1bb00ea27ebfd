"""When there is a native library and where it is kept."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.ops.native import build

has_library = pytest.mark.skipif(build.library() is None, reason="no native operations on this machine")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of its own, and nothing built yet."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    build.library.cache_clear()
    yield tmp_path
    build.library.cache_clear()


@has_library
def test_it_is_built_once_for_the_same_text(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-O0"))  # a third of the time; nothing is computed with it
    assert build.library() is not None
    (made,) = (home / ".cache" / "paceline").iterdir()
    monkeypatch.setattr(subprocess, "run", lambda *_arguments, **_options: pytest.fail("it is there already"))
    build.library.cache_clear()
    assert build.library() is not None
    assert (home / ".cache" / "paceline").iterdir().__next__() == made


@has_library
def test_other_flags_are_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(build, "_compile", lambda _compiler, path: bool(path.write_text("")) or True)
    first = build._built("gcc")
    monkeypatch.setattr(build, "_FLAGS", ("-O0",))
    assert build._built("gcc") != first


def test_without_a_compiler_there_is_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _name: None)
    assert build.library() is None


def test_another_processor_has_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_is_processor_fit", lambda: False)
    monkeypatch.setattr(build.shutil, "which", lambda _name: pytest.fail("nothing is looked for"))
    assert build.library() is None


def test_what_cannot_be_compiled_is_said_and_goes_without(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise subprocess.CalledProcessError(1, "gcc", stderr="products.c:1: no such instruction")

    monkeypatch.setattr(build, "_is_processor_fit", lambda: True)
    monkeypatch.setattr(build.shutil, "which", lambda _name: "gcc")
    monkeypatch.setattr(subprocess, "run", fail)
    with caplog.at_level(logging.WARNING, logger="paceline.ops.native.build"):
        assert build.library() is None
    assert "no such instruction" in caplog.text


def test_a_folder_that_others_may_write_to_is_not_trusted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / ".cache" / "paceline"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setattr(build, "_compile", lambda _compiler, path: bool(path.write_text("")) or True)
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(home / "temporary"))
    assert build._built("gcc").parent.parent == home / "temporary"


@pytest.mark.parametrize("found", [True, False])
def test_amx_is_asked_of_torch(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.torch.cpu, "_is_amx_tile_supported", lambda: found, raising=False)
    assert build.has_amx() is found
