"""What a launch costs: the host per eager call and per replay, the device per node of a graph whose nodes depend on
each other, with and without programmatic dependent launch.

A relay of N nodes: each program adds what its own weights come to, to half of what its neighbour had before. So every
node needs all of its predecessor, and a node that starts too early is found out. With dependent launch a node may start
while its predecessor runs, read its weights, and wait only then.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from benchmarks.gpu_micro_clock import Bench, Call, MicroCase, Row, relative_error

from paceline.ops.dispatch import kernel, tl

PART = "launches"
NUM_NODES = (100, 500, 1000)
_WIDTH = 576
_PROGRAMS, _CELLS = 132, 4096  # 8 KB of bf16 weights per program, 1.08 MB per node: a projection of a small model
VARIANTS = {
    # waits on the device, before or after the weights are read; lets the next node start early
    "plain": (False, False, False),
    "dependent, waits first": (True, False, False),
    "dependent, reads first": (True, True, False),
    "dependent, reads first, starts next early": (True, True, True),
}


@kernel
def _relay_kernel(
    source_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    target_ptr: tl.tensor,
    WAITS: tl.constexpr,
    READS_FIRST: tl.constexpr,
    STARTS_NEXT: tl.constexpr,
    CELLS: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    if STARTS_NEXT:
        tl.extra.cuda.gdc_launch_dependents()
    if WAITS and not READS_FIRST:
        tl.extra.cuda.gdc_wait()
    total = tl.sum(tl.load(weight_ptr + program * CELLS + tl.arange(0, CELLS)).to(tl.float32), axis=0)
    if WAITS and READS_FIRST:
        tl.extra.cuda.gdc_wait()
    neighbour = (program + 1) % tl.num_programs(0)
    tl.store(target_ptr + program, tl.load(source_ptr + neighbour) * 0.5 + total)


def launch_cases() -> Iterator[MicroCase]:
    """All cases of this part."""
    yield MicroCase(PART, "host, eager add", None, _eager_add)
    yield MicroCase(PART, "host, eager product", None, _eager_product)
    yield MicroCase(PART, "host, eager Triton", None, _eager_triton)
    for num_nodes in NUM_NODES:
        yield MicroCase(PART, "node, add of 576", num_nodes, partial(_add_nodes, num_nodes))
    for num_nodes in NUM_NODES:
        yield MicroCase(PART, "host, replay", num_nodes, partial(_replay_cost, num_nodes))
    for cells in (16, _CELLS):
        for name in VARIANTS:
            for num_nodes in NUM_NODES if cells == _CELLS else NUM_NODES[-1:]:
                case = f"node, Triton {name}, {cells * 2 * _PROGRAMS // 1000} kB"
                yield MicroCase(PART, case, num_nodes, partial(_relay, name, cells, num_nodes))


def _eager_add(bench: Bench) -> Row:
    x = torch.zeros(_WIDTH, device=bench.device)
    return {"us": bench.clock.host_us(lambda: x.add_(1.0), 200)}


def _eager_product(bench: Bench) -> Row:
    x, weight = (torch.randn(size, _WIDTH, device=bench.device) for size in (16, _WIDTH))
    y = torch.empty(16, _WIDTH, device=bench.device)
    return {"us": bench.clock.host_us(lambda: torch.mm(x, weight, out=y), 200)}


def _eager_triton(bench: Bench) -> Row:
    calls, _ = relay("plain", 16, 2, bench.device)
    return {"us": bench.clock.host_us(calls[0], 200 if bench.is_real else 1)}


def _add_nodes(num_nodes: int, bench: Bench) -> Row:
    x = torch.zeros(_WIDTH, device=bench.device)
    timing = bench.clock.time([lambda: x.add_(1.0)] * num_nodes)
    return {"us": timing.us, "p10_us": timing.p10_us, "p90_us": timing.p90_us}


def _replay_cost(num_nodes: int, bench: Bench) -> Row:
    x = torch.zeros(_WIDTH, device=bench.device)
    calls: list[Call] = [lambda: x.add_(1.0)] * num_nodes
    if not bench.is_real:
        return {"us": bench.clock.host_us(lambda: [call() for call in calls], 1)}
    graph = bench.clock.capture(calls)
    return {"us": bench.clock.host_us(graph.replay, 1, num_rounds=30)}


def _relay(name: str, cells: int, num_nodes: int, bench: Bench) -> Row:
    num_nodes = num_nodes if bench.is_real else 3
    calls, check = relay(name, cells, num_nodes, bench.device)
    row = bench.measure(calls, num_bytes=cells * 2 * _PROGRAMS)
    return {**row, "error": check(), "allowed": 1e-4}


def relay(name: str, cells: int, num_nodes: int, device: torch.device) -> tuple[list[Call], Call]:
    """The calls of a relay, the first of which starts it anew, and what says how far its end is from what is right."""
    waits, reads_first, starts_next = VARIANTS[name] if device.type == "cuda" else (False, False, False)
    programs = _PROGRAMS if device.type == "cuda" else 3
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.randn(num_nodes, programs, cells, dtype=torch.bfloat16, device=device, generator=generator)
    zeros = torch.zeros(programs, device=device)
    values = torch.full((num_nodes, programs), torch.nan, device=device)
    more = {"launch_pdl": True} if waits else {}

    def call(node: int) -> None:
        source = values[node - 1] if node else zeros
        _relay_kernel[(programs,)](
            source,
            weights[node],
            values[node],
            WAITS=waits,
            READS_FIRST=reads_first,
            STARTS_NEXT=starts_next,
            CELLS=cells,
            **more,
        )

    def error() -> float:
        totals = weights.double().sum(-1)
        value = torch.zeros(programs, dtype=torch.float64, device=device)
        for total in totals:
            value = value.roll(-1) * 0.5 + total
        return relative_error(values[-1], value)

    return [partial(call, node) for node in range(num_nodes)], error
