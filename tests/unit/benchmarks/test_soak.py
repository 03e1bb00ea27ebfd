"""A few seconds of the soak on tiny models, sound and with planted faults."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import soak as soak_module
from benchmarks.soak import Load, main, make_mix, parse
from benchmarks.soak_samples import Sample
from tests import tiny

from paceline.engine.request import SamplingParameters

ARGUMENTS = ["--target", "tiny", "--threads", "1", "--minutes", "0.05", "--users", "4", "--slots", "3"]


@pytest.fixture(autouse=True)
def _short_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_module, "_MIX_SIZE", 4)
    monkeypatch.setattr(soak_module, "_SHARED_TOKENS", 40)
    monkeypatch.setattr(soak_module, "_SECONDS_PER_WINDOW", 1.0)
    monkeypatch.setattr(torch, "set_num_threads", lambda _number: None)


def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has just started grows."""
    monkeypatch.setattr(soak_module, "memory_faults", lambda _samples: [])


def test_a_sound_engine_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    without_memory(monkeypatch)
    monkeypatch.setattr(soak_module, "acceptance_faults", lambda *_windows: [])  # a second is too short for all
    assert main([*ARGUMENTS, "--out", str(tmp_path)]) == 0
    assert "nothing drifted" in capsys.readouterr().out
    rows = json.loads((tmp_path / "soak.json").read_text())["rows"]
    assert sum(row["num_requests"] for row in rows) > 0 and rows[0]["rss_mib"] > 1


def test_what_drifts_is_told_and_ends_in_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def soaked(*_arguments: Any) -> Any:
        return Load(0.0, 1.0, samples=[Sample(0.0, 1, 1, 1, 1)]), ["memory grew"]

    monkeypatch.setattr(soak_module, "soak", soaked)
    assert main(ARGUMENTS) == 3
    assert "fault: memory grew" in capsys.readouterr().out


def test_a_block_that_does_not_come_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.engine.request_blocks import RequestBlocks

    without_memory(monkeypatch)
    release = RequestBlocks.release
    leaky: list[RequestBlocks] = []  # the canary's engines have some of their own

    def leaks_once(self: RequestBlocks, request: Any, *, is_spoiled: bool) -> None:
        if self not in leaky and request.held.blocks:
            leaky.append(self)
            request.held.blocks.pop()
        release(self, request, is_spoiled=is_spoiled)

    monkeypatch.setattr(RequestBlocks, "release", leaks_once)
    options = parse(ARGUMENTS)
    target, drafter = tiny.loaded("qwen3", drafter_family="dflash2")
    _, faults = asyncio.run(soak_module.soak(target, drafter, make_mix(options, target), options))
    assert any(fault.startswith("num_used_blocks is 1") for fault in faults)


def test_the_mix_is_the_same_for_the_same_seed_and_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_module, "_MIX_SIZE", 48)
    target, _ = tiny.loaded()
    mix = make_mix(parse(ARGUMENTS), target)
    assert mix == make_mix(parse(ARGUMENTS), target)
    samplings: list[SamplingParameters] = [entry.sampling for entry in mix]
    assert {one.temperature for one in samplings} == {0.0, 0.8}
    assert {one.draft_length for one in samplings} == {None, "off"}
    assert len({entry.prompt_ids[:40] for entry in mix if len(entry.prompt_ids) > 40}) >= 2
