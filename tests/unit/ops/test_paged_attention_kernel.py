"""The kernel of attention over blocks against the formula in float64: what it may not read, how it shares a context."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.unit.ops.paged_cases import make_case
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops import paged_attention_kernel as kernels
from paceline.ops.paged_attention import paged_attention_reference
from paceline.ops.paged_attention_kernel import Launch, choose_launch, choose_parts, paged_attention_triton

SMALL = Launch(queries=16, keys=16, warps=4, stages=2, least_turns=1, alone_turns=1)


@pytest.fixture(autouse=True)
def _nan_in_what_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_room_for_sums", full_of_nan)


def full_of_nan(num_sums: int, device: torch.device) -> Tensor:
    """A workspace holds anything at first."""
    return torch.full((num_sums,), torch.nan, dtype=torch.float32, device=device)


def check(
    device: torch.device,
    starts: list[int],
    num_rows: int,
    num_parts: int | None,
    *,
    launch: Launch | None = SMALL,
    run: Callable[..., Tensor] = paged_attention_triton,
    **form: Any,
) -> None:
    """Every row of every request; twice where programs share: counters are back at zero behind a launch."""
    case = make_case(starts, num_rows, **form)
    expected = case.expected()[: len(starts)]
    dtype = case.q_BTNH.dtype
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    # Both at the same time in memory: else the second may find the first's numbers where it writes none.
    is_shared = num_parts is None or num_parts > 1
    options = {
        "num_parts": num_parts,
        "launch": launch,
        "arrivals": kernels.new_arrivals(device) if is_shared else None,
    }
    both = [run(*case.arguments(device), **options) for _ in range(1 + is_shared)]
    assert options["arrivals"] is None or not options["arrivals"].any()
    found = [each.cpu()[: len(starts)] for each in both]
    assert found[0].dtype == dtype and found[0].is_contiguous()
    torch.testing.assert_close(found[0].double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(found[0], found[-1])


@pytest.mark.parametrize("num_parts", [1, 8])
@pytest.mark.parametrize("window", [None, 15, 16, 17, 48])
@pytest.mark.parametrize("form", [{}, {"has_tail": True}, {"has_tail": True, "is_causal": False}], ids=str)
def test_windows_tails_and_masks(
    kernel_device: torch.device, num_parts: int, window: int | None, form: dict[str, Any]
) -> None:
    check(kernel_device, [70, 0], 5, num_parts, window=window, **form)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 8, 16])
def test_any_number_of_parts_gives_the_same(kernel_device: torch.device, num_parts: int) -> None:
    """Most of them have nothing to do for a context of five."""
    check(kernel_device, [200, 5, 0], 3, num_parts)


@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("form", [{}, {"has_tail": True, "is_causal": False}], ids=["causal", "tail"])
def test_context_that_begins_late_and_sinks(kernel_device: torch.device, num_parts: int, form: dict[str, Any]) -> None:
    for window in (None, 30):
        check(kernel_device, [70, 33], 4, num_parts, firsts=[37, 33], has_sink=True, window=window, **form)


@pytest.mark.parametrize("num_parts", [1, 4])
def test_rows_of_padding_disturb_nobody(kernel_device: torch.device, num_parts: int) -> None:
    """Three requests in a bucket of eight: the others run in the trash slot, on whatever block 0 holds."""
    check(kernel_device, [40, 17, 3], 2, num_parts, num_trash=5)
    check(kernel_device, [40, 17, 3], 2, num_parts, num_trash=5, has_tail=True)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_a_turn_and_a_block_need_not_be_alike(kernel_device: torch.device, block_size: int) -> None:
    for keys in (16, 64):
        launch = Launch(queries=32, keys=keys, warps=4, stages=2, least_turns=1, alone_turns=1)
        check(kernel_device, [130, 63], 7, 2, launch=launch, block_size=block_size, window=40)
        check(kernel_device, [130, 63], 7, 2, launch=launch, block_size=block_size, has_tail=True)


def test_long_prompts_go_in_tiles_of_rows(kernel_device: torch.device) -> None:
    check(kernel_device, [21], 37, 1, num_kv_heads=1, num_heads=3)
    check(kernel_device, [21], 37, 4, num_kv_heads=1, num_heads=3, window=19)


@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 1, "num_kv_heads": 1, "head_size": 24},
        {"num_heads": 9, "num_kv_heads": 3, "head_size": 64, "block_size": 64},
        {"num_heads": 4, "num_kv_heads": 1, "head_size": 80, "block_size": 32},
    ],
    ids=str,
)
def test_what_is_chosen_for_a_shape(kernel_device: torch.device, shape: dict[str, Any]) -> None:
    # The interpreter multiplies matrices of bf16 as if they were integers.
    narrow = torch.float16 if kernel_device.type == "cpu" else torch.bfloat16
    for dtype in (torch.float32, narrow):
        check(kernel_device, [300, 9], 2, None, launch=None, dtype=dtype, scale=0.1, **shape)


def test_queries_may_lie_beside_keys_and_values(kernel_device: torch.device) -> None:
    case = make_case([33, 8], 3)
    q, *rest = case.arguments(kernel_device)
    beside = torch.full((2, 3, 10, 16), torch.nan, device=kernel_device)
    beside[:, :, :6] = q
    for view in (beside[:, :, :6], q.transpose(2, 3).contiguous().transpose(2, 3)):
        assert not view.is_contiguous()
        found = paged_attention_triton(view, *rest, num_parts=2, launch=SMALL)
        torch.testing.assert_close(found.double().cpu(), case.expected(), rtol=2e-6, atol=2e-6)


def test_numbers_of_requests_may_be_columns(kernel_device: torch.device) -> None:
    case = make_case([33, 8], 3)
    arguments = list(case.arguments(kernel_device))
    columns = torch.stack((arguments[3], arguments[4]), dim=1)
    arguments[3], arguments[4] = columns.unbind(1)
    found = paged_attention_triton(*arguments, num_parts=1, launch=SMALL)
    torch.testing.assert_close(found.double().cpu(), case.expected(), rtol=2e-6, atol=2e-6)


def test_blocks_of_other_sizes_are_refused() -> None:
    for block_size in (8, 24):
        with pytest.raises(ShapeError, match="blocks of 16, 32, 64"):
            paged_attention_triton(*make_case([5], 1, block_size=block_size).arguments())


def test_a_launch_follows_from_shapes() -> None:
    bf16 = torch.bfloat16
    assert choose_launch(3, 3, 64, bf16) == choose_launch(48, 3, 64, bf16) == Launch(16, 128, 8, 3)
    assert choose_launch(4, 8, 128, bf16) == choose_launch(64, 8, 128, bf16) == Launch(16, 128, 8, 2)
    few, many, long = (
        choose_launch(4, 256, 128, bf16),
        choose_launch(48, 96, 64, bf16),
        choose_launch(4096, 8, 128, bf16),
    )
    assert (few.queries, few.keys, few.warps) == (16, 64, 4), "memory is what everybody waits for"
    assert (many.queries, many.keys, many.warps) == (64, 128, 4), "many requests: a key is read once"
    assert (long.queries, long.keys, long.warps) == (128, 64, 8)
    assert choose_launch(64, 256, 128, bf16) == Launch(64, 32, 4, 3, 8, 16, 132), "three of a kind at once"
    assert choose_launch(64, 248, 128, bf16).keys == choose_launch(33, 64, 128, bf16).keys == 64
    assert choose_launch(64, 512, 512, bf16).queries * 512 <= 128 * 128
    alone = choose_launch(3, 3, 64, bf16)
    assert choose_parts(3, 2**15, 3 * 64, alone) == 32, "few programs: as many parts as there may be"
    assert choose_parts(3, 384, 3 * 64, alone) == 1 and choose_parts(3, 385, 3 * 64, alone) > 1
    assert choose_parts(96, 2**15, 48 * 64, many) == 2 and choose_parts(256, 2**15, 64 * 128, alone) == 1
    assert choose_parts(8, 2**15, 64 * 128, alone) == 16, "as many sums as one may join"


PLANTED = {
    "a row sees one key too many": ("    high = position\n", "    high = position + 1\n"),
    "a window is one short": (
        "low = tl.maximum(first, position - window + 1)",
        "low = tl.maximum(first, position - window + 2)",
    ),
    "windows are forgotten in rows": (
        "low = tl.maximum(first, position - window + 1)",
        "low = tl.maximum(first, 0 * position)",
    ),
    "stale keys reach the sum": ("is_key = key < end ", "is_key = key < end + 64 "),
    "context begins at 0": ("        first = tl.load(first_ptr + request).to(tl.int32)\n", "        first = 0\n"),
    "a block's own rows are read from the cache": (
        "tl.where(key < start, values_at",
        "tl.where(key <= start, values_at",
    ),
    "the tail of another request": ("head * tail_size + request * num_rows - start", "head * tail_size - start"),
    "a causal tail is not": ("if HAS_TAIL and not IS_CAUSAL:", "if HAS_TAIL:"),
    "sinks are forgotten": ("    if HAS_SINK:\n", "    if HAS_SINK and False:\n"),
    "the last part is left out": (
        "for other in tl.range(0, num_active, num_stages",
        "for other in tl.range(0, num_active - 1, num_stages",
    ),
    "parts are not weighed": ("tl.exp2(found - raised)", "tl.exp2(0.0 * found)"),
    "counters are left as they are": ("tl.store(counter_ptr + group, 0)", "tl.store(counter_ptr + group, 1)"),
    "idle parts are read": ("tl.range(0, num_active, num_stages", "tl.range(0, tl.num_programs(2), num_stages"),
    "groups are mixed up": ("q_at += (row * q_row_stride + query % GROUP", "q_at += (row * q_row_stride + query % 2"),
}


@contextmanager
def planted(folder: Path, old: str, new: str) -> Iterator[ModuleType]:
    """The kernel's file with a fault in it, as a module of its own."""
    text = Path(kernels.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} is in the file once"
    file = folder / "planted_kernel.py"
    file.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("planted_kernel", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "planted_kernel", module)  # dataclasses look it up
        spec.loader.exec_module(module)
        patch.setattr(module, "_room_for_sums", full_of_nan)
        yield module


