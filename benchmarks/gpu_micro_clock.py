"""How GPU micro-benchmarks take time: replays of one CUDA graph between events. On a CPU, for a trial, a wall clock.

Calls that follow each other in a stream wait for each other, so the time of one is that of a node in a captured step,
drain and dispatch included. Data that is read comes in as many copies as it takes to exceed the L2 cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
Row = dict[str, object]

_L2_BYTES = 60 * 2**20  # where torch does not say
_CACHES = 3  # as many times the cache pass between two reads of the same bytes
_MOST_COPIES = 400
FLOAT32_FLOPS = 67e12  # of an H200's ordinary units, by its datasheet


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median over replays, and the range of the middle eight tenths."""

    us: float
    p10_us: float
    p90_us: float


@dataclass
class Ceilings:
    """What the device reaches at best; `gpu_micro`'s first part measures both.

    Attributes:
        bytes_per_s: of a large copy, read and written.
        flops: of a large bf16 product.
    """

    bytes_per_s: float = 4.3e12
    flops: float = 790e12

    def floor_us(self, num_bytes: float, num_flops: float = 0.0, flops: float | None = None) -> float:
        """The larger of both times; `flops` is the rate of the units in question, if not that of bf16 products."""
        return max(num_bytes / self.bytes_per_s, num_flops / (flops or self.flops)) * 1e6


class GraphClock:
    """Times calls on one device.

    Args:
        device: CUDA, or a CPU, where times mean nothing.
        num_replays: of each graph; the median counts.
    """

    def __init__(self, device: torch.device, num_replays: int = 20) -> None:
        self.device, self.num_replays = device, num_replays
        self.is_real = device.type == "cuda"

    def copies(self, num_bytes: int) -> int:
        """Into how many copies data of this size must be laid out so that no read finds it in the L2 cache."""
        if not self.is_real:
            return 2
        size = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0) or _L2_BYTES
        return min(_MOST_COPIES, max(2, math.ceil(_CACHES * size / max(1, num_bytes))))

    def time(self, calls: Sequence[Call], num_replays: int | None = None) -> Timing:
        """Time all calls as one graph, and divide by their number."""
        num_replays = num_replays or self.num_replays
        if not self.is_real:
            began_s = time.perf_counter()
            for call in calls:
                call()
            us = (time.perf_counter() - began_s) / len(calls) * 1e6
            return Timing(us, us, us)
        graph = self.capture(calls)
        for _ in range(3):
            graph.replay()
        times = [self._between_events(graph.replay) for _ in range(num_replays)]
        per_call = sorted(us / len(calls) for us in times)
        tenth = len(per_call) // 10
        return Timing(statistics.median(per_call), per_call[tenth], per_call[-1 - tenth])

    def time_alone(self, call: Call, num_rounds: int = 10) -> Timing:
        """Time one long call between events, without a graph: in one, a copy becomes a node of another, slower kind."""
        if not self.is_real:
            return self.time([call])
        for _ in range(3):
            call()
        times = sorted(self._between_events(call) for _ in range(num_rounds))
        return Timing(statistics.median(times), times[0], times[-1])

    def capture(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        """One graph of all calls, each of which was run before."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph

    def host_us(self, call: Call, num_calls: int, num_rounds: int = 5) -> float:
        """What the host spends per call while the device has room for it: the median over rounds."""
        rounds = []
        for _ in range(num_rounds + 1):  # the first one warms up
            self.synchronize()
            began_s = time.perf_counter()
            for _ in range(num_calls):
                call()
            rounds.append((time.perf_counter() - began_s) / num_calls * 1e6)
        self.synchronize()
        return statistics.median(rounds[1:])

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_real:
            torch.cuda.synchronize(self.device)

    def _between_events(self, call: Call) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) * 1e3


@dataclass
class Bench:
    """What every case gets.

    Attributes:
        clock: takes times.
        ceilings: for floors.
    """

    clock: GraphClock
    ceilings: Ceilings

    @property
    def device(self) -> torch.device:
        """Where cases run."""
        return self.clock.device

    @property
    def is_real(self) -> bool:
        """Whether times mean something."""
        return self.clock.is_real

    def measure(
        self,
        calls: Sequence[Call],
        *,
        num_bytes: float,
        num_flops: float = 0.0,
        flops: float | None = None,
        num_replays: int | None = None,
    ) -> Row:
        """Time of a call beside its floor, and the rates that it amounts to.

        Args:
            calls: of the same kind, on different copies.
            num_bytes: of one: every input that counts read once, every result written once.
            num_flops: of one.
            flops: rate of the units that do them, if not that of bf16 products.
            num_replays: fewer where one takes long.
        """
        return self.row(self.clock.time(calls, num_replays), num_bytes, num_flops, flops)

    def row(self, timing: Timing, num_bytes: float, num_flops: float = 0.0, flops: float | None = None) -> Row:
        """The same of a time that was taken otherwise."""
        floor_us = self.ceilings.floor_us(num_bytes, num_flops, flops)
        return {
            "us": timing.us,
            "p10_us": timing.p10_us,
            "p90_us": timing.p90_us,
            "floor_us": floor_us,
            "ratio": timing.us / floor_us if floor_us else None,
            "gb_per_s": num_bytes / timing.us * 1e-3,
            "tflops": num_flops / timing.us * 1e-6 if num_flops else None,
        }


@dataclass(frozen=True)
class MicroCase:
    """One measurement.

    Attributes:
        part: which of the benchmark's parts it belongs to.
        name: within it.
        size: rows of an operation, or nodes of a graph; None where there is nothing to say.
        run: measures; a row's `error` is how far a result is from what is right, beside `allowed`.
    """

    part: str
    name: str
    size: int | None
    run: Callable[[Bench], Row]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|, NaN where any value is."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))
