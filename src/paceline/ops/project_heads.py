"""From rows to heads in one launch: a norm's factor, q/k/v projection, q/k norms, rotation, keys and values stored.

    [q, k, v] = f * (x @ W^T) + bias
    q, k      = turn( round( q / sqrt(mean(q^2) + eps) * q_gain ), position )      (without q/k norms: turn(round(q)))

f is 1, or the factor of a norm that rows were prepared for (`skinny_product.ScaledRows`). Sums are float32; heads are
rounded to the rows' dtype once and turned with cosines and sines in that dtype, exactly as `turn_heads` does. A program
takes pairs of channels that are turned together, the first of each pair in one run of outputs, the second in another,
so that both pairings are the same arithmetic. Where heads are normed it takes a whole one. Channels that are not turned
make pairs as well.
T rows (at most 64 in the kernel), D width, N query heads, M key/value heads, H head size, R pairs that are turned,
S partial sums of squares, X = (N + 2M) * H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.begin_run import begin_run
from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.heads import Cells, HeadForm, check_heads, finish_heads_reference, heads_launch
from paceline.ops.skinny_launch import skinny_launch
from paceline.ops.skinny_product import check_product, load_squares, multiply_reference, norm_factor, product_of_run
from paceline.ops.skinny_tile import Tile, choose_tile


def project_heads_reference(
    x_TD: Tensor,
    squares_TS: Tensor | None,
    weight_XD: Tensor,
    bias_X: Tensor | None,
    qk_gains: tuple[Tensor, Tensor] | None,
    turns_T2R: Tensor,
    cells: Cells,
    form: HeadForm,
) -> Tensor:
    """The definition."""
    qkv_TX = multiply_reference(x_TD, weight_XD, squares_TS, form.eps)
    if bias_X is not None:
        qkv_TX = qkv_TX + bias_X.float()
    return finish_heads_reference(qkv_TX, qk_gains, turns_T2R, cells, form, x_TD.dtype)


@kernel
def _project_heads_kernel(
    x_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    q_gain_ptr: tl.tensor,
    k_gain_ptr: tl.tensor,
    turn_ptr: tl.tensor,
    row_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    q_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_squares: tl.tensor,
    side_stride: tl.tensor,
    head_stride: tl.tensor,
    eps: tl.tensor,
    value_scale: tl.tensor,
    SQUARES: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TURNED: tl.constexpr,
    IS_NEOX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_QK_NORM: tl.constexpr,
    CUT: tl.constexpr,
) -> None:
    PAIRS: tl.constexpr = HEAD_SIZE // 2
    RUNS: tl.constexpr = (PAIRS + CUT.outputs - 1) // CUT.outputs
    run = tl.program_id(0)
    head = run // RUNS
    pair = run % RUNS * CUT.outputs + tl.arange(0, CUT.outputs)
    is_pair = pair < PAIRS
    is_turned = pair < TURNED
    pair = tl.minimum(pair, PAIRS - 1)
    # Channels past the turned ones are paired as halves, whichever pairing the turned ones have.
    if IS_NEOX:
        channel = tl.where(is_turned, pair, pair + TURNED)
        other_channel = tl.where(is_turned, pair + TURNED, pair + PAIRS)
    else:
        channel = tl.where(is_turned, 2 * pair, pair + TURNED)
        other_channel = tl.where(is_turned, 2 * pair + 1, pair + PAIRS)
    output = (head * HEAD_SIZE + channel).to(tl.int64)
    other_output = (head * HEAD_SIZE + other_channel).to(tl.int64)
    held = begin_run(weight_ptr, output, other_output, CUT)
    row = tl.arange(0, CUT.rows)
    is_row = row < num_rows
    dtype = q_ptr.dtype.element_ty
    is_turned_head = head < NUM_HEADS + NUM_KV_HEADS
    stored_at = tl.load(row_ptr + row, mask=is_row, other=0)
    turn_at = turn_ptr + row[:, None] * (2 * TURNED) + pair[None, :]
    reads = is_row[:, None] & is_turned[None, :] & is_turned_head
    cosine = tl.load(turn_at, mask=reads, other=1.0)
    sine = tl.load(turn_at + TURNED, mask=reads, other=0.0)
    bias = tl.load(bias_ptr + output, mask=is_pair & HAS_BIAS, other=0.0)
    other_bias = tl.load(bias_ptr + other_output, mask=is_pair & HAS_BIAS, other=0.0)
    gains = q_gain_ptr if head < NUM_HEADS else k_gain_ptr
    gain = tl.load(gains + channel, mask=is_pair & HAS_QK_NORM, other=1.0)
    other_gain = tl.load(gains + other_channel, mask=is_pair & HAS_QK_NORM, other=1.0)
    squares = load_squares(squares_ptr, num_rows, num_squares, CUT.rows, SQUARES)
    first, second, is_last = product_of_run(
        x_ptr, weight_ptr, parts_ptr, counter_ptr, output, other_output, held, num_rows, CUT
    )
    is_cell = is_row[:, None] & is_pair[None, :] & is_last
    if HAS_SQUARES:
        factor = norm_factor(squares, eps, CUT.width)
        first *= factor
        second *= factor
    if HAS_BIAS:
        first += bias.to(tl.float32)[None, :]
        second += other_bias.to(tl.float32)[None, :]
    if is_turned_head:
        if HAS_QK_NORM:
            of_head = tl.where(is_pair[None, :], first * first + second * second, 0.0)
            of_head = tl.rsqrt(tl.sum(of_head, axis=1) / HEAD_SIZE + eps)[:, None]
            first *= of_head * gain.to(tl.float32)[None, :]
            second *= of_head * other_gain.to(tl.float32)[None, :]
        first = first.to(dtype).to(tl.float32)
        second = second.to(dtype).to(tl.float32)
        cosine = cosine.to(dtype).to(tl.float32)
        sine = sine.to(dtype).to(tl.float32)
        turned = (first * cosine).to(dtype).to(tl.float32) - second * sine
        second = (second * cosine).to(dtype).to(tl.float32) + first * sine
        first = turned
    else:
        first = first.to(dtype).to(tl.float32) * value_scale
        second = second.to(dtype).to(tl.float32) * value_scale
    if head < NUM_HEADS:
        at = q_ptr + (row.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_SIZE
    else:
        side = (head - NUM_HEADS) // NUM_KV_HEADS
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        plane = planes_ptr + side.to(tl.int64) * side_stride + kv_head.to(tl.int64) * head_stride
        at = plane + stored_at[:, None] * HEAD_SIZE
    tl.store(at + channel[None, :], first.to(dtype), mask=is_cell)
    tl.store(at + other_channel[None, :], second.to(dtype), mask=is_cell)


def project_heads_triton(
    x_TD: Tensor,
    squares_TS: Tensor | None,
    weight_XD: Tensor,
    bias_X: Tensor | None,
    qk_gains: tuple[Tensor, Tensor] | None,
    turns_T2R: Tensor,
    cells: Cells,
    form: HeadForm,
    *,
    tile: Tile | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Launch one program per run of pairs and part."""
    num_rows, width = x_TD.shape
    head_size = cells.planes.shape[4]
    x_TD = x_TD.contiguous()
    whole_head = max(32, triton.next_power_of_2(head_size))
    if tile is None:
        least = 32 if qk_gains is None else whole_head
        tile = choose_tile(num_rows, weight_XD.shape[0], width, least_outputs=least)
    tile = tile._replace(outputs=min(tile.outputs, whole_head) if qk_gains is None else whole_head)
    num_runs = weight_XD.shape[0] // head_size * triton.cdiv(head_size, tile.outputs)
    heads = heads_launch(x_TD, qk_gains, turns_T2R, cells, form)
    launch = skinny_launch(tile, num_runs, x_TD, squares_TS, weight_XD, bias_X, counters, is_pair=True)
    with torch.cuda.device_of(x_TD):
        _project_heads_kernel[launch.grid](
            *launch.operands,
            *heads.operands,
            *launch.workspace,
            *heads.numbers,
            **heads.constants,
            **launch.constants,
        )
    return heads.q_TNH


