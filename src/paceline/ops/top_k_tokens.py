"""The k best ids of each row of a vocabulary-wide score table, exactly. R rows, V vocabulary, G groups, C = k.

    order   value descending, then id ascending: a total order, so which of several equal values stay at the border is
            defined on every device and in every split of the vocabulary
    key     the value's bits, turned so that integers order as floats do, above 2^31 - 1 - id: one int64 per id, whose
            descending order is that order

The k best ids lie in the k groups of ids whose own best are first: any other id comes after k of them. Groups are runs
of ids, so among equal maxima the lower group holds the lower id, and groups are ordered by the same kind of key. So one
pass reads the table for the groups' maxima, and the selection proper sees k groups and the odd ids at the end.

The kernels do the same; the odd ids are a group, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.dispatch import choose, kernel, needs_gradient, tl, triton
from paceline.ops.native import choices as native

_GROUP = 64  # ids per group: about sqrt(V / k) for the vocabularies and k in use
_LAST_ID = 2**31 - 1
_GROUPS_AT_ONCE = 32  # per program
_MANY_KEYS = 4096  # of groups, for four warps
_MOST_IN_KERNELS = 64  # k; the k best are found one by one


def top_k_tokens_reference(scores_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A stable descending sort, cut at k."""
    values, ids = scores_RV.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


def order_keys(values: Tensor, ids: Tensor) -> Tensor:
    """Give int64 keys whose descending order is: value descending, then id ascending.

    Args:
        values: float16, bfloat16 or float32; -0.0 equals 0.0. NaN has a defined place, first or last by its sign.
        ids: int64 in [0, 2^31), broadcasting against the values.
    """
    bits = (values.float() + 0.0).view(torch.int32)
    # Negative floats grow downwards as integers: all their bits but the sign are turned over.
    ordered = bits ^ ((bits >> 31) & _LAST_ID)
    return (ordered.long() << 32) + (_LAST_ID - ids)


def ids_of_keys(keys: Tensor) -> Tensor:
    """The ids inside of keys from `order_keys`, int64."""
    return _LAST_ID - (keys & _LAST_ID)


def group_maxima(scores_RV: Tensor) -> Tensor:
    """The largest score of every whole group of ids, [..., V // 64]: what `top_k_tokens` reads the table for."""
    num_groups = scores_RV.shape[-1] // _GROUP
    maxima_RG: Tensor = scores_RV[..., : num_groups * _GROUP].unflatten(-1, (num_groups, _GROUP)).amax(dim=-1)
    return maxima_RG


