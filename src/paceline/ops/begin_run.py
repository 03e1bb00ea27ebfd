"""How a program of a product of few rows begins (`skinny_product.py`): the weight is constant, so it is asked for, or
read, before the launch ahead has ended; then the program waits for that.
"""

from __future__ import annotations

from paceline.ops.dispatch import kernel, tl


@kernel
def _prefetch(weight_ptr: tl.tensor, output: tl.tensor, CUT: tl.constexpr) -> None:
    # Asks for the beginning of weight rows in the L2 cache; nothing is waited for.
    NUM_BYTES: tl.constexpr = CUT.chunk * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    address = (weight_ptr + output[:, None] * CUT.width + (tl.arange(0, CUT.chunks) * CUT.chunk)[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, tl.full(address.shape, NUM_BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@kernel
def _hold(
    weight_ptr: tl.tensor, output: tl.tensor, CUT: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr
) -> tl.tensor:
    # [slices, SIZE, outputs], of each slice the inputs from FIRST on. They go to shared memory as they come.
    within = FIRST + tl.arange(0, SIZE)[None, :, None]
    start = (tl.arange(0, CUT.slices) * CUT.part)[:, None, None]
    is_input = (within < CUT.part) & (start + within < CUT.width)
    return tl.load(weight_ptr + output[None, None, :] * CUT.width + start + within, mask=is_input, other=0.0)


@kernel
def begin_run(weight_ptr: tl.tensor, output: tl.tensor, other_output: tl.tensor, CUT: tl.constexpr) -> tl.tensor:
    """Wait for the launch ahead, where this one may begin before that has ended; the weight is asked for meanwhile.

    The weight is constant. All else may be an earlier launch's to write, or to read, until the wait is over. So the
    launch behind may begin at any time; it cannot get before what the pass began with, which lets nobody begin before
    its own wait is over. Begun at once, launches that wait pile up until they fill the multiprocessors; begun behind
    the wait, one waits at a time. What the end of a kernel needs is best read right behind the wait: it arrives while
    the product runs.

    Args:
        weight_ptr: [outputs, width].
        output: int64 [outputs], rows of the weight.
        other_output: as many more, for a pair.
        CUT: `skinny_launch.Cut`.
    Returns:
        What is held, for `product_of_run`: both pieces of a run, and of the other.
    """
    if CUT.begins == 1:
        tl.extra.cuda.gdc_launch_dependents()
    held, held_rest, other_held, other_rest = 0, 0, 0, 0
    if CUT.is_held:
        held = _hold(weight_ptr, output, CUT, 0, CUT.block)
        if CUT.rest > 0:
            held_rest = _hold(weight_ptr, output, CUT, CUT.block, CUT.rest)
        if CUT.is_pair:
            other_held = _hold(weight_ptr, other_output, CUT, 0, CUT.block)
            if CUT.rest > 0:
                other_rest = _hold(weight_ptr, other_output, CUT, CUT.block, CUT.rest)
    if CUT.begins > 0:
        if CUT.chunk > 0:
            first = tl.minimum(tl.program_id(1) * CUT.part, CUT.width - CUT.chunks * CUT.chunk)
            _prefetch(weight_ptr + first, output, CUT)
            if CUT.is_pair:
                _prefetch(weight_ptr + first, other_output, CUT)
        tl.extra.cuda.gdc_wait()
        if CUT.begins == 2:
            tl.extra.cuda.gdc_launch_dependents()
    return held, held_rest, other_held, other_rest
