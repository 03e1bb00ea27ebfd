"""Context in one native call: the bits of its operations one by one, and the definition in float64."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from tests.tiny_codes import coded
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.native import integers
from paceline.ops.native import rows as native
from paceline.ops.native.context import ContextCall, can_store
from paceline.ops.rms_norm import rms_norm_reference
from paceline.ops.rotary import apply_rotary, expand_rotary, rotary_table

pytestmark = pytest.mark.skipif(
    not native.can_run(torch.empty(1, dtype=torch.bfloat16)), reason="no native operations on this machine"
)

EPS, BLOCKS, BLOCK_SIZE, POSITIONS = 1e-5, 6, 8, 50


def numbers(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


@dataclasses.dataclass
class Drafter:
    """What a drafter projects context with. K taps of width X, D width, L layers, M heads, H head size."""

    K: int = 3
    X: int = 40
    D: int = 56
    L: int = 3
    M: int = 2
    H: int = 24
    num_turned: int = 16
    has_tap_norm: bool = True
    has_bias: bool = False
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        of_kv = self.L * 2 * self.M * self.H
        self.tap_gains = 1 + numbers(self.K, self.X, scale=0.3, seed=1) if self.has_tap_norm else None
        self.features = numbers(self.D, self.K * self.X, scale=0.1, seed=2)
        self.feature_gain = 1 + numbers(self.D, scale=0.3, seed=3)
        self.kv = numbers(of_kv, self.D, scale=0.1, seed=4)
        self.features_bias, self.kv_bias = (
            (numbers(self.D, seed=5), numbers(of_kv, seed=6)) if self.has_bias else (None, None)
        )
        self.k_gain = 1 + numbers(self.L, self.H, scale=0.3, seed=7)
        self.table = rotary_table(torch.linspace(1.0, 0.1, self.num_turned // 2), POSITIONS)
        self.packed = native.pack(self.features, self.features_bias), native.pack(self.kv, self.kv_bias)

    def call(self) -> ContextCall:
        return ContextCall(
            num_taps=self.K,
            tap_gains_KX=self.tap_gains,
            features=self.packed[0],
            feature_gain_D=self.feature_gain,
            kv=self.packed[1],
            k_gain_LH=self.k_gain,
            eps=EPS,
            value_scale=self.value_scale,
        )

    def planes(self) -> Tensor:
        return torch.full((self.L, 2, self.M, BLOCKS, BLOCK_SIZE, self.H), 9.0).bfloat16()

    def taps(self, *shape: int) -> list[Tensor]:
        return [numbers(*shape, self.X, scale=3.0, seed=20 + index) for index in range(self.K)]

    def written(self, taps: list[Tensor], rows: Tensor, positions: Tensor) -> Tensor:
        planes = self.planes()
        self.call()(taps, rows, positions, planes, self.table)
        return planes

    def exact(self, taps: list[Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        """The definition in float64: keys and values [T, L, M, H] of flat rows."""
        streams = [tap.bfloat16().double().flatten(0, -2) for tap in taps]
        if self.tap_gains is not None:
            streams = [
                rms_norm_reference(x, gain.double(), EPS) for x, gain in zip(streams, self.tap_gains, strict=True)
            ]
        rows = torch.cat(streams, dim=-1) @ self.features.double().T
        rows = rms_norm_reference(rows + (self.features_bias.double() if self.has_bias else 0), self.feature_gain, EPS)
        kv = rows @ self.kv.double().T + (self.kv_bias.double() if self.has_bias else 0)
        k, v = kv.view(-1, self.L, 2, self.M, self.H).unbind(2)
        k = rms_norm_reference(k, self.k_gain.unsqueeze(1), EPS)
        return apply_rotary(k, self.table.double()[positions.flatten(), None]), v * self.value_scale

    def one_by_one(self, taps: list[Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same through the native operations."""
        streams = [tap.flatten(0, -2) for tap in taps]
        if self.tap_gains is not None:
            streams = [native.norm(x, gain, eps=EPS) for x, gain in zip(streams, self.tap_gains, strict=True)]
        rows = native.norm(native.linear(torch.cat(streams, dim=-1), self.packed[0]), self.feature_gain, eps=EPS)
        kv = native.linear(rows, self.packed[1]).unflatten(-1, (self.L, -1))
        turns = expand_rotary(self.table[positions.flatten()], torch.bfloat16)
        keys = []
        for layer in range(self.L):
            of_layer, gain = kv[:, layer].contiguous(), self.k_gain[layer]
            sizes = {"num_heads": 0, "num_kv_heads": self.M, "head_size": self.H}
            native.turn_heads_(of_layer, turns, gains=(gain, gain), eps=EPS, **sizes)
            keys.append(of_layer.view(-1, 2, self.M, self.H)[:, 0])
        return torch.stack(keys, 1), kv.view(-1, self.L, 2, self.M, self.H)[:, :, 1] * self.value_scale


