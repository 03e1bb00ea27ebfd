"""A scheduler without a device: real pool and queue, tables and planes that only write down what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.fakes import ByteTokenizer

from paceline.engine.blocks import BlockPool
from paceline.engine.output import RequestOutput
from paceline.engine.prefix_chain import PrefixIdentity
from paceline.engine.request_blocks import RequestBlocks
from paceline.engine.running import RunningRequest
from paceline.engine.sampling import SamplingParameters
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.scheduler import Scheduler
from paceline.trace.step import RequestTrace

SIZE = 4
LOOKAHEAD = 4


class FakeTables:
    """Blocks by slot."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}

    def assign(self, slot: int, blocks: Sequence[int]) -> None:
        self.blocks[slot] = list(blocks)

    def append(self, slot: int, blocks: Sequence[int]) -> None:
        self.blocks[slot] += blocks

    def clear(self, slot: int) -> None:
        self.blocks[slot] = []


class FakePlanes:
    """What was copied and cleared; `bad` blocks hold NaN."""

    def __init__(self) -> None:
        self.copies: list[tuple[list[int], list[int]]] = []
        self.cleared: list[int] = []
        self.bad: set[int] = set()

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        self.copies.append((list(source), list(target)))

    def clear(self, blocks: Sequence[int]) -> None:
        self.cleared += blocks

    def are_finite(self, blocks: Sequence[int]) -> bool:
        return self.bad.isdisjoint(blocks)


class Bench:
    """A scheduler over a pool of so many blocks, and a clock of launched steps."""

    def __init__(
        self,
        num_blocks: int,
        *,
        num_slots: int = 4,
        wants_runs: bool = False,
        reads_ahead: bool = False,
        prefix_cache: bool = True,
        context_limit: int = 0,
        **settings: Any,
    ) -> None:
        self.last_step = 0
        self.pool = BlockPool(num_blocks + 1, SIZE, prefix_cache=prefix_cache)
        self.tables, self.planes = FakeTables(), FakePlanes()
        self.blocks = RequestBlocks(
            self.pool,
            self.tables,
            self.planes,
            lookahead=LOOKAHEAD,
            identity=PrefixIdentity("target", "drafter", reads_ahead=reads_ahead),
            wants_runs=wants_runs,
            context_limit=context_limit,
            fence=lambda: self.last_step,
        )
        self.scheduler = Scheduler(self.blocks, num_slots=num_slots, **settings)

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> RunningRequest:
        """Queue a request."""
        sampling = SamplingParameters(max_tokens=max_tokens)
        output = RequestOutput(ByteTokenizer(), sampling, max_tokens=max_tokens, target_stop_ids=())
        trace = RequestTrace(name, len(prompt))
        flags = SamplingFlags.of([sampling])
        request = RunningRequest(
            name, tuple(prompt), sampling, 0, output, trace, flags, **({"is_drafted": True} | fields)
        )
        self.scheduler.add(request)
        return request

    def prefill(self, request: RunningRequest, first: int = 100) -> None:
        """Run its whole text; a new one gets its first token."""
        request.num_prefilled = request.prefill_goal
        if not request.is_resumed:
            request.output.extend([first])
        self.blocks.publish(request)

    def start(self, name: str, prompt: Sequence[int], **fields: Any) -> RunningRequest:
        """Queue, admit and prefill; it has to fit."""
        request = self.add(name, prompt, **fields)
        assert self.scheduler.admit() is request
        self.prefill(request)
        return request

    def extend(self, request: RunningRequest, count: int) -> None:
        """Deliver tokens."""
        request.output.extend(range(101, 101 + count))
        self.blocks.publish(request)

    def finish(self, request: RunningRequest, **options: bool) -> None:
        """End it."""
        self.scheduler.remove(request, **({"is_spoiled": False} | options))

    def check(self) -> None:
        """Every used block has the owners that know of it, and tables say the same."""
        held = [block for request in self.scheduler.running for block in request.held.blocks]
        for block in range(1, self.pool.num_blocks):
            assert self.pool.references(block) == held.count(block), block
        for request in self.scheduler.running:
            assert request.slot is not None
            assert self.tables.blocks[request.slot] == request.held.blocks
        for request in self.scheduler.waiting:
            assert request.slot is None and request.held.blocks == []
