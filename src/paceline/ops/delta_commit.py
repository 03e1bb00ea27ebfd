"""Rolling a recurrent state forward by what was accepted: records of a pass, their replay, and its reference.

A state cannot be cut back as keys and values can. So the rows of a step leave it alone and record what each did to it;
once the verdict is known, the accepted ones are replayed, one after the other:

    S <- exp(g) * S + k u^T                     with the u, k and exp(g) of the row's record
    history <- its rows and the pass's, moved on by as many

The replay takes the operations of the pass in their order, so the state is that of plain decoding to the last bit. A
request with nothing accepted keeps state and history. A state may be stored in a narrower dtype: it is widened before
the first row and rounded once, behind the last. Records past a request's count are never read: they belong to
refused drafts, to padding, or to another request of an earlier step. The same replay can leave its result in another
store (`CommitInto`) and the slot as it is: that is how a step keeps the state behind a position that it passes.

The reference of rollback needs none of this: it keeps a state per row (`delta_snapshots`) and takes one of them.

L layers, B requests, T rows, N heads, K key and V value channels, C convolved channels, S slots, H rows of history, P
places of another store.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.elementwise import widen

_VALUE_BLOCK = 32  # value channels per program: a state of 128 key channels then takes 32 registers of a thread
_LARGEST_BLOCK = 512  # channels per program of the history


class DeltaRecords(NamedTuple):
    """What the rows of a pass did, for one layer, or for all with a leading dimension L.

    `correction`, `key` (normed) and `decay` (exp g) are float32; `inputs` are the rows before the convolution, in the
    model's dtype, which the model stores itself.
    """

    correction_BTNV: Tensor
    key_BTNK: Tensor
    decay_BTNK: Tensor
    inputs_BTC: Tensor

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_requests: int,
        num_rows: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        num_channels: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> DeltaRecords:
        """Room for all layers' records; `num_channels` and `dtype` are those of the convolution's inputs."""
        rows = (num_layers, num_requests, num_rows)
        return cls(
            torch.zeros(*rows, num_heads, value_size, dtype=torch.float32, device=device),
            torch.zeros(*rows, num_heads, key_size, dtype=torch.float32, device=device),
            torch.zeros(*rows, num_heads, key_size, dtype=torch.float32, device=device),
            torch.zeros(*rows, num_channels, dtype=dtype, device=device),
        )

    def layer(self, index: int) -> DeltaRecords:
        """One layer's records of stacked ones, as views."""
        return DeltaRecords(*(values[index] for values in self))

    def rows(self, num_requests: int, num_rows: int) -> DeltaRecords:
        """The first requests and rows of stacked records, as views, for a pass that has fewer."""
        return DeltaRecords(*(values[:, :num_requests, :num_rows] for values in self))


class CommitInto(NamedTuple):
    """Another store, of the same layers and sizes, and each request's place in it; below 0 for none."""

    states_LPNKV: Tensor
    histories_LPHC: Tensor
    places_B: Tensor


def commit_delta_reference(
    states_LSNKV: Tensor,
    histories_LSHC: Tensor,
    slots_B: Tensor,
    records: DeltaRecords,
    counts_B: Tensor,
    into: CommitInto | None = None,
) -> None:
    """The definition: one request and row at a time, all layers together."""
    if into is not None:
        is_wanted_B = (slots_B >= 0) & (into.places_B >= 0)
        slots_W, places_W = slots_B[is_wanted_B], into.places_B[is_wanted_B]
        into.states_LPNKV[:, places_W] = states_LSNKV[:, slots_W]
        into.histories_LPHC[:, places_W] = histories_LSHC[:, slots_W]
        states_LSNKV, histories_LSHC = into.states_LPNKV, into.histories_LPHC
        slots_B = torch.where(is_wanted_B, into.places_B, -1)
    num_kept = histories_LSHC.shape[2]
    for request, (slot, count) in enumerate(zip(slots_B.tolist(), counts_B.tolist(), strict=True)):
        if slot < 0 or count == 0:
            continue
        state_LNKV = widen(states_LSNKV[:, slot])
        for row in range(count):
            state_LNKV.mul_(records.decay_BTNK[:, request, row].unsqueeze(-1))
            key_LNK1 = records.key_BTNK[:, request, row].unsqueeze(-1)
            state_LNKV.add_(key_LNK1 * records.correction_BTNV[:, request, row].unsqueeze(-2))
        if state_LNKV.dtype != states_LSNKV.dtype:  # else it is a view
            states_LSNKV[:, slot] = state_LNKV
        rows_LXC = torch.cat((histories_LSHC[:, slot], records.inputs_BTC[:, request, :count]), dim=1)
        histories_LSHC[:, slot] = rows_LXC[:, rows_LXC.shape[1] - num_kept :]


