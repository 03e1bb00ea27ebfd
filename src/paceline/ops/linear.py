"""Matrix product with a weight, in three arithmetics: plain, packed for oneDNN, and row-invariant. T rows, I in, O out.

`packed` reorders the weight once into oneDNN's blocked layout; on a CPU with bf16 instructions this halves the time of
a decode step. `row_invariant` gives a row the same bits whatever its neighbours and their number: it cuts every call
into tiles of exactly 8 rows, so the library always sees one shape, and packs the weight where it can. A decode step
reads its weights from memory once either way; a long prompt pays for its many small tiles. What the mode costs in all
is in docs/results (cpu-main).
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.ops.huge_pages import lay_on_huge_pages

ROW_TILE = 8  # rows of a default draft block
# A lone row is filled up to these where that costs no operation: on four rows oneDNN is faster than on its path for one
# (seen with AVX512-bf16), and sums as it does on eight.
FILLED_ROWS = 4
_ALIGNED_WIDTH = 16  # elements: at least 32 bytes in every float dtype
_ALIGNED_BYTES = 32
_PACK_BATCH_HINT = 16  # measured best for 1 to 16 rows; packing for one row is slower even at one row
_packed_product = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
if _packed_product is not None:
    _packed_product = _packed_product.default  # or torch looks for the overload in each of a step's 150 calls


def can_pack(weight_OI: Tensor) -> bool:
    """Whether this build and processor run oneDNN's packed product on this weight (CPU, bf16, native instructions)."""
    return (
        weight_OI.device.type == "cpu"
        and weight_OI.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and _packed_product is not None
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack_weight(weight_OI: Tensor) -> Tensor:
    """Reorder a weight into oneDNN's layout; the result is opaque and only fit for `linear_packed`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), _PACK_BATCH_HINT)
    lay_on_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    return packed


def linear_packed(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    """x @ W^T + b with a weight from `pack_weight`; x is [..., I] in bf16."""
    assert _packed_product is not None, "the caller asks `can_pack`"
    y: Tensor = _packed_product(x_TI, packed, bias_O, "none", [], "")
    return y


def linear_row_invariant(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, packed: Tensor | None = None
) -> Tensor:
    """x @ W^T + b in tiles of exactly `ROW_TILE` rows, so that no row's bits depend on how many rows there are.

    Args:
        x_TI: [..., I].
        weight_OI: the weight.
        bias_O: added to every row, or None.
        packed: the same weight from `pack_weight`, used instead of it.
    """
    rows = x_TI.reshape(-1, x_TI.shape[-1])
    missing = -rows.shape[0] % ROW_TILE
    # Rows of odd width start at odd addresses, and MKL's kernels for narrow outputs sum those in another order.
    odd = -rows.shape[1] % _ALIGNED_WIDTH if packed is None else 0
    weight_OI = functional.pad(weight_OI, (0, odd)) if odd else weight_OI
    padded = torch.constant_pad_nd(rows, (0, odd, 0, missing)) if missing or odd else rows
    if padded.data_ptr() % _ALIGNED_BYTES or not padded.is_contiguous():
        padded = padded.clone(memory_format=torch.contiguous_format)
    products = [
        functional.linear(tile, weight_OI, bias_O) if packed is None else linear_packed(tile, packed, bias_O)
        for tile in (padded.split(ROW_TILE) if padded.shape[0] > ROW_TILE else (padded,))
    ]
    y = products[0] if len(products) == 1 else torch.cat(products)
    return y[: rows.shape[0]].reshape(*x_TI.shape[:-1], weight_OI.shape[0])
