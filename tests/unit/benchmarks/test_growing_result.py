from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from benchmarks.growing_result import GrowingResult, join_results, read_growing
from benchmarks.render_results import read_results, results_page

from paceline.errors import ConfigError, DataError

KEY = ("drafter", "set")
HEAD = {
    "name": "growing",
    "command": "python -m benchmarks.growing",
    "commit": "0123456789ab",
    "date": "2026-01-01",
    "machine": "2 cores",
    "versions": {"python": "3.11.7"},
    "lossless": True,
    "rows": [],
}


def growing(folder: Path | None, head: dict[str, Any] | None = None, **settings: Any) -> GrowingResult:
    def order(row: Any) -> Any:
        return "ba".index(row["drafter"]), row["set"]

    return GrowingResult({**HEAD, **(head or {})}, {"seed": 0} | settings, folder, key=KEY, order=order)


def test_every_row_is_on_disk_at_once_and_in_order(tmp_path: Path) -> None:
    result = growing(tmp_path / "new")
    path = tmp_path / "new" / "growing.json"
    result.put({"drafter": "a", "set": "x", "length": 1 / 3})
    assert json.loads(path.read_text())["rows"] == [{"drafter": "a", "set": "x", "length": 0.33333}]
    result.put({"drafter": "b", "set": "y", "length": math.nan}, {"drafter": "b", "set": "x", "length": 2.0})
    result.put({"drafter": "a", "set": "x", "length": 0.5})
    found = json.loads(path.read_text())
    assert [(row["drafter"], row["set"], row["length"]) for row in found["rows"]] == [
        ("b", "x", 2.0),
        ("b", "y", None),
        ("a", "x", 0.5),
    ]
    assert found["complete"] is False and found["settings"] == {"seed": 0}
    assert result.find(set="x", drafter="a") == {"drafter": "a", "set": "x", "length": 0.5}
    assert result.find(set="z", drafter="a") is None
    result.finish()
    assert json.loads(path.read_text()) == {**found, "complete": True}
    assert "| 0.5 |" in results_page(read_results(tmp_path / "new"))
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["growing.json"]


def test_without_a_folder_rows_stay_in_memory() -> None:
    result = growing(None)
    result.resume()
    result.put({"drafter": "a", "set": "x"})
    assert result.rows == [{"drafter": "a", "set": "x"}]


def test_a_run_goes_on_with_what_is_there(tmp_path: Path) -> None:
    first = growing(tmp_path)
    first.resume()
    assert first.rows == []
    first.put({"drafter": "a", "set": "x"})
    second = growing(tmp_path)
    second.resume()
    second.put({"drafter": "b", "set": "x"})
    assert [row["drafter"] for row in json.loads((tmp_path / "growing.json").read_text())["rows"]] == ["b", "a"]


def test_rows_that_were_measured_otherwise_are_refused(tmp_path: Path) -> None:
    growing(tmp_path, sets={"x": "1"}).put({"drafter": "a", "set": "x"})
    before = (tmp_path / "growing.json").read_bytes()
    with pytest.raises(
        ConfigError, match=r"seed is 1 here and 0 there; sets is \{'x': '2'\} here and \{'x': '1'\} there"
    ):
        growing(tmp_path, seed=1, sets={"x": "2"}).resume()
    with pytest.raises(ConfigError, match="commit is 'other' here and '0123456789ab' there"):
        growing(tmp_path, {"commit": "other"}, sets={"x": "1"}).resume()
    assert (tmp_path / "growing.json").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "problem"), [("{", "cannot be read"), ('{"rows": [], "commit": "a"}', "lacks complete")]
)
def test_files_of_another_kind_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "growing.json").write_text(text)
    with pytest.raises(DataError, match=problem):
        growing(tmp_path).resume()
    with pytest.raises(DataError, match=r"absent\.json cannot be read"):
        read_growing(tmp_path / "absent.json")


def test_files_of_several_drafters_become_one(tmp_path: Path) -> None:
    paths = []
    for name in "ab":
        result = growing(tmp_path / name, {"command": f"measure {name}"}, drafters={name: name * 4})
        result.put({"drafter": name, "set": "x"})
        if name == "a":
            result.finish()
        paths.append(tmp_path / name / "growing.json")
    joined = join_results(paths, KEY)
    assert joined["rows"] == [{"drafter": "a", "set": "x"}, {"drafter": "b", "set": "x"}]
    assert joined["command"] == "measure a; measure b" and joined["commit"] == HEAD["commit"]
    assert joined["settings"] == {"seed": 0, "drafters": {"a": "aaaa", "b": "bbbb"}}
    assert joined["complete"] is False and joined["name"] == "growing"
    with pytest.raises(ConfigError, match="a row of a, x"):
        join_results([paths[0], paths[0]], KEY)
    growing(tmp_path / "c", seed=7).put({"drafter": "b", "set": "x"})
    with pytest.raises(ConfigError, match="seed is 0 here and 7 there"):
        join_results([paths[0], tmp_path / "c" / "growing.json"], KEY)
    growing(tmp_path / "d", {"versions": {"python": "3.12"}}).put({"drafter": "b", "set": "x"})
    with pytest.raises(ConfigError, match=r"python is '3\.11\.7' here and '3\.12' there"):
        join_results([paths[0], tmp_path / "d" / "growing.json"], KEY)


def test_files_of_several_temperatures_become_one(tmp_path: Path) -> None:
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        settings = {"temperatures": [temperature], "drafters": {"a": "aaaa"}}
        result = growing(tmp_path / name, **settings)
        result.put({"drafter": "a", "set": name})
        result.finish()
    joined = join_results([tmp_path / name / "growing.json" for name in ("greedy", "sampled")], KEY)
    assert joined["settings"] == {"seed": 0, "temperatures": [0.0, 1.0], "drafters": {"a": "aaaa"}}
    assert joined["complete"] is True and len(joined["rows"]) == 2
