"""The benchmark of streams: every drafter is fed both, every text is counted, and the signs are right."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import stream_swap
from benchmarks.stream_swap import Counts, exit_code, main, make_prompts, make_rows, make_target, parse, swap

from paceline.models import loading

SHAPE = ["--num-layers", "4", "--block-size", "2", "--hidden-size", "32", "--max-tokens", "16", "--threads", "1"]
SMALL = [*SHAPE, "--text", "successors"]
COUNTS: Counts = {
    "attn_res": {"attn_res": [[16, 4], [16, 8], [16, 4]], "prefix": [[16, 8], [16, 8], [16, 16]]},
    "prefix": {"attn_res": [[16, 4], [16, 8], [16, 4]], "prefix": [[16, 8], [16, 8], [16, 16]]},
}


@pytest.mark.parametrize(("text", "family"), [("successors", "dflash"), ("walks", "dspark-latent")])
def test_a_run(text: str, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"lessons": 2, "texts": 16, "prompts": 4, "steps": 4, "draft-tokens": 3}
    options = [part for name, size in sizes.items() for part in (f"--num-{name}", str(size))]
    command = [*SHAPE, "--text", text, *options]
    assert main([*command, "--family", family, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "stream-swap.json").read_text())
    assert [(row["family"], row["trained_on"]) for row in found["rows"]] == [(family, one) for one in COUNTS]
    assert all(row["num_identical"] == row["num_texts"] == 8 for row in found["rows"])
    for row in found["rows"]:
        by_fed = found["counts"][family][row["trained_on"]]
        assert set(by_fed) == set(COUNTS)
        assert all(len(pairs) == 4 and all(steps >= 4 for _, steps in pairs) for pairs in by_fed.values())
    assert "sign_p" in capsys.readouterr().out


def test_own_less_other_whichever_the_own_is() -> None:
    first, second = make_rows("dflash2", COUNTS, {"attn_res": 6, "prefix": 6})
    assert (first["own"], first["other"]) == (48 / 16, 48 / 32)
    assert first["difference"] == pytest.approx((2 + 0 + 3) / 3)
    assert (first["longer"], first["shorter"], first["sign_p"]) == (2, 0, 0.5)
    assert (second["own"], second["other"]) == (48 / 32, 48 / 16)
    assert second["difference"] == pytest.approx(-(2 + 0 + 3) / 3)
    assert (second["longer"], second["shorter"]) == (0, 2)
    assert exit_code([first, second]) == 0
    assert exit_code([first, {**second, "num_identical": 5}]) == 3


def test_every_drafter_is_fed_both_streams_and_a_text_that_differs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[tuple[int, ...]] = [(9, 9), (1, 2), (3, 4)]  # the last two are held out
    prompts = [[5], [6], [7]]
    monkeypatch.setattr(loading, "load_drafter", lambda name, _, *, aux_hidden_stream: (name, aux_hidden_stream))

    def answer(_target: Any, drafter: Any, asked: Any, *_: Any) -> list[Any]:
        assert asked == prompts[1:]
        said = [(1, 2), (3, 5) if drafter == ("b", "attn_res") else (3, 4)]
        length = 2 if drafter in (("a", "attn_res"), ("b", "prefix")) else 1
        return [SimpleNamespace(token_ids=ids, length=length) for ids in said]

    monkeypatch.setattr(stream_swap, "answer", answer)
    monkeypatch.setattr(stream_swap, "counts_of", lambda result: [4 * result.length, 4])
    options = parse([*SMALL, "--num-prompts", "2"])
    target: Any = None
    counts, num_identical = swap(target, {"attn_res": Path("a"), "prefix": Path("b")}, prompts, texts, options)
    assert num_identical == {"attn_res": 4, "prefix": 3}
    rows = make_rows("dflash", counts, num_identical)
    assert [(row["own"], row["other"], row["longer"]) for row in rows] == [(2, 1, 2), (2, 1, 2)]
    assert exit_code(rows) == 3


@pytest.mark.parametrize("text", ["successors", "walks"])
def test_no_text_holds_the_id_that_masks(text: str) -> None:
    options = parse([*SHAPE, "--text", text, "--num-lessons", "1", "--num-texts", "40"])
    target = make_target(options, "plain")
    assert not target.model.lm_head.weight[3].any(), "its logit is 0, and the largest is above"
    assert all(min(prompt) > 3 for prompt in make_prompts(options))


def test_a_target_is_taught_once_for_both_arithmetics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_swap, "_TAUGHT", {})
    options = parse([*SHAPE, "--num-lessons", "2"])
    first = make_target(options, "row_invariant").model
    monkeypatch.setattr(stream_swap, "teach", None)
    second = make_target(options, "plain").model
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    random = make_target(parse([*SHAPE, "--text", "successors"]), "plain").model
    assert not torch.equal(first.layers[0].mlp.down_proj.weight, random.layers[0].mlp.down_proj.weight)
