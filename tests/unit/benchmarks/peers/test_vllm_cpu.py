"""Our side of the comparison with vLLM, with a script in place of its Python."""

from __future__ import annotations

import argparse
import dataclasses
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.peers import vllm_cpu
from benchmarks.peers.cases import PreparedDrafter, PreparedTarget
from benchmarks.peers.folders import read_tensors
from benchmarks.peers.script import our_results
from benchmarks.peers.vllm_cpu import answers_of_peer, drafted_row, norm_all_keys_as_the_first_layer, plain_row
from safetensors.torch import load_file, save_file
from tests import tiny
from tests.tiny_run import write_drafter

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.errors import CheckpointError

STUB = """#!{python}
import json, os, sys
from pathlib import Path
request = json.loads(Path(sys.argv[2]).read_text())
assert Path(sys.argv[1]).name == "vllm_worker.py" and "PYTHONPATH" not in os.environ
request["threads"], request["offline"] = os.environ["OMP_NUM_THREADS"], os.environ["HF_HUB_OFFLINE"]
Path(sys.argv[3]).write_text(json.dumps({{"version": "0", "answers": [request]}}))
print("a last word")
sys.exit({code})
"""


def stub(folder: Path, code: int = 0) -> argparse.Namespace:
    file = folder / "python"
    file.write_text(STUB.format(python=sys.executable, code=code))
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return argparse.Namespace(vllm_python=file, max_tokens=9, threads=1)


def prepared(folder: Path) -> PreparedTarget:
    target, _ = tiny.loaded(linear_mode="plain")
    return PreparedTarget("tiny", folder, target, tuple(map(tuple, tiny.tiny_prompts([5, 7]))))


def test_request_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")
    version, (request,) = answers_of_peer(prepared(tmp_path), tmp_path / "d", 5, stub(tmp_path), is_corrected=True)
    assert version == "0"
    assert request["drafter"] == str(tmp_path / "d") and request["num_draft_tokens"] == 5
    assert request["per_layer_key_norm"] and request["stop_token_ids"] == [tiny.EOS_ID]
    assert request["max_model_len"] >= 7 + 9 + 6 and request["max_tokens"] == 9
    assert [len(prompt) for prompt in request["prompts"]] == [5, 7]
    assert (request["threads"], request["offline"]) == ("1", "1")


def test_its_failure_is_ours(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="code 7:\na last word"):
        answers_of_peer(prepared(tmp_path), None, 0, stub(tmp_path, code=7))


def answers_like(results: list[RequestResult]) -> list[dict[str, Any]]:
    """What vLLM would answer if it did exactly the same."""
    answers = []
    for result in results:
        records = result.trace.records
        drafts = [(record.anchor_position, list(record.proposed_ids)) for record in records]
        last = records[-1]
        drafts.append((last.anchor_position + last.num_verified_accepted + 1, [0] * last.num_draft_tokens))
        accepted = sum(record.num_verified_accepted for record in records)
        answers.append(
            {"token_ids": list(result.token_ids), "drafts": drafts, "num_steps": len(records), "num_accepted": accepted}
        )
    return json.loads(json.dumps(answers))


def drafted() -> list[RequestResult]:
    target, drafter = tiny.loaded()
    sampling = SamplingParameters(max_tokens=12, ignore_eos=True)
    return Engine(target, drafter, EngineSettings(max_num_seqs=1)).generate(tiny.tiny_prompts([5, 6]), sampling)


def test_equal_answers() -> None:
    results = drafted()
    row = drafted_row(results, answers_like(results), 7, version="0", drafter="d", target="t")
    assert row["as_expected"] and row["same_proposals"] and row["num_same_text"] == 2
    assert row["acceptance_ours"] == row["acceptance_peer"]


@pytest.mark.parametrize(("num_more", "as_expected"), [(0, True), (5, False)])
def test_acceptance_may_be_two_per_cent_off(num_more: int, as_expected: bool) -> None:
    results = drafted()
    answers = answers_like(results)
    answers[0]["num_accepted"] += num_more
    answers[0]["drafts"][0][1][0] += 1
    row = drafted_row(results, answers, 7, version="0", drafter="d", target="t")
    assert row["as_expected"] is as_expected and not row["same_proposals"]


def test_its_key_norm_in_ours_changes_drafts_and_no_text(tmp_path: Path) -> None:
    """A drafter whose layers have different gains drafts otherwise; one whose gains are the same does not."""
    target, _ = tiny.loaded(linear_mode="plain")
    prompts = tiny.tiny_prompts([9, 12])
    for spread, is_same in ((0.0, True), (1.5, False)):
        folder = write_drafter(tmp_path / str(spread), target, fingerprint=False)
        tensors = load_file(folder / "model.safetensors")
        for layer in range(2):
            gain = tensors[f"layers.{layer}.self_attn.k_norm.weight"]
            gain.copy_(1.0 + layer * spread * torch.linspace(-1, 1, gain.numel()))
        save_file(tensors, folder / "model.safetensors")
        honest, planted = (
            our_results(target, folder, prompts, 12, **plant)
            for plant in ({}, {"plant": norm_all_keys_as_the_first_layer})
        )
        assert [result.token_ids for result in honest] == [result.token_ids for result in planted]
        drafts = [[record.proposed_ids for r in found for record in r.trace.records] for found in (honest, planted)]
        assert (drafts[0] == drafts[1]) is is_same


def test_rows_say_whose_the_fault_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM as it is is not held against us; ours with its fault, and vLLM without it, are."""
    target, _ = tiny.loaded(linear_mode="plain")
    prepared_target = PreparedTarget("tiny", tmp_path, target, tuple(map(tuple, tiny.tiny_prompts([5, 7]))))
    folder = write_drafter(tmp_path / "d", target, fingerprint=False)
    contract, tensors = read_tensors(folder)
    monkeypatch.setattr(vllm_cpu, "prepare_target", lambda *_: prepared_target)
    monkeypatch.setattr(vllm_cpu, "folded_dflash", lambda *_: PreparedDrafter("d", contract, tensors))

    def peer(_: Any, drafter: Path | None, *__: Any, is_corrected: bool = False) -> tuple[str, list[dict[str, Any]]]:
        results = our_results(target, drafter, prepared_target.prompts, 12)
        answers = answers_like(results) if drafter is not None else [{"token_ids": list(r.token_ids)} for r in results]
        if drafter is not None and not is_corrected:
            answers[0]["num_accepted"] += 5
        return "0", answers

    monkeypatch.setattr(vllm_cpu, "answers_of_peer", peer)
    options = argparse.Namespace(threads=torch.get_num_threads(), model="m", max_tokens=12)
    rows = list(vllm_cpu.rows(options))
    assert [(row["drafter"], row["as_expected"]) for row in rows] == [
        ("none", True),
        ("d", None),
        ("d, its key norm in ours too", False),
        ("d, per-layer key norm", True),
    ]


def test_plain_texts_must_be_the_same() -> None:
    target, _ = tiny.loaded(linear_mode="plain")
    results = our_results(target, None, tiny.tiny_prompts([4, 5]), 6)
    answers = [{"token_ids": list(result.token_ids)} for result in results]
    assert plain_row(results, answers, version="0", target="t")["as_expected"]
    other = dataclasses.replace(results[0], token_ids=(*results[0].token_ids[:-1], 0))
    row = plain_row([other, results[1]], answers, version="0", target="t")
    assert not row["as_expected"] and row["num_same_text"] == 1