def places(*shape: int) -> tuple[Tensor, Tensor]:
    """Physical rows all over, none twice, and positions that they do not betray."""
    num_rows = torch.Size(shape).numel()
    order = torch.Generator().manual_seed(5)
    rows = 1 + torch.randperm(BLOCKS * BLOCK_SIZE - 1, generator=order)[:num_rows]
    return rows.view(shape), torch.randint(POSITIONS, shape, generator=order)


def stored(planes: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [T, L, M, H] where the rows lie."""
    k, v = planes.flatten(3, 4)[:, :, :, rows.flatten()].permute(1, 3, 0, 2, 4)
    return k, v


def is_near(found: Tensor, exact: Tensor) -> bool:
    """Within the eight roundings on the way, of which each row, layer and head has its own."""
    error, size = (found.double() - exact).norm(dim=-1), exact.norm(dim=-1)
    return bool((error < 2**-5 * size).all())


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 3), (1, 40)])
@pytest.mark.parametrize("has_tap_norm", [True, False])
@pytest.mark.parametrize(("has_bias", "value_scale"), [(False, 1.0), (True, 0.4)])
def test_one_call_has_the_bits_of_many(
    shape: tuple[int, int], has_tap_norm: bool, has_bias: bool, value_scale: float
) -> None:
    drafter = Drafter(has_tap_norm=has_tap_norm, has_bias=has_bias, value_scale=value_scale)
    taps, (rows, positions) = drafter.taps(*shape), places(*shape)
    planes = drafter.written(taps, rows, positions)
    for found, expected in zip(stored(planes, rows), drafter.one_by_one(taps, positions), strict=True):
        assert torch.equal(found, expected)
    others = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    others[rows.flatten()] = False
    assert (planes.flatten(3, 4)[:, :, :, others] == 9.0).all(), "what lies elsewhere stays"


@pytest.mark.skipif(not integers.can_run_integers(), reason="no products in whole numbers on this machine")
def test_products_of_codes_take_part() -> None:
    drafter = Drafter(X=32, D=64, num_turned=24)
    apart = drafter.packed
    held = [coded(weight, 4) for weight in (drafter.features, drafter.kv)]
    drafter.packed = tuple(integers.pack_integers(h.scales_OC, h.minima_OC, h.codes_OI) for h in held)  # type: ignore[assignment]
    taps, (rows, positions) = drafter.taps(1, 9), places(1, 9)
    found = stored(drafter.written(taps, rows, positions), rows)
    assert all(map(torch.equal, found, drafter.one_by_one(taps, positions)))
    drafter.packed = apart
    assert not torch.equal(found[0], drafter.one_by_one(taps, positions)[0])


def later(drafter: Drafter, taps: list[Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    return drafter.exact(taps, (positions + 1) % POSITIONS)


def swapped(drafter: Drafter, taps: list[Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    return drafter.exact([taps[1], taps[0], *taps[2:]], positions)


def next_layer(drafter: Drafter, taps: list[Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    k, v = drafter.exact(taps, positions)
    return k.roll(1, dims=1), v.roll(1, dims=1)


def next_head(drafter: Drafter, taps: list[Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    k, v = drafter.exact(taps, positions)
    return k.roll(1, dims=2), v.roll(1, dims=2)


def other(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(drafter: Drafter, taps: list[Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        changed = copy.copy(drafter)
        setattr(changed, name, change(getattr(drafter, name)))
        return changed.exact(taps, positions)

    return run


FAULTS = {
    "taps swapped": swapped,
    "gains of taps swapped": other("tap_gains", lambda gain: gain.roll(1, dims=0)),
    "no gain of features": other("feature_gain", torch.ones_like),
    "gain of the next layer": other("k_gain", lambda gain: gain.roll(1, dims=0)),
    "position off by one": later,
    "next layer": next_layer,
    "next head": next_head,
    "values not scaled": other("value_scale", lambda _scale: 1.0),
}


@pytest.mark.parametrize("sizes", [{}, {"H": 64, "num_turned": 64, "M": 1}, {"H": 6, "num_turned": 6, "X": 2, "D": 10}])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_the_definition_and_nothing_near_it(sizes: dict[str, int], has_bias: bool) -> None:
    drafter = Drafter(**sizes, has_bias=has_bias, value_scale=0.4)  # type: ignore[arg-type]
    taps, (rows, positions) = drafter.taps(2, 9), places(2, 9)
    k, v = stored(drafter.written(taps, rows, positions), rows)
    exact_k, exact_v = drafter.exact(taps, positions)
    assert is_near(k, exact_k) and is_near(v, exact_v)
    for name, fault in FAULTS.items():
        wrong_k, wrong_v = fault(drafter, taps, positions)
        if name != "next head" or drafter.M > 1:
            assert not (is_near(k, wrong_k) and is_near(v, wrong_v)), name


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_rows_bits_are_its_own(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Drafter(value_scale=0.4)
    taps, (rows, positions) = drafter.taps(1, 21), places(1, 21)
    whole = drafter.written(taps, rows, positions)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    planes, call = drafter.planes(), drafter.call()
    for start, end in ((0, 1), (1, 4), (4, 12), (12, 21)):
        part = [tap[:, start:end] for tap in taps]
        call(part, rows[:, start:end], positions[:, start:end], planes, drafter.table)
    assert torch.equal(planes, whole)
    taps[1][0, 7] = torch.nan
    spoilt = drafter.written(taps, rows, positions).flatten(3, 4)
    assert spoilt[:, :, :, rows[0, 7]].isnan().all(), "the row that has it"
    assert spoilt.isnan().sum() == spoilt[:, :, :, 0].numel(), "and no other"


def test_taps_may_be_wide_or_views_of_others() -> None:
    drafter = Drafter()
    taps, (rows, positions) = drafter.taps(2, 5), places(2, 5)
    expected = drafter.written(taps, rows, positions)
    side_by_side = torch.cat(taps, dim=-1).split(drafter.X, dim=-1)
    spread = [torch.stack((tap, -tap), dim=-1)[..., 0] for tap in taps]
    longer = [torch.cat((tap, -tap), dim=1)[:, :5] for tap in taps]
    wide = [tap.float() * (1 + 2**-10) for tap in taps]  # rounded back on the way
    for others in (list(side_by_side), spread, longer, wide, [taps[0], spread[1], wide[2]]):
        assert torch.equal(drafter.written(others, rows, positions), expected)
    strided_rows, strided_positions = (torch.stack((part, part + 1), dim=-1)[..., 0] for part in (rows, positions))
    assert torch.equal(drafter.written(taps, strided_rows, strided_positions), expected)


def test_positions_past_the_table_are_turned_as_its_last_one() -> None:
    drafter = Drafter()
    taps, rows = drafter.taps(1, 3), torch.tensor([[9, 3, 40]])
    last = torch.full((1, 3), POSITIONS - 1)
    beyond = drafter.written(taps, rows, torch.tensor([[POSITIONS - 1, POSITIONS, POSITIONS + 1000]]))
    assert torch.equal(beyond, drafter.written(taps, rows, last))
    assert not torch.equal(beyond, drafter.written(taps, rows, last - 1))


def test_nothing_is_written_for_no_rows() -> None:
    drafter = Drafter()
    none = torch.empty(1, 0, dtype=torch.int64)
    assert (drafter.written(drafter.taps(1, 0), none, none) == 9.0).all()


def test_tensors_that_do_not_fit_are_refused() -> None:
    drafter = Drafter()
    call, planes, taps, (rows, positions) = drafter.call(), drafter.planes(), drafter.taps(1, 4), places(1, 4)
    for wrong, message in (
        ((taps[:2], rows, positions, planes), "taps has shape"),
        (([*taps[:2], taps[2][..., :-1]], rows, positions, planes), "tap has shape"),
        (([tap[:, :3] for tap in taps], rows, positions, planes), "tap has shape"),
        ((taps, rows, positions[:, :3], planes), "positions has shape"),
        ((taps, rows, positions, planes[1:]), "planes has shape"),
        ((taps, rows, positions, planes[..., :-1]), "planes has shape"),
    ):
        with pytest.raises(ShapeError, match=message):
            call(*wrong, drafter.table)


@pytest.mark.parametrize(("row", "position"), [(-1, 3), (BLOCKS * BLOCK_SIZE, 3), (9, -1)])
def test_a_row_without_a_place_writes_nothing(row: int, position: int) -> None:
    drafter = Drafter()
    planes, rows, positions = drafter.planes(), torch.tensor([[8, row]]), torch.tensor([[2, position]])
    with pytest.raises(IndexError, match="beyond the planes, or positions below 0"):
        drafter.call()(drafter.taps(1, 2), rows, positions, planes, drafter.table)
    assert torch.equal(planes, drafter.planes()), "nor does its neighbour"


def test_planes_and_tables_that_it_takes() -> None:
    drafter = Drafter()
    planes = drafter.planes()
    assert can_store(planes, drafter.table)
    assert not can_store(planes.float(), drafter.table)
    assert not can_store(planes, drafter.table.bfloat16())
    assert not can_store(planes.to("meta"), drafter.table)
    assert not can_store(planes[..., : drafter.num_turned - 2], drafter.table)


def test_a_copy_is_itself() -> None:
    call = Drafter().call()
    assert copy.deepcopy(call) is call
