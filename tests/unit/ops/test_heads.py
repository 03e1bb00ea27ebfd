"""What the launches around heads have in common: what stands where, and what takes the place of missing gains."""

from __future__ import annotations

import torch

from paceline.ops.heads import Cells, HeadForm, heads_launch

T, N, M, H, R = 3, 4, 2, 20, 6
X = torch.zeros(T, (N + 2 * M) * H, dtype=torch.bfloat16)
TURNS = torch.zeros(T, 2, R)
CELLS = Cells(torch.zeros(2, M, 5, 16, H, dtype=torch.bfloat16), torch.zeros(T, dtype=torch.long))
FORM = HeadForm(N, 1e-5, is_neox_style=False, value_scale=0.5)


def test_operands_stand_in_the_order_of_the_kernels_parameters() -> None:
    gains = (torch.ones(H), torch.zeros(H))
    launch = heads_launch(X, gains, TURNS, CELLS, FORM)
    expected = (*gains, TURNS, CELLS.rows_T, CELLS.planes, launch.q_TNH)
    assert all(found is wanted for found, wanted in zip(launch.operands, expected, strict=True))
    assert launch.q_TNH.shape == (T, N, H) and launch.q_TNH.dtype == X.dtype
    assert launch.numbers == (M * 5 * 16 * H, 5 * 16 * H, 1e-5, 0.5)
    sizes = {"NUM_HEADS": N, "NUM_KV_HEADS": M, "HEAD_SIZE": H, "TURNED": R}
    assert launch.constants == {**sizes, "IS_NEOX": False, "HAS_QK_NORM": True}


def test_rows_stand_in_place_of_gains_that_are_not_there() -> None:
    launch = heads_launch(X, None, TURNS, CELLS, FORM)
    assert launch.operands[0] is launch.operands[1] is X and not launch.constants["HAS_QK_NORM"]
