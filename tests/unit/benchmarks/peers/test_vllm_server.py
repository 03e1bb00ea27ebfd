"""The way to vLLM's process and back, with a script in place of its Python."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
from benchmarks.peers.vllm_server import VllmServer, environment

from paceline.errors import CheckpointError

STUB = """#!{python}
import json, os, sys
assert sys.argv[1].endswith("vllm_serving_worker.py") and "PYTHONPATH" not in os.environ
arguments = json.loads(sys.stdin.readline())
print("loaded", file=sys.stderr)
if arguments["dtype"] == "wrong":
    print("no such dtype", file=sys.stderr)
    sys.exit(4)
print(json.dumps({{"version": arguments["model"] + os.environ["OMP_NUM_THREADS"]}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    more = [request["max_tokens"], request["concurrency"]]
    times = dict(added_s=0.0, first_s=1.0, last_s=2.0)
    answers = [dict(token_ids=prompt + more, **times) for prompt in request["prompts"]]
    print(json.dumps(answers), flush=True)
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    file = tmp_path / "python"
    file.write_text(STUB.format(python=sys.executable))
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_questions_and_answers(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")
    with VllmServer(python, Path("target"), cores=[3, 5], engine={"dtype": "bfloat16"}) as server:
        assert server.version == "target2"
        for concurrency in (1, 2):
            answers = server.answer([(1, 2), (3,)], max_tokens=7, concurrency=concurrency)
            assert [one.token_ids for one in answers] == [[1, 2, 7, concurrency], [3, 7, concurrency]]
    server.close()


def test_its_failure_is_ours(python: Path) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)code 4:.*no such dtype"):
        VllmServer(python, Path("target"), cores=[0], engine={"dtype": "wrong"})


def test_threads_are_bound_where_its_openmp_is_there(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    assert "LD_PRELOAD" not in environment(python, [0, 1]) or "libiomp" not in environment(python, [0, 1])["LD_PRELOAD"]
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    found = environment(python, [0, 1])
    assert found["LD_PRELOAD"].endswith("libiomp5.so") and found["KMP_AFFINITY"].endswith("proclist=[0,1]")
    assert found["OMP_NUM_THREADS"] == "2"
