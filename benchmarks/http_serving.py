"""Servers of the OpenAI API side by side: the same prompts, closed loops of 1, 4 and 16 requests, whole and streamed.

    paceline serve smollm2-135m-instruct --port 8001 --threads 2 --no-prefix-cache &
    paceline serve smollm2-135m-instruct --draft-model drafters/smollm2-135m-instruct-dflash2 --port 8002 \\
        --threads 2 --no-prefix-cache &
    python -m benchmarks.http_serving --server plain=http://127.0.0.1:8001 \\
        --server adaptive=http://127.0.0.1:8002 --out docs/results

Any server will do: one that runs elsewhere, or vLLM's, in an environment of its own, of a folder that
`python -m benchmarks.http_serving --export FOLDER` writes:

    LD_PRELOAD=vllm/lib/libiomp5.so VLLM_CPU_KVCACHE_SPACE=1 vllm/bin/vllm serve FOLDER --port 8003 \\
        --served-model-name smollm2-135m-instruct --dtype bfloat16 --max-model-len 2048 --max-num-seqs 16 \\
        --no-enable-prefix-caching

The first one named is what the others are compared with. Threads of the servers are the business of who starts them.

Greedy, every answer of exactly `--max-tokens` tokens, prompts as token ids, so all do the same work. Each server warms
up, then all answer the same prompts in turn, in an order that reverses from round to round. Servers that wait meanwhile
should not compute. The client runs here, on the same cores where servers are local, and takes its share of them.

`tokens_per_second` is all tokens over all time, of all rounds. `ratio` is the median over prompts of how much sooner an
answer is whole than the first server's, with a 95 % bootstrap interval; `total_ratio` is that of `tokens_per_second`.
`ttft_ms_p50` is the median time to the first chunk with text of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.command_line import PROMPTS, make_parser, positive, report, run, say
from benchmarks.paired_speeds import bootstrap_median
from benchmarks.prompt_sets import NamedFile, read_set
from benchmarks.results import Row, text_table

from paceline.benching.load import run_load
from paceline.benching.records import AnswerRecord, Question
from paceline.benching.server_setup import ServerOptions, ServerSetUp
from paceline.errors import EXIT_DONE, DataError
from paceline.evaluation.prompts import Prompt

NAME = "http-serving"
_NUM_WARM_UP_TOKENS = 12
_PROMPTS_PER_SLOT = 3  # so that a loop is full for most of its time


@dataclass(frozen=True)
class Answer:
    """One answer of a server.

    Attributes:
        num_tokens: by its usage.
        total_s: from asking to the end.
        first_s: to the first chunk with text; None of a whole answer.
    """

    num_tokens: int
    total_s: float
    first_s: float | None = None


@dataclass(frozen=True)
class Loop:
    """One closed loop over all prompts."""

    answers: Sequence[Answer]
    total_s: float


def main(arguments: Sequence[str]) -> int:
    """Measure all servers, print one table, write the result if asked for."""
    options = parse(arguments)
    if options.export is not None:
        from benchmarks.peers.folders import export_target

        export_target(options.model, options.export)
        return EXIT_DONE
    servers = dict(options.server)
    prompts = read_prompts(options)
    rows: list[Row] = []
    for concurrency, is_streamed in itertools.product(options.concurrency, (False, True)):
        loops = measure(servers, prompts, concurrency, options, is_streamed=is_streamed)
        rows += rows_of(loops, concurrency, is_streamed=is_streamed)
    print(text_table(rows))
    report(NAME, rows, options, arguments, facts=[f"{options.max_tokens} tokens"])
    return EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = make_parser(__doc__, has_drafter=False)
    parser.add_argument(
        "--server", type=named_url, action="append", default=[], metavar="NAME=URL", help="a server; repeatable"
    )
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="write the target for another server, and end")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help=f"prompt file; default {PROMPTS}")
    parser.add_argument("--num-prompts", type=positive, default=16, help="per round and server, at least; default 16")
    parser.add_argument("--max-tokens", type=positive, default=64, help="of every answer; default 64")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=positive, default=2, help="of each server; default 2")
    options = parser.parse_args(arguments)
    if options.export is None and not options.server:
        parser.error("--server names what is to be measured")
    if len(dict(options.server)) < len(options.server):
        parser.error("two servers have the same name")
    return options


def named_url(text: str) -> tuple[str, str]:
    """Argument type: NAME=URL."""
    name, separator, url = text.partition("=")
    if not name or not separator or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=http://host:port")
    return name, url.rstrip("/").removesuffix("/v1")


def read_prompts(options: argparse.Namespace) -> list[list[int]]:
    """The prompts as ids, as many as the largest loop needs; a short file is read again from its start."""
    from paceline.checkpoint.locate import locate_target
    from paceline.checkpoint.target_config import read_target_contract
    from paceline.checkpoint.tokenizer import open_tokenizer

    path = locate_target(options.model)
    found = read_set(
        NamedFile("prompts", options.prompts),
        open_tokenizer(path),
        vocab_size=read_target_contract(path, options.model).vocab_size,
        limit=options.num_prompts,
    ).prompts
    return [list(prompt) for prompt in found]


def measure(
    servers: Mapping[str, str],
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    options: argparse.Namespace,
    *,
    is_streamed: bool,
) -> dict[str, list[Loop]]:
    """Warm every server up, then ask them there and back again."""
    num_prompts = max(options.num_prompts, _PROMPTS_PER_SLOT * concurrency)
    asked = list(itertools.islice(itertools.cycle(prompts), num_prompts))
    loops: dict[str, list[Loop]] = {name: [] for name in servers}
    for url in servers.values():
        ask_all(url, asked[:concurrency], min(_NUM_WARM_UP_TOKENS, options.max_tokens), concurrency, is_streamed)
    for round_index in range(options.rounds):
        names = list(servers)
        for name in names if round_index % 2 == 0 else reversed(names):
            loop = ask_all(servers[name], asked, options.max_tokens, concurrency, is_streamed)
            loops[name].append(loop)
            kind = "streams" if is_streamed else "whole answers"
            say(f"{name}, {concurrency} at once, {kind}: {speed_of([loop]):.0f} tokens per second")
    return loops


def ask_all(url: str, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int, is_streamed: bool) -> Loop:
    """One closed loop, over the load generator and the client of `paceline bench`.

    Raises:
        DataError: the server refuses a request, or gives another number of tokens.
        ServerError: it is out of reach.
    """
    options = ServerOptions(
        sampling={"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}, is_streamed=is_streamed
    )
    questions = [Question(index, Prompt(str(index), token_ids=tuple(ids))) for index, ids in enumerate(prompts)]
    records: list[AnswerRecord] = []

    async def run_loop() -> float:
        setup = ServerSetUp(url, url, None, options)

        async def ask(question: Question) -> AnswerRecord:
            record = await setup.ask(question)
            if record.error is not None:
                raise DataError(f"{url}: {record.error}")
            if record.num_tokens != max_tokens:
                raise DataError(f"{url} gave {record.num_tokens} tokens where {max_tokens} were asked for")
            return record

        try:
            await setup.prepare()
            return await run_load(questions, ask, records, concurrency=concurrency)
        finally:
            await setup.close()

    total_s = asyncio.run(run_loop())
    records.sort(key=lambda record: record.index)
    return Loop([Answer(max_tokens, record.total_s, record.first_s) for record in records], total_s)


def speed_of(loops: Sequence[Loop]) -> float:
    """All tokens over all time."""
    return sum(answer.num_tokens for loop in loops for answer in loop.answers) / sum(loop.total_s for loop in loops)


def rows_of(loops: Mapping[str, Sequence[Loop]], concurrency: int, *, is_streamed: bool) -> list[Row]:
    """One row per server; the first is the base of all ratios."""
    base = next(iter(loops.values()))
    rows: list[Row] = []
    for name, found in loops.items():
        ratios = [theirs / ours for ours, theirs in zip(seconds_of(found), seconds_of(base), strict=True)]
        low, high = bootstrap_median(ratios)
        firsts = [answer.first_s for loop in found for answer in loop.answers if answer.first_s is not None]
        rows.append(
            {
                "server": name,
                "concurrency": concurrency,
                "streamed": is_streamed,
                "tokens_per_second": speed_of(found),
                "ratio": float(np.median(ratios)),
                "low": low,
                "high": high,
                "total_ratio": speed_of(found) / speed_of(base),
                "ttft_ms_p50": 1e3 * statistics.median(firsts) if firsts else None,
                "num_prompts": len(found[0].answers),
            }
        )
    return rows


def seconds_of(loops: Sequence[Loop]) -> list[float]:
    """How long each prompt's answer took, over all rounds."""
    return [sum(each.total_s for each in answers) for answers in zip(*(loop.answers for loop in loops), strict=True)]


if __name__ == "__main__":
    sys.exit(run(main))
