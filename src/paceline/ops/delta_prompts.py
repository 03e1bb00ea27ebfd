"""Which kernel takes a prompt's rows on a GPU: row by row, in our chunks, or in fla-core's where that is installed.

    recurrent   the kernel of decoding, a turn per row: the bits of `verify_delta`, however a text is cut
    chunks      `ops/delta_chunks.py`, a turn per 16 rows, one launch; bounded gates alone
    fla         `ops/delta_fla.py`, chunks of 64 in parallel, 16 bits inside, a dozen launches

Which is faster depends on the rows of a pass, and how a prompt's pass is launched: not from a recording, so that the
host's time counts. On an H200 (docs/results/gpu-recurrent.json; `eager_us`, 32 heads of 128, bf16, one request):

    rows          64      256     1024     4096    16384
    recurrent    256      545     2420     8534    33430
    chunks       111      291      631     2272     8746
    fla         1760     1139     1354     1388     3482

With 4 heads of 64, chunks take 130, 146, 463, 1384 and 5515, fla 1070 to 2169 at any length.

B requests, T rows, N heads, K key and V value channels.
"""

from __future__ import annotations

from typing import Final, Literal

from torch import Tensor

from paceline.ops.delta_chunks import can_chunk, delta_chunks_triton
from paceline.ops.delta_fla import delta_chunks_fla, find_chunk_kda, may_run_fla
from paceline.ops.delta_kernel import LAST_STATE, launch_delta
from paceline.ops.delta_rows import DeltaGate, DeltaInputs
from paceline.ops.dispatch import report

PromptKernel = Literal["auto", "recurrent", "chunks", "fla"]

# Rows of a pass from which a kernel is taken, where it can be: the fewest measured at which it won at both sizes.
CHUNKS_FROM: Final = 64
FLA_FROM: Final = 4096


def prompt_kernels(
    inputs: DeltaInputs, gate: DeltaGate, lengths_B: Tensor | None
) -> tuple[tuple[int, PromptKernel], ...]:
    """The kernels that "auto" chooses from, each with the rows from which it is taken: the first that fits."""
    kernels: list[tuple[int, PromptKernel]] = [(0, "recurrent")]
    if can_chunk(gate):
        kernels.append((CHUNKS_FROM, "chunks"))
    if may_run_fla(inputs, lengths_B):
        kernels.append((FLA_FROM, "fla"))
    return tuple(sorted(kernels, reverse=True))


def run_prompt_kernel(
    inputs: DeltaInputs, gate: DeltaGate, state_BNKV: Tensor, lengths_B: Tensor | None, asked: PromptKernel
) -> tuple[Tensor, Tensor]:
    """Run whole prompts by the kernel that was asked for; "auto" goes by their length.

    Args:
        inputs: projections of the rows; padding trails.
        gate: parameters of the decay.
        state_BNKV: before the first row; it is not changed.
        lengths_B: int64, rows past them are left out; None: all count.
        asked: one that can take these rows, or "auto".
    Returns:
        The outputs, and the float32 states behind each request's last row.
    """
    device = inputs.v_BTNV.device.type
    if asked == "auto":
        kernels, num_rows = prompt_kernels(inputs, gate, lengths_B), inputs.q_BTNK.shape[1]
        report("delta_attention of prompts", device, described(kernels))
        asked = next(name for first, name in kernels if num_rows >= first and (name != "fla" or find_chunk_kda()))
    else:
        report("delta_attention of prompts", device, asked)
    if asked == "fla":
        return delta_chunks_fla(inputs, gate, state_BNKV)
    if asked == "chunks":
        return delta_chunks_triton(inputs, gate, state_BNKV, lengths_B)
    return launch_delta(inputs, gate, state_BNKV.contiguous(), None, lengths_B, None, LAST_STATE)


def described(kernels: tuple[tuple[int, PromptKernel], ...]) -> str:
    """The rule, as a report of what an engine runs says it."""
    return ", ".join(name if first == 0 else f"{name} from {first} rows" for first, name in kernels)