def check_all(device: torch.device, run: Callable[..., Tensor], launch: Any) -> None:
    """One case of each kind."""
    torch.manual_seed(0)
    check(device, [70, 5], 3, 4, run=run, launch=launch, window=30, firsts=[50, 0], has_sink=True)
    check(device, [70, 5], 3, 4, run=run, launch=launch, has_tail=True)
    check(device, [40, 5], 3, 1, run=run, launch=launch, has_tail=True, is_causal=False, window=9)


@pytest.mark.parametrize("fault", [None, *PLANTED])
def test_planted_faults_are_found(kernel_device: torch.device, fault: str | None, tmp_path: Path) -> None:
    old, new = PLANTED[fault] if fault is not None else ("import math\n", "import math\n")
    with planted(tmp_path, old, new) as module, nullcontext() if fault is None else pytest.raises(AssertionError):
        check_all(kernel_device, module.paged_attention_triton, module.Launch(**vars(SMALL)))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128)], ids=str)
def test_real_sizes_agree_with_the_definition(heads: tuple[int, int, int], num_rows: int) -> None:
    N, M, H = heads
    device = torch.device("cuda")
    for batch, longest in ((1, 1024), (8, 1024), (32, 1024), (1, 8192), (8, 8192)):
        starts = torch.randint(longest // 2, longest, (batch,), device=device)
        starts[0] = longest
        num_columns = -(-(longest + num_rows) // 64)
        planes = torch.randn(2, M, 1 + batch * num_columns, 64, H, dtype=torch.bfloat16, device=device)
        table = torch.zeros(batch + 1, num_columns, dtype=torch.int32, device=device)
        table[:batch] = 1 + torch.randperm(batch * num_columns, device=device).view(batch, -1)
        slots = torch.arange(batch, device=device)
        q = torch.randn(batch, num_rows, N, H, dtype=torch.bfloat16, device=device)
        tail = torch.randn(2, M, 1, batch * num_rows, H, dtype=torch.bfloat16, device=device)
        for form in ((None, None, None, True), (None, None, 700, True), (tail, None, None, False)):
            arguments = (q, planes, table, slots, starts, *form, None, H**-0.5)
            expected = paged_attention_reference(q.float(), planes.float(), *arguments[2:5], *wide(form), None, H**-0.5)
            found = [paged_attention_triton(*arguments, num_parts=parts) for parts in (None, None, 1, 8)]
            for each in found:
                torch.testing.assert_close(each.float(), expected, rtol=2**-7, atol=2**-9)
            assert torch.equal(found[0], found[1]), "whoever arrives last joins in the same order"


def wide(form: tuple[Any, ...]) -> tuple[Any, ...]:
    tail, *rest = form
    return (None if tail is None else tail.float(), *rest)


@pytest.mark.gpu
def test_a_recorded_launch_follows_lengths_slots_and_tables() -> None:
    device = torch.device("cuda")
    case = make_case([500, 20, 7], 4, head_size=64, block_size=64, spare_columns=40)
    arguments = list(case.arguments(device))
    run = [paged_attention_triton(*arguments)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = paged_attention_triton(*arguments)
    graph.replay()
    assert torch.equal(found, run[0])
    for start in ([0, 501, 130], [63, 64, 65]):
        other = make_case(start, 4, head_size=64, block_size=64, spare_columns=40)
        other.table = torch.nn.functional.pad(other.table, (0, arguments[2].shape[1] - other.table.shape[1]))
        arguments[1][:, :, : other.planes.shape[2]].copy_(other.planes[:, :, : arguments[1].shape[2]])
        for place, value in ((0, other.q_BTNH), (2, other.table), (3, other.slots_B), (4, other.starts_B)):
            arguments[place].copy_(value)
        graph.replay()
        torch.testing.assert_close(found.double().cpu(), other.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_planes_of_more_than_2_to_the_31_cells() -> None:
    device = torch.device("cuda")
    num_blocks = 2**31 // (2 * 8 * 64 * 128) * 3
    planes = torch.full((2, 8, num_blocks, 64, 128), torch.nan, dtype=torch.bfloat16, device=device)
    table = torch.tensor([[num_blocks - 1, 1, num_blocks - 2, 3]], dtype=torch.int32, device=device)
    planes[:, :, table[0].long()] = torch.randn(2, 8, 4, 64, 128, dtype=torch.bfloat16, device=device)
    q = torch.randn(1, 4, 32, 128, dtype=torch.bfloat16, device=device)
    slots, starts = torch.zeros(2, 1, dtype=torch.int64, device=device) + torch.tensor([[0], [250]], device=device)
    found = paged_attention_triton(q, planes, table, slots, starts, None, None, None, True, None, 0.1)
    small = planes[:, :, table[0].long()].contiguous()
    order = torch.arange(4, dtype=torch.int32, device=device)[None]
    expected = paged_attention_triton(q, small, order, slots, starts, None, None, None, True, None, 0.1)
    assert torch.equal(found, expected)
