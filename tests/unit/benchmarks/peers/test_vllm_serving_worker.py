"""What runs inside vLLM's environment, with stubs of the few names that it uses there."""

from __future__ import annotations

import importlib
import io
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from benchmarks.peers import vllm_server


@dataclass
class Sampling:
    max_tokens: int
    temperature: float
    ignore_eos: bool
    detokenize: bool
    output_kind: str

    def clone(self) -> Sampling:
        return replace(self)


class Engine:
    """Gives one token per step, the prompt's length."""

    def __init__(self, arguments: Any) -> None:
        self.arguments, self.left = arguments, {}

    @classmethod
    def from_engine_args(cls, arguments: Any) -> Engine:
        return cls(arguments)

    def add_request(self, request_id: str, prompt: dict[str, list[int]], sampling: Sampling) -> None:
        assert sampling.ignore_eos and sampling.temperature == 0.0 and sampling.output_kind == "delta"
        self.left[request_id] = [len(prompt["prompt_token_ids"]), sampling.max_tokens]

    def step(self) -> list[Any]:
        outputs = []
        for name, entry in list(self.left.items()):
            entry[1] -= 1
            outputs.append(
                SimpleNamespace(
                    request_id=name, outputs=[SimpleNamespace(token_ids=[entry[0]])], finished=entry[1] == 0
                )
            )
            if entry[1] == 0:
                del self.left[name]
        return outputs


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    names = ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.llm_engine", "vllm.sampling_params")
    modules = {name: ModuleType(name) for name in names}
    vars(modules["vllm"]).update(EngineArgs=SimpleNamespace, SamplingParams=Sampling)
    vars(modules["vllm.v1.engine.llm_engine"])["LLMEngine"] = Engine
    vars(modules["vllm.sampling_params"])["RequestOutputKind"] = SimpleNamespace(DELTA="delta")
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(Path(vllm_server.__file__).parent)  # as when the file is run as a script
    for name in ("closed_loop", "vllm_worker"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("benchmarks.peers.vllm_serving_worker")


def test_lines_in_and_out(worker: ModuleType) -> None:
    prompts = [[1, 2], [3], [4, 5, 6]]
    requests = [{"model": "m"}, *({"prompts": prompts, "max_tokens": 4, "concurrency": c} for c in (1, 2))]
    out = io.StringIO()
    worker.main([json.dumps(request) for request in requests], out)
    version, *answers = map(json.loads, out.getvalue().splitlines())
    assert list(version) == ["version"] and len(answers) == 2
    for each in answers:
        assert [one["token_ids"] for one in each] == [[len(prompt)] * 4 for prompt in prompts]
        assert all(one["added_s"] <= one["first_s"] <= one["last_s"] for one in each)
