"""`paceline generate` under torchrun: the tokens of one process, told once; and what is not obeyed there is refused."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import wrap_target
from tests.tiny_kimi import k3_tiny_config, kimi_target, kimi_tensors, write_kimi
from tests.tiny_run import write_drafter, write_tokenizer
from tests.unit.cli.launched import launched, under_torchrun
from tests.unit.training.processes import start

from paceline.checkpoint.contract import TargetLayerId
from paceline.cli.generate_ranks import refuse_what_is_not_obeyed
from paceline.configuration.generation import GenerateRun
from paceline.errors import ConfigError

PROMPTS = ("--raw", "-p", "w5 w6 w7", "-p", "w9 w10", "--max-tokens", "6", "--seed", "3", "--temperature", "0.8")
EXACT = ("--linear-mode", "row_invariant", "--dtype", "float32", "--device", "cpu", "--offline")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    config = k3_tiny_config()
    model = kimi_target(config)
    write_kimi(folder / "target", config, kimi_tensors(model))
    write_tokenizer(folder / "target", config["vocab_size"])
    target: Any = wrap_target(model, "row_invariant")  # type: ignore[arg-type]
    ids = (TargetLayerId(1), TargetLayerId(3))
    write_drafter(folder / "drafter", target, aux_hidden_stream="attn_res", target_layer_ids=ids)
    return folder


def launch(folder: Path, *arguments: str) -> tuple[list[int | None], list[str], list[str]]:
    """Exit codes, stdout and stderr of two processes."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(launched, rank, port, folder, arguments, None) for rank in range(2)]
    for process in processes:
        process.join(60)
        process.kill()
    texts = [[(folder / f"{name}-{rank}").read_text() for rank in range(2)] for name in ("out", "err")]
    return [process.exitcode for process in processes], texts[0], texts[1]


@pytest.mark.parametrize("spread", [("--pp", "2"), ("--tp", "2"), ("--pp", "2", "--set", "pipeline_cuts=[3]")])
def test_two_processes_write_one_text(spread: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    target, drafter = str(folder / "target"), ("--draft-model", str(folder / "drafter"))
    codes, out, err = launch(tmp_path / "one", "generate", target, *drafter, *PROMPTS, *EXACT, *spread, "--json")
    assert codes == [0, 0], err
    assert out[1] == "" and err[1] == ""
    told = json.loads(out[0])
    assert told["num_processes"] == 2 and [row["seed"] for row in told["results"]] == [3, 4]
    assert all(row["speculative_decoding"]["num_draft_tokens"] > 0 for row in told["results"])
    codes, out, err = launch(tmp_path / "two", "generate", target, *PROMPTS, *EXACT, *spread)
    assert codes == [0, 0], err
    assert out == ["".join(f"{row['text']}\n" for row in told["results"]), ""]


def test_mistakes_are_told_once(folder: Path, tmp_path: Path) -> None:
    target = str(folder / "target")
    codes, out, err = launch(tmp_path / "size", "generate", target, *PROMPTS, *EXACT, "--pp", "4")
    assert codes == [2, 2] and out == ["", ""]
    assert "take 4 processes; this run has 2" in err[0] and "--nproc-per-node 4" in err[0] and err[1] == ""
    codes, out, err = launch(tmp_path / "cut", "generate", target, *PROMPTS, *EXACT, "--tp", "3")
    assert codes == [2, 2] and "cannot share num_attention_heads 4" in err[0] and err[1] == ""
    codes, out, err = launch(tmp_path / "copies", "generate", target, *PROMPTS, *EXACT)
    assert codes[1] == 2 and out[1] == "" and "nothing says how they share the target" in err[1]


@pytest.mark.parametrize("spread", [("--pp", "2"), ("--tp", "2", "--draft-model", "drafter")], ids=["pp", "tp"])
def test_torchrun_itself(spread: tuple[str, ...], folder: Path) -> None:
    """A thread of the group that is still there when the interpreter ends may end the process by SIGABRT."""
    parts = (str(folder / part) if part == "drafter" else part for part in spread)
    done = under_torchrun("generate", str(folder / "target"), *PROMPTS, *EXACT, *parts, "--json", "-q")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["results"]) == 2
    assert done.stderr.count("threads at exit: none of gloo") == 2, done.stderr


@pytest.mark.parametrize("name", ["bad_words", "stop", "json_object", "compare", "verify_method", "min_tokens"])
def test_what_is_not_obeyed_is_refused(name: str) -> None:
    values = {
        "bad_words": ("x",),
        "stop": ("x",),
        "json_object": True,
        "compare": True,
        "verify_method": "block",
        "min_tokens": 2,
    }
    run = GenerateRun(model="m", draft_model="d", pipeline_parallel_size=2, **{name: values[name]})
    with pytest.raises(ConfigError, match=f"over several processes {name} is not obeyed"):
        refuse_what_is_not_obeyed(run)


def test_what_is_obeyed() -> None:
    refuse_what_is_not_obeyed(GenerateRun(model="m", pipeline_parallel_size=2, temperature=0.5, seed=3, n=4, top_p=0.5))
    refuse_what_is_not_obeyed(GenerateRun(model="m", draft_model="d", verify_method="coupled", spec_tokens=3))


def test_cuts_that_are_not_those_of_the_stages() -> None:
    with pytest.raises(ValueError, match="pipeline_cuts has 1 cuts; pipeline_parallel_size 3 takes 2"):
        GenerateRun(model="m", pipeline_parallel_size=3, pipeline_cuts=(4,))
