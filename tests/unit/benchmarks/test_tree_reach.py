"""Trees on sampled text: which branches join and when, how far a text goes along them, and the whole command."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import tree_reach
from benchmarks.prompt_sets import PromptSet
from benchmarks.tree_reach import Lattice, depths, main, parse
from tests import tiny

from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParameters
from paceline.errors import CompatibilityError
from paceline.models import loading
from paceline.training.serving_pass import ServingPass


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


def test_a_table_has_a_row_per_token_before() -> None:
    """As the walk scores them: after each candidate of the draft before, from the block's own states and the anchor."""
    target, drafter = tiny.loaded(drafter_family="dflash2")
    model = tree_reach.require_selector(drafter)
    selector, (text,) = model.candidate_selector, tiny.tiny_prompts([9])
    anchors = range(4, 8)
    served = ServingPass(target, drafter, max_tokens=len(text) + 1)(text, anchors)
    for anchor, lattice, hidden_KD in zip(
        anchors, tree_reach.lattices(target, drafter, text, anchors), served.hidden_AKD, strict=True
    ):
        logits_KV = model.logits(hidden_KD, target.model)
        for k, before in enumerate([[text[anchor]], *lattice.ids[:-1]]):
            ids = lattice.ids[k]
            assert set(ids) == set(logits_KV[k].topk(len(ids)).indices.tolist())
            for row, token in enumerate(before):
                edge = selector.predecessor_codebook[token] * selector.hidden_projection(hidden_KD[k])
                scores = logits_KV[k, ids] + selector.successor_codebook[ids] @ edge
                table = lattice.first if k == 0 else lattice.later[k - 1][row]
                assert table == pytest.approx(scores.log_softmax(0).tolist(), abs=1e-4)


def test_steps_are_counted_as_texts_are_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer 1 2 3 4 5 6 behind prompt 9: two drafts a block, the best branch right behind 1 and 4, wrong behind 3."""
    tables = [log(0.9, 0.1), log(0.9, 0.1)]
    right = Lattice([[2, 8], [3, 8]], log(0.9, 0.1), [tables])
    wrong = Lattice([[8, 7], [8, 7]], log(0.9, 0.1), [tables])
    last = Lattice([[5, 8], [6, 8]], log(0.9, 0.1), [tables])
    by_anchor = {1: right, 2: wrong, 3: wrong, 4: last, 5: last}
    asked: list[float] = []

    def lattices(target: Any, drafter: Any, ids: list[int], anchors: range) -> list[Lattice]:
        assert ids == [9, 1, 2, 3, 4, 5, 6] and list(anchors) == [1, 2, 3, 4, 5]
        return [by_anchor[anchor] for anchor in anchors]

    def serve(engine: Engine, prompts: Any, samplings: list[SamplingParameters], label: str) -> list[SimpleNamespace]:
        asked.extend(sampling.temperature for sampling in samplings)
        # As delivered: the last step of the chain kept two drafts, and the budget cut one token off.
        records = [
            SimpleNamespace(emitted_ids=(2, 3, 4), num_accepted=2),
            SimpleNamespace(emitted_ids=(5, 6), num_accepted=2),
        ]
        return [SimpleNamespace(token_ids=(1, 2, 3, 4, 5, 6), trace=SimpleNamespace(records=records))]

    monkeypatch.setattr(tree_reach, "lattices", lattices)
    monkeypatch.setattr(tree_reach, "serve", serve)
    target, drafter = tiny.loaded(drafter_family="dflash2")
    options = parse(["--set", "own=x.jsonl", "--drafts", "1", "2", "--temperature", "0.5"])
    rows = tree_reach.set_rows(PromptSet("own", ((9,),)), target, drafter, options)
    # One draft: 2 is right, so 3 is the target's; 4 after a miss; 5 is right, so 6. Two drafts: 2, 3, then 4; 5, 6.
    assert [(row["acceptance_length"], row["steps"]) for row in rows] == [
        (5 / 3, 3),
        (5 / 2, 2),
        (5 / 2, 2),
        (5 / 2, 2),
    ]
    assert asked == [0.5, 0.5]


def test_what_cannot_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--set", "own=x.jsonl", "--temperature", "0"])
    assert "greedy text is one branch" in capsys.readouterr().err
    _, drafter = tiny.loaded()
    with pytest.raises(CompatibilityError, match="has no selector"):
        tree_reach.require_selector(drafter)
    with pytest.raises(SystemExit):
        parse(["--set", "own=x.jsonl", "--max-tokens", "1"])
    assert "at least 2" in capsys.readouterr().err