def project_heads(
    x_TD: Tensor,
    squares_TS: Tensor | None,
    weight_XD: Tensor,
    turns_T2R: Tensor,
    cells: Cells,
    form: HeadForm,
    *,
    bias_X: Tensor | None = None,
    qk_gains: tuple[Tensor, Tensor] | None = None,
    tile: Tile | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Queries of rows, whose keys and values are stored on the way.

    Args:
        x_TD: rows, scaled where a norm comes before; at most `skinny_tile.LARGEST_ROWS` on a GPU.
        squares_TS: float32, of that norm; None where there is none.
        weight_XD: contiguous, in the rows' dtype; queries, then keys, then values.
        turns_T2R: float32, rows of `rotary_table` at the rows' positions.
        cells: where keys and values go.
        form: what is done with the heads.
        bias_X: of the projection.
        qk_gains: of the norms of each query head and each key head, [H] each; None where there are none.
        tile: how the product is cut, by default from `choose_tile`.
        counters: from `skinny_launch.new_counters`; without, a launch that needs some makes them.
    Returns:
        [T, N, H] in the rows' dtype.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    check_product(x_TD, weight_XD, bias_X, squares_TS)
    check_heads(weight_XD.shape[0], x_TD.shape[0], turns_T2R, cells, form)
    run = choose("project_heads", x_TD, project_heads_reference, project_heads_triton)
    if run is project_heads_reference:
        return project_heads_reference(x_TD, squares_TS, weight_XD, bias_X, qk_gains, turns_T2R, cells, form)
    return project_heads_triton(
        x_TD, squares_TS, weight_XD, bias_X, qk_gains, turns_T2R, cells, form, tile=tile, counters=counters
    )
