"""`paceline check` names each fault that is planted in a folder, with exit code 3, and is silent where there is none.

Each fault is what a public tool really left behind: a config or a weights file that loads elsewhere without a word. The
config that the fingerprint was recorded with is struck out of it, so that the numbers alone have to tell.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import tiny_target
from tests.tiny_kimi import k3_tiny_config, kimi_target, kimi_tensors, write_kimi
from tests.tiny_run import write_drafter, write_target_folder, write_tokenizer
from tests.unit.cli.test_main import run
from tests.unit.models.probing import PROBE, without_hints
from torch import Tensor

from paceline.checkpoint.contract import LatentAttentionSettings, TargetLayerId
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.fingerprint import record_fingerprint
from paceline.models.loading import LoadedTarget, load_drafter, load_target
from paceline.models.probe.alternatives import with_convolution_length
from paceline.models.readings import reread
from paceline.models.targets.dense import DenseTarget

TAPS = (TargetLayerId(0), TargetLayerId(1), TargetLayerId(2))
WEIGHTS, FINGERPRINT = "model.safetensors", "fingerprint.safetensors"
Plant = Callable[[Path, LoadedTarget], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_folder(tmp_path_factory.mktemp("models") / "target", tiny_target())


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with attention residuals, and so with two streams."""
    config = k3_tiny_config()
    folder = write_kimi(tmp_path_factory.mktemp("models") / "kimi", config, kimi_tensors(kimi_target(config)))
    write_tokenizer(folder, 512)
    return folder


def config(folder: Path, **changes: Any) -> None:
    """Change a drafter's config; keys of `dflash_config` are changed there."""
    found = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        (found["dflash_config"] if key in found["dflash_config"] else found)[key] = value
    (folder / "config.json").write_text(json.dumps(found))


def tensors(folder: Path, change: Callable[[dict[str, Tensor]], object], name: str = WEIGHTS) -> None:
    """Change a drafter's weights, or its fingerprint."""
    found = load_file(folder / name)
    change(found)
    save_file({key: tensor.contiguous() for key, tensor in found.items()}, folder / name)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def theta(folder: Path, _: LoadedTarget) -> None:
    found = json.loads((folder / "config.json").read_text())
    found["rope_theta"] = found["rope_parameters"]["rope_theta"] = 1e6
    (folder / "config.json").write_text(json.dumps(found))


def swap_taps(folder: Path, _: LoadedTarget) -> None:
    def swap(found: dict[str, Tensor]) -> None:
        first, second, third = found["fc.weight"].chunk(3, dim=1)
        found["fc.weight"] = torch.cat((second, first, third), dim=1)

    tensors(folder, swap)


def drop_tap_norm(folder: Path, _: LoadedTarget) -> None:
    config(folder, fc_norm=False)
    tensors(folder, lambda found: [found.pop(name) for name in list(found) if name.startswith("fc_norm")])


def record_after_the_final_norm(folder: Path, target: LoadedTarget) -> None:
    """Trained on what a library calls the last hidden state."""
    assert isinstance(target.model, DenseTarget)
    drafter = load_drafter(str(folder), target).model
    last = reread(drafter, target_layer_ids=(TAPS[0], TAPS[1], TargetLayerId(3)))
    found = record_fingerprint(target.model, last, PROBE)
    found["tap.2"] = target.model.norm(found["tap.2"].float()).to(torch.bfloat16)
    save_file(without_hints(found), folder / FINGERPRINT)


def absolute_table(folder: Path, _: LoadedTarget) -> None:
    """Target ids in place of offsets, in a table so short that it passes for offsets."""

    def absolute(found: dict[str, Tensor]) -> None:
        found["d2t"] = found["d2t"] + torch.arange(len(found["d2t"]))
        found.pop("t2d", None)

    tensors(folder, absolute)


def long_convolution(folder: Path, target: LoadedTarget) -> None:
    """Trained with a convolution that looked back across the border of a block."""
    drafter = load_drafter(str(folder), target).model
    assert isinstance(drafter, BlockDrafter)
    found = record_fingerprint(target.model, with_convolution_length(drafter, 16), PROBE)
    save_file(without_hints(found), folder / FINGERPRINT)


def narrow(folder: Path, _: LoadedTarget) -> None:
    found = json.loads((folder / "config.json").read_text())
    num_layers = found["num_hidden_layers"]
    found |= {"layer_types": ["sliding_attention"] * num_layers, "sliding_window": 64, "use_sliding_window": True}
    (folder / "config.json").write_text(json.dumps(found))


