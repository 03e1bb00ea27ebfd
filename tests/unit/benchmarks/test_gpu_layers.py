"""The layer benchmark runs without a GPU on a tiny layer; what is wrong is told, and the others go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import gpu_layer_cases, gpu_layers
from benchmarks.gpu_layers import RULES as RULES_OF_CHAINS

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE
from paceline.ops import dispatch
from paceline.ops.dispatch import HAS_TRITON
from paceline.ops.skinny_tile import Tile

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def test_a_trial_on_the_cpu_checks_and_times_every_operation(tmp_path: Path) -> None:
    assert gpu_layers.main(["--device", "cpu", "--rows", "3", "--out", str(tmp_path)]) == EXIT_DONE
    rows = json.loads((tmp_path / "gpu-layers.json").read_text())["rows"]
    assert [row["operation"] for row in rows] == [*gpu_layer_cases.OPERATIONS, "stack, fused", "stack, library"]
    assert all(row["us"] > 0 for row in rows)


def test_an_operation_that_is_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_layer_cases, "ALLOWED_ERROR", -1.0)
    options = ["--device", "cpu", "--rows", "1", "--operations", "o", "stack"]
    assert gpu_layers.main(options) == EXIT_CHECK_SAYS_NO
    shown = capsys.readouterr()
    assert "rows, o: ArithmeticError" in shown.err and "stack" in shown.out


def test_cuts_are_tried_in_whole_layers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_layer_cases, "tiles", lambda *_: iter([Tile(32, 32, 2)]))
    options = ["--device", "cpu", "--rows", "2", "--operations", "gated", "--tune", "--num-replays", "1"]
    assert gpu_layers.main(options) == EXIT_DONE
    assert "(32, 32, 2, 4, 4, 0, 1, False): " in capsys.readouterr().err


def test_chains_are_timed_with_a_part_of_the_weight_asked_for_early(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_layers.main(["--device", "cpu", "--rows", "2", "--ahead-kb", "0", "8"]) == EXIT_DONE
    shown = capsys.readouterr().out
    assert all(f"chain, ahead {ahead}" in shown for ahead in (None, 0, 8))


def test_chains_are_timed_under_each_rule_with_attention(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rules: list[str] = []
    monkeypatch.setattr(dispatch, "allow_dependent_launch", rules.append)
    options = ["--device", "cpu", "--rows", "2", "--rules", "off", "mixed", "--context", "70", "--requests", "2"]
    assert gpu_layers.main([*options, "--attention", "chosen", "16,16,4,2"]) == EXIT_DONE
    shown = capsys.readouterr().out
    for rule in ("off", "mixed"):
        assert f"chain, chosen, {rule}: " in shown and f"chain, chosen, attention 16,16,4,2, {rule}: " in shown
    assert rules == ["off", "off", "off", "off", "mixed", "off", "mixed", "off"], "each is put back"
    assert (*RULES_OF_CHAINS,) == tuple(dispatch.DEPENDENT_LAUNCH_RULES)


def test_attention_in_a_chain_reads_the_rows_of_its_requests() -> None:
    shape, device = gpu_layer_cases.TINY, torch.device("cpu")
    layer, inputs = gpu_layer_cases.make_layer(shape, device), gpu_layer_cases.make_inputs(shape, 2, device)
    context = gpu_layer_cases.Context(2, 70)
    layer.planes.normal_()
    q_RNH = torch.randn(2, shape.num_heads, shape.head_size)
    found = gpu_layer_cases._attention_of(inputs, context)(layer, q_RNH)
    keys, values = layer.planes[:, 0, :4].view(2, 2, 128, shape.head_size)[:, :, :70]
    weights = (torch.einsum("bnh,blh->bnl", q_RNH, keys) * shape.head_size**-0.5).softmax(-1)
    torch.testing.assert_close(found, torch.einsum("bnl,blh->bnh", weights, values), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", gpu_layer_cases.OPERATIONS)
def test_cuts_in_slices_that_are_tried_are_whole_steps_of_the_matrix_units(name: str) -> None:
    shape = gpu_layer_cases.SHAPES[0]
    compared = [cuts[name] for cuts in gpu_layer_cases.CHAIN_CUTS.values() if cuts.get(name)]
    cuts = [*gpu_layer_cases.sliced_tiles(name, shape), *compared]
    assert len(cuts) > 20 and len(set(cuts)) > 20
    for cut in cuts:
        assert cut is not None
        held = cut.slices * cut.block if cut.is_held else (cut.stages - 1) * cut.block
        assert 2 * held * (cut.outputs + 16) <= 132_000, "a program fits beside the next"
        assert cut.block % cut.slices == 0 and (cut.is_held or cut.block // cut.slices >= 16)


def test_every_cut_to_be_tried_fits_a_multiprocessor() -> None:
    for shape in gpu_layer_cases.SHAPES:
        for name in gpu_layer_cases.OPERATIONS:
            cuts = list(gpu_layer_cases.tiles(name, shape))
            assert len(cuts) >= 10
            for cut in cuts:
                assert (cut.stages - 1) * 2 * cut.block * (cut.outputs + 16) <= 227 * 1024
