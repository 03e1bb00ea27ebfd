"""Runs inside vLLM's own environment, which has no paceline: answers prompts in a closed loop and times the tokens.

    python vllm_serving_worker.py < REQUESTS > ANSWERS

One JSON object a line, both ways. The first has the `EngineArgs` of vLLM and is answered with its version; each other
one has `prompts`, `max_tokens` and `concurrency`, and is answered with one timed answer per prompt.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import IO, Any

from closed_loop import Piece, TimedAnswer, closed_loop  # a script's own folder is on its path
from vllm_worker import vllm_version


def main(requests: Iterable[str], answers: IO[str]) -> None:
    """Answer until the input ends."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    lines = iter(requests)
    engine = LLMEngine.from_engine_args(EngineArgs(**json.loads(next(lines))))
    say(answers, {"version": vllm_version()})
    for line in lines:
        say(answers, [answer.to_json() for answer in answer_prompts(engine, json.loads(line))])


def answer_prompts(engine: Any, request: dict[str, Any]) -> list[TimedAnswer]:
    """Greedy answers of exactly `max_tokens` tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=request["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    prompts = request["prompts"]

    def add(index: int) -> None:
        engine.add_request(str(index), {"prompt_token_ids": prompts[index]}, sampling.clone())

    def step() -> list[Piece]:
        return [(int(one.request_id), list(one.outputs[0].token_ids), one.finished) for one in engine.step()]

    return closed_loop(len(prompts), request["concurrency"], add, step)


def say(answers: IO[str], value: object) -> None:
    """One line."""
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    # Whatever vLLM prints goes to stderr; the way out is ours alone, and no process that it starts inherits it.
    way_out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(sys.stdin, way_out)