@kernel
def replay_row(state: tl.tensor, k: tl.tensor, correction: tl.tensor, decay: tl.tensor) -> tl.tensor:
    """S * decay + k u^T of a [K, V] tile.

    The product that is fused with the sum is named: a compiler is free to fuse either, and would not choose alike in
    the pass, which also reads the decayed state, and in the replay, which does not.
    """
    return tl.fma(k[:, None], correction[None, :], state * decay[:, None])


@kernel
def _source_and_target(
    slot_ptr: tl.tensor, place_ptr: tl.tensor, request: tl.tensor, count: tl.tensor, COPIES: tl.constexpr
) -> tl.tensor:
    """The places that a request's state is read from and written to, and whether that has to be done."""
    source = tl.load(slot_ptr + request).to(tl.int64)
    if COPIES:
        target = tl.load(place_ptr + request).to(tl.int64)
        is_wanted = (source >= 0) & (target >= 0)
    else:
        target = source
        is_wanted = (source >= 0) & (count > 0)
    return source, target, is_wanted


@kernel
def _replay_kernel(
    state_ptr: tl.tensor,
    target_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    place_ptr: tl.tensor,
    count_ptr: tl.tensor,
    correction_ptr: tl.tensor,
    key_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    num_requests: tl.tensor,
    num_heads: tl.tensor,
    key_size: tl.tensor,
    value_size: tl.tensor,
    state_layer_stride: tl.tensor,
    state_slot_stride: tl.tensor,
    target_layer_stride: tl.tensor,
    target_place_stride: tl.tensor,
    correction_layer_stride: tl.tensor,
    correction_request_stride: tl.tensor,
    key_layer_stride: tl.tensor,
    key_request_stride: tl.tensor,
    COPIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    layer = (tl.program_id(0) // num_requests).to(tl.int64)
    request = (tl.program_id(0) % num_requests).to(tl.int64)
    head = tl.program_id(1)
    count = tl.load(count_ptr + request)
    slot, place, is_wanted = _source_and_target(slot_ptr, place_ptr, request, count, COPIES)
    if is_wanted:
        k_at, v_at = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
        is_key, is_value = k_at < key_size, v_at < value_size
        is_cell = is_key[:, None] & is_value[None, :]
        cell_at = (head * key_size + k_at[:, None]) * value_size + v_at[None, :]
        state_at = state_ptr + layer * state_layer_stride + slot * state_slot_stride + cell_at
        state = tl.load(state_at, mask=is_cell, other=0.0).to(tl.float32)
        correction_at = correction_ptr + layer * correction_layer_stride + request * correction_request_stride
        key_offset = layer * key_layer_stride + request * key_request_stride
        for row in range(count):
            cell = row * num_heads + head
            k = tl.load(key_ptr + key_offset + cell * key_size + k_at, mask=is_key, other=0.0)
            decay = tl.load(decay_ptr + key_offset + cell * key_size + k_at, mask=is_key, other=0.0)
            correction = tl.load(correction_at + cell * value_size + v_at, mask=is_value, other=0.0)
            state = replay_row(state, k, correction, decay)
        target_at = target_ptr + layer * target_layer_stride + place * target_place_stride + cell_at
        tl.store(target_at, state.to(target_ptr.dtype.element_ty), mask=is_cell)


@kernel
def _shift_kernel(
    history_ptr: tl.tensor,
    target_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    place_ptr: tl.tensor,
    count_ptr: tl.tensor,
    input_ptr: tl.tensor,
    num_requests: tl.tensor,
    num_channels: tl.tensor,
    history_layer_stride: tl.tensor,
    history_slot_stride: tl.tensor,
    target_layer_stride: tl.tensor,
    target_place_stride: tl.tensor,
    input_layer_stride: tl.tensor,
    input_request_stride: tl.tensor,
    COPIES: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    layer = (tl.program_id(0) // num_requests).to(tl.int64)
    request = (tl.program_id(0) % num_requests).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < num_channels
    count = tl.load(count_ptr + request)
    slot, place, is_wanted = _source_and_target(slot_ptr, place_ptr, request, count, COPIES)
    if is_wanted:
        target_at = target_ptr + layer * target_layer_stride + place * target_place_stride + channel
        history_at = history_ptr + layer * history_layer_stride + slot * history_slot_stride + channel
        input_at = input_ptr + layer * input_layer_stride + request * input_request_stride + channel
        for row in tl.static_range(KEPT):  # rows move towards the front, so none is overwritten before it was read
            source = count + row
            kept = tl.load(history_at + source * num_channels, mask=is_channel & (source < KEPT), other=0.0)
            came = tl.load(input_at + (source - KEPT) * num_channels, mask=is_channel & (source >= KEPT), other=0.0)
            tl.store(target_at + row * num_channels, tl.where(source < KEPT, kept, came), mask=is_channel)


def commit_delta_triton(
    states_LSNKV: Tensor,
    histories_LSHC: Tensor,
    slots_B: Tensor,
    records: DeltaRecords,
    counts_B: Tensor,
    into: CommitInto | None = None,
) -> None:
    """Launch one program per layer, request, head and run of value channels; and one for the histories."""
    num_layers, _, num_heads, key_size, value_size = states_LSNKV.shape
    num_kept, num_channels = histories_LSHC.shape[2:]
    num_requests = slots_B.shape[0]
    values = min(_VALUE_BLOCK, triton.next_power_of_2(value_size))
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(num_channels))
    slots_B, counts_B = slots_B.contiguous(), counts_B.contiguous()
    copies = into is not None
    targets = (states_LSNKV, histories_LSHC, slots_B) if into is None else into
    target_states, target_histories, places_B = targets[0], targets[1], targets[2].contiguous()
    with torch.cuda.device_of(states_LSNKV):
        _replay_kernel[num_layers * num_requests, num_heads, triton.cdiv(value_size, values)](
            states_LSNKV,
            target_states,
            slots_B,
            places_B,
            counts_B,
            records.correction_BTNV,
            records.key_BTNK,
            records.decay_BTNK,
            num_requests,
            num_heads,
            key_size,
            value_size,
            states_LSNKV.stride(0),
            states_LSNKV.stride(1),
            target_states.stride(0),
            target_states.stride(1),
            records.correction_BTNV.stride(0),
            records.correction_BTNV.stride(1),
            records.key_BTNK.stride(0),
            records.key_BTNK.stride(1),
            COPIES=copies,
            KEYS=triton.next_power_of_2(key_size),
            VALUES=values,
        )
        if num_kept == 0:
            return
        _shift_kernel[num_layers * num_requests, triton.cdiv(num_channels, block)](
            histories_LSHC,
            target_histories,
            slots_B,
            places_B,
            counts_B,
            records.inputs_BTC,
            num_requests,
            num_channels,
            histories_LSHC.stride(0),
            histories_LSHC.stride(1),
            target_histories.stride(0),
            target_histories.stride(1),
            records.inputs_BTC.stride(0),
            records.inputs_BTC.stride(1),
            COPIES=copies,
            KEPT=num_kept,
            BLOCK=block,
        )


def commit_delta(
    states_LSNKV: Tensor,
    histories_LSHC: Tensor,
    slots_B: Tensor,
    records: DeltaRecords,
    counts_B: Tensor,
    *,
    into: CommitInto | None = None,
) -> None:
    """Replay each request's accepted rows into its state and history, for all layers, in place or into another store.

    Args:
        states_LSNKV: float32, or bf16.
        histories_LSHC: of the convolutions, in the model's dtype.
        slots_B: int64; a slot below 0 has nothing to keep. Several requests may share one only if nobody reads it.
        records: stacked, of the pass that was judged.
        counts_B: int64, 0 to T rows to keep. On a GPU the caller answers for the bounds: a check would wait for it.
        into: where the states with these rows go, in the dtype of these, a copy for a count of 0; slots then stay as
            they are. No two requests have one place. None changes the slots.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    num_layers, _, num_heads, key_size, value_size = states_LSNKV.shape
    num_requests, num_rows = slots_B.shape[0], records.key_BTNK.shape[2]
    wanted = (num_layers, num_requests, num_rows)
    num_channels = histories_LSHC.shape[3]
    shapes = ((num_heads, value_size), (num_heads, key_size), (num_heads, key_size), (num_channels,))
    for name, values, shape in zip(DeltaRecords._fields, records, shapes, strict=True):
        if values.shape != (*wanted, *shape):
            raise ShapeError(f"records.{name}", expected=[*wanted, *shape], found=values.shape)
    if counts_B.shape != (num_requests,):
        raise ShapeError("counts", expected=[num_requests], found=counts_B.shape)
    if into is not None:
        for name, found, own in (("states", into.states_LPNKV, states_LSNKV), ("histories", into[1], histories_LSHC)):
            if (found.shape[0], *found.shape[2:]) != (own.shape[0], *own.shape[2:]):
                expected = f"any number of places of {[own.shape[0], *own.shape[2:]]}"
                raise ShapeError(f"into.{name}", expected=expected, found=found.shape)
        if into.places_B.shape != (num_requests,):
            raise ShapeError("into.places", expected=[num_requests], found=into.places_B.shape)
    if num_requests == 0:
        return
    if counts_B.device.type == "cpu":
        # Bounds are checked where it costs nothing: a count of 0 that is read as row -1 is a neighbour's row.
        smallest, largest = int(counts_B.min()), int(counts_B.max())
        assert smallest >= 0 and largest <= num_rows, f"counts {smallest} to {largest} of {num_rows} rows"
    run = choose("commit_delta", states_LSNKV, commit_delta_reference, commit_delta_triton)
    run(states_LSNKV, histories_LSHC, slots_B, records, counts_B, into)


def commit_snapshots(states_SNKV: Tensor, slots_B: Tensor, snapshots_BTNKV: Tensor, counts_B: Tensor) -> None:
    """The reference of rollback, for one layer: take the state behind each request's last accepted row.

    Args:
        states_SNKV: float32, changed in place.
        slots_B: int64; below 0: nothing to keep.
        snapshots_BTNKV: from `delta_snapshots`.
        counts_B: int64, 0 to T; 0 keeps the state.
    """
    for request, (slot, count) in enumerate(zip(slots_B.tolist(), counts_B.tolist(), strict=True)):
        if slot >= 0 and count > 0:
            states_SNKV[slot] = snapshots_BTNKV[request, count - 1]


def clear_slots(states_LSNKV: Tensor, histories_LSHC: Tensor, slots: Tensor | int) -> None:
    """Begin texts anew in slots, in place: zeros in place of whatever an earlier request left, NaN included."""
    states_LSNKV[:, slots] = 0.0
    histories_LSHC[:, slots] = 0.0
