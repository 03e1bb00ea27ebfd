"""What runs inside vLLM's environment, with stubs of the few names that it uses there."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from benchmarks.peers.vllm_worker import COUNTERS, counters, main

PROPOSER, MODEL = "vllm.v1.spec_decode.dflash", "vllm.model_executor.models.qwen3_dflash"
REQUEST = {
    "target": "target",
    "drafter": "drafter",
    "num_draft_tokens": 2,
    "per_layer_key_norm": False,
    "max_model_len": 64,
    "max_tokens": 4,
    "stop_token_ids": [2],
    "prompts": [[5, 6], [7, 8, 9]],
}


@dataclass
class Metric:
    name: str
    value: int


class Proposer:
    def __init__(self) -> None:
        self.positions = torch.tensor([0, 1])

    def propose(self, anchor: int) -> Any:
        self.positions = torch.tensor([anchor, anchor + 1])
        return torch.tensor([[anchor, anchor + 40]])


class Engine:
    made_with: ClassVar[dict[str, Any]] = {}

    def __init__(self, **settings: Any) -> None:
        Engine.made_with = settings
        self.num_steps, self.proposer = 0, Proposer()

    def get_metrics(self) -> list[Any]:
        labels = SimpleNamespace(name="some histogram")
        return [labels, *(Metric(key, self.num_steps * (1 + rank)) for rank, key in enumerate(COUNTERS.values()))]

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, use_tqdm: bool) -> list[Any]:
        (prompt,) = prompts
        self.num_steps += len(prompt["prompt_token_ids"])
        self.proposer.propose(len(prompt["prompt_token_ids"]))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(3, sampling.max_tokens))])]


class DraftModel:
    _rms_norm_eps = 0.0
    _k_norm_weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    def _normalize_context_k(self, keys: Any) -> Any:
        raise AssertionError("not replaced")


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: ModuleType(name) for name in ("vllm", PROPOSER, MODEL)}
    vars(modules["vllm"]).update(LLM=Engine, SamplingParams=SimpleNamespace)
    vars(modules[MODEL])["DFlashQwen3Model"] = type("DFlashQwen3Model", (DraftModel,), {})
    vars(modules[PROPOSER])["DFlashProposer"] = Proposer
    monkeypatch.setattr(Proposer, "propose", Proposer.propose)  # put back what the worker replaces
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def run(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "request.json").write_text(json.dumps(REQUEST | changes))
    main(folder / "request.json", folder / "answer.json")
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return answer


def test_every_prompt_is_served_alone_and_counted(tmp_path: Path) -> None:
    answer = run(tmp_path)
    assert answer["answers"] == [
        {"token_ids": [3, 4], "drafts": [[2, [2, 42]]], "num_steps": 2, "num_accepted": 4},
        {"token_ids": [3, 4], "drafts": [[3, [3, 43]]], "num_steps": 3, "num_accepted": 6},
    ]
    assert Engine.made_with["speculative_config"] == {
        "method": "dflash",
        "model": "drafter",
        "num_speculative_tokens": 2,
    }
    assert Engine.made_with["max_num_seqs"] == 1 and Engine.made_with["dtype"] == "float32"


def test_plain_decoding_has_no_drafter(tmp_path: Path) -> None:
    run(tmp_path, drafter=None)
    assert Engine.made_with["speculative_config"] is None
    assert counters([]) == {"num_steps": 0, "num_accepted": 0}


def test_the_corrected_norm_gives_each_layer_its_own_gains(tmp_path: Path) -> None:
    run(tmp_path, per_layer_key_norm=True)
    model = sys.modules[MODEL].DFlashQwen3Model()
    keys = torch.tensor([3.0, 4.0]).expand(2, 5, 1, 2)  # layers, positions, heads, head size
    unit = torch.tensor([3.0, 4.0]) / 12.5**0.5
    found = model._normalize_context_k(keys)
    assert torch.allclose(found[0, 0, 0], unit * torch.tensor([1.0, 2.0]))
    assert torch.allclose(found[1, 4, 0], unit * torch.tensor([3.0, 4.0]))
