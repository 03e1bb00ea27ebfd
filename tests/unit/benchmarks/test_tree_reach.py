"""Trees on sampled text: which branches join and when, how far a text goes along them, and the whole command."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from benchmarks import tree_reach
from benchmarks.prompt_sets import PromptSet
from benchmarks.tree_reach import Lattice, depths, main, parse
from tests import tiny

from paceline.errors import CompatibilityError
from paceline.models import loading


def log(*shares: float) -> list[float]:
    return [math.log(share) for share in shares]


# Draft 0: 7 or 8; draft 1 after them: 8 is followed by 5 nearly always.
LATTICE = Lattice([[7, 8], [5, 6]], log(0.6, 0.4), [[log(0.5, 0.5), log(0.9, 0.1)]])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ([7, 5, 1], {1: 1, 2: 1, 3: 1, 4: 2, None: 2}),  # joins as 0; its two children, 0.3 each, behind 8 and 8-5
        ([8, 5, 1], {1: 0, 2: 1, 3: 2, 4: 2, None: 2}),  # 0.4, then 0.36
        ([8, 6], {1: 0, 2: 1, 3: 1, 4: 1, None: 2}),  # 0.04 never joins four drafts
        ([9, 5], {1: 0, 2: 0, 3: 0, 4: 0, None: 0}),
        ([7], {1: 1, 2: 1, 3: 1, 4: 1, None: 1}),
        ([], {1: 0, 2: 0, 3: 0, 4: 0, None: 0}),
    ],
)
def test_a_text_goes_along_the_likeliest_branches(text: list[int], found: dict[int | None, int]) -> None:
    assert depths(LATTICE, text, [1, 2, 3, 4]) == found


def test_a_tree_holds_the_likeliest_branches_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(3, generator=generator).log_softmax(-1)
    later = torch.randn(2, 3, 3, generator=generator).log_softmax(-1)
    lattice = Lattice([[10, 11, 12], [20, 21, 22], [30, 31, 32]], first.tolist(), later.tolist())

    def value(branch: tuple[int, ...]) -> float:
        return float(first[branch[0]] + sum(later[k, a, b] for k, (a, b) in enumerate(itertools.pairwise(branch))))

    branches = [branch for depth in (1, 2, 3) for branch in itertools.product(range(3), repeat=depth)]
    best = sorted(branches, key=value, reverse=True)
    for size in (1, 5, 12, 39):
        within = set(best[:size])
        for path in itertools.product(range(3), repeat=3):
            text = [lattice.ids[k][c] for k, c in enumerate(path)]
            expected = sum(path[: depth + 1] in within for depth in range(3))
            assert depths(lattice, text, [size])[size] == expected


def test_table_and_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = tiny.loaded(drafter_family="dflash2")
    prompts = PromptSet("own", tuple(map(tuple, tiny.tiny_prompts([5, 9, 4]))))
    monkeypatch.setattr(loading, "load_target", lambda *_args, **_options: target)
    monkeypatch.setattr(loading, "load_drafter", lambda *_args, **_options: drafter)
    monkeypatch.setattr(tree_reach, "read_sets", lambda *_args, **_options: [prompts])
    arguments = ["--set", "own=x.jsonl", "--drafts", "7", "3", "--max-tokens", "16", "--out", str(tmp_path)]
    assert main([*arguments, "--threads", str(torch.get_num_threads()), "--dtype", "float32"]) == 0
    rows = json.loads((tmp_path / "tree-reach.json").read_text())["rows"]
    assert [(row["kind"], row["drafts"]) for row in rows[:2]] == [("tree", 3), ("tree", 7)]
    assert [row["kind"] for row in rows[2:]] == ["candidates", "chain"]
    small, large, whole, chain = (row["acceptance_length"] for row in rows)
    assert 1 <= small <= large <= whole and chain >= 1
    assert "candidates" in capsys.readouterr().out


def test_what_cannot_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--set", "own=x.jsonl", "--temperature", "0"])
    assert "greedy text is one branch" in capsys.readouterr().err
    target, drafter = tiny.loaded()
    with pytest.raises(CompatibilityError, match="has no selector"):
        tree_reach.lattices(target, drafter, [1, 2, 3], range(1, 2))
