"""vLLM on the CPU as a process of its own environment that waits for prompts; it sleeps while others are measured."""

from __future__ import annotations

import json
import os
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.closed_loop import TimedAnswer

from paceline.errors import CheckpointError

WORKER = Path(__file__).with_name("vllm_serving_worker.py")
_NUM_LAST_LINES = 8


class VllmServer:
    """A running vLLM; leaving the context ends it.

    Args:
        python: of its environment.
        folder: target in Hugging Face layout.
        cores: to which its threads are bound.
        engine: more of vLLM's `EngineArgs`.

    Raises:
        CheckpointError: it ended in an error; its last lines are the message.
    """

    def __init__(
        self,
        python: Path,
        folder: Path,
        *,
        cores: Sequence[int],
        engine: Mapping[str, object],
    ) -> None:
        self._log = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed on exit)
        self._process = subprocess.Popen(
            [str(python), str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment(python, cores),
            text=True,
        )
        arguments = {"model": str(folder), "skip_tokenizer_init": True, "enable_prefix_caching": False, **engine}
        try:
            self.version: str = self._ask(arguments)["version"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def answer(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, concurrency: int) -> list[TimedAnswer]:
        """Answer prompts greedily with exactly `max_tokens` tokens each, `concurrency` of them at once."""
        request = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}
        return [TimedAnswer.from_json(one) for one in self._ask({**request, "concurrency": concurrency})]

    def _ask(self, request: Mapping[str, object]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None, "made with pipes"
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            last = "".join(deque(self._log, _NUM_LAST_LINES))
            raise CheckpointError(f"vLLM ended with code {code}:\n{last}")
        return json.loads(line)

    def close(self) -> None:
        """End it; twice does no harm."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()  # the end of its input is the end of its work
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


def environment(python: Path, cores: Sequence[int]) -> dict[str, str]:
    """As vLLM's installation page for x86 asks: Intel's OpenMP preloaded, one thread bound to each core.

    In one process: with a process for the scheduler and one for the model, two cores would be shared by three. vLLM
    binds threads only in processes that it starts itself, so the same variables are set here.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "OMP_"))}
    found = {
        **inherited,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(len(cores)),
    }
    library = python.absolute().parent.parent / "lib" / "libiomp5.so"
    if library.is_file():
        found |= {
            "LD_PRELOAD": ":".join(filter(None, [inherited.get("LD_PRELOAD"), str(library)])),
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
            "KMP_BLOCKTIME": "5",  # milliseconds of waiting before a thread sleeps
            "KMP_TPAUSE": "0",
        }
    return found