# fault: what the drafter is, how the fault is planted, and what has to be said
FAULTS: dict[str, tuple[dict[str, Any], Plant, str]] = {
    "tap +1": ({"target_layer_ids": (-1, 0, 1)}, lambda f, _: config(f, target_layer_ids=[0, 1, 2]), "one layer late"),
    "tap -1": ({}, lambda f, _: config(f, target_layer_ids=[-1, 0, 1]), "one layer early"),
    "swapped taps": ({}, swap_taps, "taps 0 and 1 are swapped"),
    "dropped fc_norm": ({"has_tap_norm": True}, drop_tap_norm, "fc_norm is missing"),
    "RoPE pairing": ({}, lambda f, _: config(f, is_neox_style=False), "is_neox_style should be true"),
    "theta": ({}, theta, "theta 10000: rope_theta is 1000000 in the config"),
    "embedding scale": (
        {},
        lambda f, _: config(f, input_embedding_scale=8.0),
        "input_embedding_scale 1; the config says 8",
    ),
    "post-norm last layer": ({}, record_after_the_final_norm, "after the final norm"),
    "mask id": ({}, lambda f, _: config(f, mask_token_id=17), "the stored mask row is token 3's"),
    "absolute d2t": ({"draft_vocab_size": 8, "has_own_head": True}, absolute_table, "if d2t is read as absolute ids"),
    "convolution length": ({"family": "dflash2"}, long_convolution, "looks back over blocks of 16 rows, not 8"),
    "causality": ({}, lambda f, _: config(f, is_causal=True), "rows of a block are bidirectional"),
    "multiplier": ({}, lambda f, _: config(f, output_multiplier=0.5), "output_multiplier 1; the config says 0.5"),
}


LATENT = {
    "family": "dflash2",
    "latent": LatentAttentionSettings(
        q_lora_rank=16, kv_lora_rank=16, qk_nope_head_size=8, qk_rope_head_size=8, v_head_size=16
    ),
    "is_neox_style": False,
}
FAULTS |= {
    "latent: RoPE pairing": (LATENT, lambda f, _: config(f, is_neox_style=True), "is_neox_style should be false"),
    "latent: theta": (LATENT, theta, "theta 10000: rope_theta is 1000000 in the config"),
    "latent: mask id": (LATENT, lambda f, _: config(f, mask_token_id=17), "the stored mask row is token 3's"),
    "latent: window": (LATENT, narrow, "without windows"),
}


def check(drafter: Path, target: Path, *more: str) -> list[str]:
    return ["check", str(drafter), "--target", str(target), "--dtype", "float32", "--device", "cpu", "--json", *more]


def write(folder: Path, target: Path, **changes: Any) -> tuple[Path, LoadedTarget]:
    """A sound drafter whose fingerprint holds numbers and no config."""
    loaded = load_target(str(target), dtype="float32", device="cpu", linear_mode="plain")
    fields = {"target_layer_ids": TAPS, "has_tap_norm": False} | changes
    fields["target_layer_ids"] = tuple(map(TargetLayerId, fields["target_layer_ids"]))
    write_drafter(folder, loaded, **fields)
    save_file(without_hints(load_file(folder / FINGERPRINT)), folder / FINGERPRINT)
    return folder, loaded


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, plant, said = FAULTS[fault]
    folder, loaded = write(tmp_path / "drafter", target, **changes)
    assert run(check(folder, target)) == 0
    assert json.loads(capsys.readouterr().out)["causes"] == []
    plant(folder, loaded)
    assert run(check(folder, target)) == 3
    found = json.loads(capsys.readouterr().out)
    named = [f"{cause['cause']} ({cause['fix']})" for cause in found["causes"]]
    assert found["fits"] is False and any(said in text for text in named), named
    assert all(cause["fix"] for cause in found["causes"])


def test_the_other_stream_is_named(kimi: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = write(tmp_path / "drafter", kimi, aux_hidden_stream="attn_res", target_layer_ids=(1, 3, 5))
    assert run(check(folder, kimi)) == 0
    capsys.readouterr()
    config(folder, aux_hidden_stream="prefix")
    assert run(check(folder, kimi)) == 3
    (cause,) = json.loads(capsys.readouterr().out)["causes"]
    assert "on the stream attn_res, the config says prefix" in cause["cause"]
    assert '"aux_hidden_stream": "attn_res"' in cause["fix"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_no_alarm_on_copies_of_the_right_target(
    family: str, dtype: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loaded in either precision, and from weights that were rounded to bf16 or to eight bits and back."""
    folder, _ = write(tmp_path / "drafter", target, family=family)
    for name, rounded in (
        ("bf16", lambda weight: weight.to(torch.bfloat16).float()),
        ("eight-bit", lambda weight: (weight / (step := weight.abs().amax(-1, keepdim=True) / 127)).round() * step),
    ):
        model = tiny_target()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(rounded(parameter))
        copy = write_target_folder(tmp_path / name, model)
        for path in (target, copy):
            assert run([*check(folder, path), "--dtype", dtype]) == 0, capsys.readouterr().err
            assert json.loads(capsys.readouterr().out)["causes"] == []
    other = write_target_folder(tmp_path / "other", tiny_target(seed=5))
    assert run([*check(folder, other), "--dtype", dtype]) == 3, "and it is not silent about everything"