def top_k_tokens(scores_RV: Tensor, k: int, *, maxima_RG: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find the k largest scores of every row; of equal ones at the border the lowest ids stay.

    Args:
        scores_RV: [..., V], any float dtype, without NaN; float64 is sorted whole.
        k: at most V.
        maxima_RG: `group_maxima(scores_RV)`, from whoever had them for less.
    Returns:
        values [..., k] descending and int64 ids [..., k], equal values by ascending id.
    """
    V = scores_RV.shape[-1]
    assert 1 <= k <= V, f"{k} of {V} ids were asked for"
    if scores_RV.dtype == torch.float64:
        return top_k_tokens_reference(scores_RV, k)
    if maxima_RG is None and native.can_find_top_k(scores_RV, k):
        return native.top_k(scores_RV, k)
    if maxima_RG is None and k <= _MOST_IN_KERNELS and not needs_gradient(scores_RV):
        run = choose("top_k_tokens", scores_RV, top_k_by_groups, top_k_tokens_triton)
        return run(scores_RV, k)
    return top_k_by_groups(scores_RV, k, maxima_RG)


def top_k_by_groups(scores_RV: Tensor, k: int, maxima_RG: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`top_k_tokens` in torch, for all but float64."""
    V = scores_RV.shape[-1]
    num_groups = V // _GROUP
    if num_groups <= 2 * k:
        ids = torch.arange(V, device=scores_RV.device)
        keys = order_keys(scores_RV, ids)
    else:
        ids = _ids_in_best_groups(group_maxima(scores_RV) if maxima_RG is None else maxima_RG, k)
        if V % _GROUP:
            odd_ids = torch.arange(num_groups * _GROUP, V, device=ids.device)
            ids = torch.cat((ids, odd_ids.expand(*ids.shape[:-1], -1)), dim=-1)
        keys = order_keys(scores_RV.gather(-1, ids), ids)
    best_ids = ids_of_keys(keys.topk(k, dim=-1).values)
    return scores_RV.gather(-1, best_ids), best_ids


@kernel
def _order_key(value: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """In a kernel: `order_keys`."""
    bits = (value.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFF_FFFF)
    return (ordered.to(tl.int64) << 32) + (0x7FFF_FFFF - ids.to(tl.int64))


@kernel
def _best_of_groups_kernel(
    scores_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    vocab_size: tl.tensor,
    num_groups: tl.tensor,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_inside = ids < vocab_size
    scores = tl.load(scores_ptr + row * vocab_size + ids, mask=is_inside, other=0.0)
    keys = tl.where(is_inside, _order_key(scores, ids), -0x7FFF_FFFF_FFFF_FFFF)
    tl.store(keys_ptr + row * num_groups + group, tl.max(keys, axis=1), mask=group < num_groups)


@kernel
def _top_k_in_groups_kernel(
    scores_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    vocab_size: tl.tensor,
    num_groups: tl.tensor,
    NUM_BEST: tl.constexpr,
    BEST: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, KEYS)
    group_keys = tl.load(keys_ptr + row * num_groups + at, mask=at < num_groups, other=-0x7FFF_FFFF_FFFF_FFFF)
    lane = tl.arange(0, BEST)
    best_keys = tl.full((BEST,), -0x7FFF_FFFF_FFFF_FFFF, tl.int64)  # whose id lies beyond every vocabulary
    for index in range(NUM_BEST):
        best = tl.max(group_keys, axis=0)
        best_keys = tl.where(lane == index, best, best_keys)
        group_keys = tl.where(group_keys == best, -0x7FFF_FFFF_FFFF_FFFF, group_keys)
    groups = (0x7FFF_FFFF - (best_keys & 0x7FFF_FFFF)) // GROUP
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_inside = ids < vocab_size
    scores = tl.load(scores_ptr + row * vocab_size + ids, mask=is_inside, other=0.0)
    keys = tl.where(is_inside, _order_key(scores, ids), -0x7FFF_FFFF_FFFF_FFFF)
    for index in range(NUM_BEST):
        best = tl.max(tl.max(keys, axis=1), axis=0)
        best_keys = tl.where(lane == index, best, best_keys)
        keys = tl.where(keys == best, -0x7FFF_FFFF_FFFF_FFFF, keys)
    best_ids = 0x7FFF_FFFF - (best_keys & 0x7FFF_FFFF)
    is_lane = lane < NUM_BEST
    values = tl.load(scores_ptr + row * vocab_size + best_ids, mask=is_lane, other=0.0)
    tl.store(values_ptr + row * NUM_BEST + lane, values, mask=is_lane)
    tl.store(ids_ptr + row * NUM_BEST + lane, best_ids, mask=is_lane)


def top_k_tokens_triton(scores_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Launch one program per row and 32 groups, then one per row."""
    V, device = scores_RV.shape[-1], scores_RV.device
    scores_RV = scores_RV.contiguous()
    num_rows, num_groups = scores_RV.numel() // V, triton.cdiv(V, _GROUP)
    keys = torch.empty(num_rows, num_groups, dtype=torch.int64, device=device)
    values_RC = torch.empty(*scores_RV.shape[:-1], k, dtype=scores_RV.dtype, device=device)
    ids_RC = torch.empty(values_RC.shape, dtype=torch.int64, device=device)
    padded = triton.next_power_of_2(num_groups)
    with torch.cuda.device_of(scores_RV):
        _best_of_groups_kernel[(num_rows, triton.cdiv(num_groups, _GROUPS_AT_ONCE))](
            scores_RV, keys, V, num_groups, GROUP=_GROUP, GROUPS=_GROUPS_AT_ONCE
        )
        _top_k_in_groups_kernel[(num_rows,)](
            scores_RV,
            keys,
            values_RC,
            ids_RC,
            V,
            num_groups,
            NUM_BEST=k,
            BEST=triton.next_power_of_2(k),
            GROUP=_GROUP,
            KEYS=padded,
            num_warps=8 if padded >= _MANY_KEYS else 4,
        )
    return values_RC, ids_RC


def _ids_in_best_groups(maxima_RG: Tensor, k: int) -> Tensor:
    keys_RG = order_keys(maxima_RG, torch.arange(maxima_RG.shape[-1], device=maxima_RG.device))
    groups = ids_of_keys(keys_RG.topk(k, dim=-1).values)
    return (groups.unsqueeze(-1) * _GROUP + torch.arange(_GROUP, device=groups.device)).flatten(-2)
