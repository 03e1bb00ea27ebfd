"""Random load for a long time: does memory stay flat, do the counters agree, does acceptance stay what it was?

    python -m benchmarks.soak --minutes 20
    python -m benchmarks.soak --minutes 1 --target tiny

Users that never stop send requests of one mix through `AsyncEngine`, in random order and at random moments: prompts
of the shipped file, half of them behind one of two shared texts, greedy and sampled with seeds, with and without
drafts, short and long. Some users leave before the end; a pool smaller than what all contexts need makes for
preemptions. Once a second the engine is looked at; once a minute a line tells of that minute.

Exit code 3 if, after the first quarter, resident memory rises by more than 2 %; if counters disagree; or if acceptance
in the last minute is more than 3 % off the first, over the requests of the mix that ended in both.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.command_line import DRAFTER, PROMPTS, TARGET, positive, report, run, say
from benchmarks.prompt_sets import NamedFile, read_set
from benchmarks.results import text_table
from benchmarks.soak_samples import (
    Sample,
    Window,
    acceptance_faults,
    counter_faults,
    memory_faults,
    resident_bytes,
)

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE

if TYPE_CHECKING:
    from paceline.engine.async_engine import AsyncEngine
    from paceline.engine.request import RequestResult, SamplingParameters
    from paceline.models.loading import LoadedDrafter, LoadedTarget

NAME, TINY = "soak", "tiny"
_MIX_SIZE, _SHARED_TOKENS = 48, 150
_SECONDS_PER_WINDOW = 60.0


@dataclass(frozen=True)
class MixEntry:
    """One request of the mix; it comes again and again, always with the same seed."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParameters


@dataclass
class Load:
    """What the users did and saw.

    Attributes:
        began_s: on the monotonic clock.
        seconds: of the whole soak.
        windows: one per minute.
        samples: one per second.
        num_started: requests handed over.
        num_left: of them, given up by their users.
        num_tokens: delivered, as the engine has it.
        problems: ends that nobody asked for.
    """

    began_s: float
    seconds: float
    windows: list[Window] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    num_started: int = 0
    num_left: int = 0
    num_tokens: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began_s

    @property
    def is_over(self) -> bool:
        """Whether nothing new is sent."""
        return self.elapsed_s >= self.seconds

    def take(self, index: int, result: RequestResult) -> None:
        """Count a request that has ended."""
        self.num_tokens += len(result.token_ids)
        if result.finish_reason == "abort":
            return
        if result.finish_reason == "error":
            self.problems.append(f"a request of the mix ended in an error: {result.error}")
        minute = min(int(self.elapsed_s // _SECONDS_PER_WINDOW), max(0, round(self.seconds / _SECONDS_PER_WINDOW) - 1))
        while len(self.windows) <= minute:
            self.windows.append(Window())
        steps = [record for record in result.trace.records if record.num_draft_tokens > 0]
        num_accepted = sum(record.num_accepted for record in steps)
        self.windows[minute].add(index, num_accepted, len(steps), len(result.token_ids))


def main(arguments: Sequence[str]) -> int:
    """Soak, print the minutes and the verdict."""
    options = parse(arguments)
    import torch

    torch.set_num_threads(options.threads)
    target, drafter = load(options)
    mix = make_mix(options, target)
    load_seen, faults = asyncio.run(soak(target, drafter, mix, options))
    rows = [row_of(minute, window, load_seen) for minute, window in enumerate(load_seen.windows)]
    print(text_table(rows))
    for fault in faults:
        print(f"fault: {fault}")
    print("nothing drifted" if not faults else f"{len(faults)} faults")
    facts = [f"{options.target}, {options.minutes:g} minutes, {options.users} users"]
    report(NAME, rows, options, arguments, facts=facts)
    return EXIT_CHECK_SAYS_NO if faults else EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TARGET, help=f"target, or {TINY} for a random one; default {TARGET}")
    parser.add_argument("--draft-model", default=DRAFTER, help=f"drafter; default {DRAFTER}")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--users", type=positive, default=8, help="requests in flight or about to be; default 8")
    parser.add_argument("--slots", type=positive, default=6, help="requests decoded at once; default 6")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads; default 2")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help=f"prompt file; default {PROMPTS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/soak.json")
    return parser.parse_args(arguments)


def load(options: argparse.Namespace) -> tuple[LoadedTarget, LoadedDrafter]:
    """The models; tiny ones are random, their drafters hardly ever right."""
    if options.target == TINY:
        from tests import tiny

        return tiny.loaded("qwen3", drafter_family="dflash2")
    from paceline.models.loading import load_drafter, load_target

    say(f"loading {options.target} in bfloat16")
    target = load_target(options.target, dtype="bfloat16", device="cpu")
    return target, load_drafter(options.draft_model, target)


def make_mix(options: argparse.Namespace, target: LoadedTarget) -> list[MixEntry]:
    """Requests that differ in every respect, the same ones for the same seed."""
    from paceline.engine.request import SamplingParameters

    generator = random.Random(options.seed)
    if options.target == TINY:
        texts = [tuple(generator.randrange(4, 512) for _ in range(generator.randint(4, 40))) for _ in range(24)]
    else:
        file = NamedFile("prompts", options.prompts)
        vocab_size = target.contract.vocab_size
        texts = list(read_set(file, target.tokenizer, vocab_size=vocab_size, limit=24).prompts)
    vocabulary = min(target.contract.vocab_size, 512)
    shared = [tuple(generator.randrange(4, vocabulary) for _ in range(_SHARED_TOKENS)) for _ in range(2)]
    mix = []
    for index in range(_MIX_SIZE):
        head = shared[index // 2 % 2] if index % 2 else ()
        sampled: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": index} if index % 3 == 1 else {}
        sampling = SamplingParameters(
            max_tokens=generator.choice([1, 8, 24, 40, 64]),
            draft_length="off" if index % 8 == 7 else None,
            **sampled,
        )
        mix.append(MixEntry((*head, *texts[index % len(texts)]), sampling))
    return mix


async def soak(
    target: LoadedTarget, drafter: LoadedDrafter, mix: Sequence[MixEntry], options: argparse.Namespace
) -> tuple[Load, list[str]]:
    """Run the load, let the engine come to rest, and judge."""
    from paceline.engine.async_engine import AsyncEngine
    from paceline.engine.engine import Engine, EngineSettings

    longest = max(len(entry.prompt_ids) + entry.sampling.max_tokens for entry in mix) + 32
    block_size = 32
    # Half of what all slots could need at their longest, so that now and then a request has to give way.
    num_blocks = 1 + max(1, options.slots // 2) * (-(-longest // block_size) + 2)
    settings = EngineSettings(
        max_num_seqs=options.slots, max_model_len=longest, block_size=block_size, num_blocks=num_blocks
    )
    generator = random.Random(options.seed + 1)
    async with AsyncEngine(lambda: Engine(target, drafter, settings)) as engine:
        num_free = (await engine.stats()).num_free_blocks
        seen = Load(time.monotonic(), 60.0 * options.minutes)
        users = [_user(engine, mix, seen, random.Random(generator.random())) for _ in range(options.users)]
        await asyncio.gather(_watch(engine, seen), *users)
        while (stats := await engine.stats()).num_running or stats.num_waiting:  # those whose users have left
            await asyncio.sleep(0.05)
    expected = {"num_finished": seen.num_started, "num_aborted": seen.num_left, "num_output_tokens": seen.num_tokens}
    faults = seen.problems + memory_faults(seen.samples) + counter_faults(stats, expected, num_free_at_start=num_free)
    if seen.windows:
        faults += acceptance_faults(seen.windows[0], seen.windows[-1])
    say(f"{stats.num_preemptions} preemptions, {stats.num_hit_tokens} of {stats.num_queried_tokens} tokens hit")
    return seen, faults


async def _user(engine: AsyncEngine, mix: Sequence[MixEntry], seen: Load, generator: random.Random) -> None:
    """Send requests of the mix, one after another, in rounds of random order."""
    order: list[int] = []
    while not seen.is_over:
        if not order:
            order = generator.sample(range(len(mix)), len(mix))
        index = order.pop()
        await asyncio.sleep(generator.expovariate(20.0))
        leaves_after = generator.choice([None] * 11 + [generator.randint(1, 20)])
        name = f"{seen.num_started}"
        seen.num_started += 1
        num_deltas, has_ended = 0, False
        stream = engine.generate(mix[index].prompt_ids, mix[index].sampling, name, priority=generator.choice([0, 0, 1]))
        async for delta in stream:
            num_deltas += 1
            has_ended = delta.finish_reason is not None
            if num_deltas == leaves_after and not has_ended:
                await engine.abort(name)
        result = await engine.take_result(name)
        seen.num_left += result.finish_reason == "abort"
        seen.take(index, result)


async def _watch(engine: AsyncEngine, seen: Load) -> None:
    """Look once a second, and say a line once a minute."""
    num_said = 0
    while not seen.is_over:
        stats = await engine.stats()
        now = seen.elapsed_s
        seen.samples.append(Sample(now, resident_bytes(), stats.num_free_blocks, stats.num_running, stats.num_waiting))
        if now // _SECONDS_PER_WINDOW > num_said:
            num_said += 1
            if len(seen.windows) >= num_said:
                say(str(row_of(num_said - 1, seen.windows[num_said - 1], seen)))
        await asyncio.sleep(min(1.0, max(0.01, seen.seconds - now)))


def row_of(minute: int, window: Window, seen: Load) -> dict[str, object]:
    """A minute of the soak."""
    start, end = minute * _SECONDS_PER_WINDOW, (minute + 1) * _SECONDS_PER_WINDOW
    samples = [sample for sample in seen.samples if start <= sample.second < end]
    return {
        "minute": minute + 1,
        "num_requests": window.num_requests,
        "num_tokens": window.num_tokens,
        "acceptance_length": window.acceptance_length(),
        "rss_mib": max((sample.rss_bytes for sample in samples), default=0) / 2**20,
        "least_free_blocks": min((sample.num_free_blocks for sample in samples), default=0),
        "most_waiting": max((sample.num_waiting for sample in samples), default=0),
    }


if __name__ == "__main__":
    sys.exit(run(main))
