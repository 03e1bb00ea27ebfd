"""`paceline convert`: round trips keep every bit, and whatever fails leaves nothing behind."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import write_drafter, write_target_folder
from tests.unit.checkpoint.test_export import FailingSync
from tests.unit.cli.folders import drafter_contract, target_folder
from tests.unit.cli.test_main import run
from torch import Tensor

from paceline.checkpoint.contract import (
    ConfidenceSettings,
    ConvolutionSettings,
    DrafterContract,
    Eagle3Settings,
    MarkovSettings,
    RopeSettings,
    SelectorSettings,
)
from paceline.checkpoint.dialects import read_drafter
from paceline.checkpoint.export import write_drafter_folder
from paceline.checkpoint.names import drafter_slots
from paceline.errors import CompatibilityError
from paceline.models.loading import load_drafter

MASK = torch.arange(32.0)
DSPARK: dict[str, Any] = {
    "family": "dspark",
    "layout": "anchor_sampling",
    "markov": MarkovSettings(8, "vanilla"),
    "confidence": ConfidenceSettings(with_markov=True),
    "draft_sample_method": "probabilistic",
}
EAGLE3: dict[str, Any] = {
    "family": "eagle3",
    "layout": "autoregressive",
    "layer_causal": (True, True),
    "has_qk_norm": False,
    "eagle3": Eagle3Settings(
        norm_before_residual=True, norm_before_fc=False, norm_output=False, doubles_every_layer=False
    ),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {"layer_windows": (16, None)},
    "dflash2": {
        "family": "dflash2",
        "convolution": ConvolutionSettings(2, 4),
        "selector": SelectorSettings(8, 4),
        "draft_sample_method": "probabilistic",
    },
    "dspark": DSPARK,
    "dspark without heads": {**DSPARK, "markov": None, "confidence": None},
    "dspark of a reduced vocabulary": {**DSPARK, "draft_vocab_size": 20, "has_own_head": True},
    "eagle3": {**EAGLE3, "has_own_embedding": True, "has_own_head": True},
    "eagle3 of a reduced vocabulary": {
        **EAGLE3,
        "has_own_embedding": True,
        "has_own_head": True,
        "draft_vocab_size": 20,
    },
    "yarn": {
        "rope": RopeSettings(
            theta=10000.0, kind="yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0
        )
    },
}
FINGERPRINT = {"probe_ids": torch.arange(16), "context": torch.ones(2, 32)}
NAMES = [
    "config.json",
    "fingerprint.safetensors",
    "model.safetensors",
    "model.safetensors.index.json",
    "provenance.json",
]


def tensors_for(contract: DrafterContract, *, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {slot.name: torch.randn(slot.shape, generator=generator).bfloat16() for slot in drafter_slots(contract)}


def drafter(folder: Path, dialect: Any = "zlab", **changes: Any) -> DrafterContract:
    """A drafter folder with weights."""
    contract = drafter_contract(**{"has_tap_norm": False, **changes})
    write_drafter_folder(
        folder,
        contract,
        tensors_for(contract),
        FINGERPRINT,
        {"seed": 7},
        dialect=dialect,
        draft_to_target=torch.arange(contract.draft_vocab_size) * 2 if contract.has_vocabulary_map else None,
        mask_embedding=MASK if contract.has_mask_embedding else None,
    )
    return contract


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(load_file(folder / "model.safetensors"))


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("to", ["zlab", "assistant", "speculators"])
def test_round_trip_of_a_plain_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str) -> None:
    drafter(tmp_path / "a")
    before = weights(tmp_path / "a")
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", to]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'b'}\n"
    assert f"{len(before)} tensors from the zlab to the {to} layout" in captured.err
    assert names_in(tmp_path / "b") == NAMES
    assert run(["convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "zlab", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["from_dialect"], found["to_dialect"], found["num_tensors"]) == (to, "zlab", len(before))
    assert_same_bits(weights(tmp_path / "c"), before)
    assert (tmp_path / "c" / "config.json").read_text() == (tmp_path / "a" / "config.json").read_text()
    fingerprints = [(tmp_path / name / "fingerprint.safetensors").read_bytes() for name in "abc"]
    assert fingerprints[0] == fingerprints[1] == fingerprints[2]
    history = json.loads((tmp_path / "c" / "provenance.json").read_text())
    assert history["seed"] == 7
    assert [(step["from"], step["to"]) for step in history["conversions"]] == [("zlab", to), (to, "zlab")]


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_of_every_family(tmp_path: Path, family: str) -> None:
    """Native, speculators, native: every bit of the weights and every field of the config, rope scaling included."""
    contract = drafter(tmp_path / "a", **FAMILIES[family])
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "speculators", "-q"]) == 0
    assert run(["convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "zlab", "-q"]) == 0
    assert_same_bits(weights(tmp_path / "c"), weights(tmp_path / "a"))
    assert (tmp_path / "c" / "config.json").read_text() == (tmp_path / "a" / "config.json").read_text()
    for name in "abc":
        found = read_drafter(tmp_path / name).contract
        assert dataclasses.replace(found, origin=contract.origin) == contract


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("dflash", "yarn")])
def test_the_assistant_layout_is_for_dflash_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    drafter(tmp_path / "a", **FAMILIES[family])
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "new" / "b"), "--to", "assistant"]) == 1
    assert "the Hugging Face assistant layout cannot state family" in capsys.readouterr().err
    assert names_in(tmp_path) == ["a"]


def test_names_are_those_of_the_layout(tmp_path: Path) -> None:
    drafter(tmp_path / "a")
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "assistant", "-q"]) == 0
    assert "encoder.fc.weight" in weights(tmp_path / "b")
    assert "fc.weight" not in weights(tmp_path / "b")
    assert torch.equal(weights(tmp_path / "b")["encoder.fc.weight"], weights(tmp_path / "a")["fc.weight"])


def test_mask_embedding_comes_along_where_it_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter(tmp_path / "a", has_mask_embedding=True)
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "zlab"]) == 0
    assert (tmp_path / "b" / "mask_embedding.pt").is_file()
    mask = read_drafter(tmp_path / "b").mask_embedding
    assert mask is not None
    assert torch.equal(mask, MASK)
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "c"), "--to", "assistant"]) == 1
    assert "cannot state has_mask_embedding True" in capsys.readouterr().err
    assert names_in(tmp_path) == ["a", "b"]


def test_reduced_vocabulary_comes_along(tmp_path: Path) -> None:
    drafter(tmp_path / "a", "speculators", draft_vocab_size=20, has_own_head=True)
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "speculators"]) == 0
    assert_same_bits(weights(tmp_path / "b"), weights(tmp_path / "a"))
    assert weights(tmp_path / "b")["d2t"].tolist() == list(range(20))


def test_quantised_weights_are_written_in_the_dtype_of_the_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter(tmp_path / "a")
    tensors, config = weights(tmp_path / "a"), json.loads((tmp_path / "a" / "config.json").read_text())
    expected = dict(tensors)
    for layer in range(2):
        name = f"layers.{layer}.mlp.down_proj"
        scale = torch.full((32, 1), 0.5)
        codes = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scale}
        expected[f"{name}.weight"] = (codes.float() * scale).bfloat16()
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "a" / "model.safetensors.index.json").unlink()
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "zlab"]) == 0
    assert "were stored as fp8 per tensor or channel; they are now bfloat16" in capsys.readouterr().err
    assert_same_bits(weights(tmp_path / "b"), expected)
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())
    history = json.loads((tmp_path / "b" / "provenance.json").read_text())
    assert history["conversions"][0]["dequantized_from"] == "fp8 per tensor or channel"


def target(folder: Path, *, is_tied: bool = False) -> dict[str, Tensor]:
    """A target's config with the only tensors that a conversion looks at."""
    target_folder(folder, tie_word_embeddings=is_tied)
    generator = torch.Generator().manual_seed(9)
    names = ("model.embed_tokens.weight",) if is_tied else ("model.embed_tokens.weight", "lm_head.weight")
    tables = {name: torch.randn(64, 32, generator=generator) for name in names}
    tables = {name: table.bfloat16() for name, table in tables.items()}
    save_file(tables, folder / "model.safetensors", metadata={"format": "pt"})
    return tables


def test_copies_of_the_target_are_left_out_and_own_tensors_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = target(tmp_path / "t")
    contract = drafter_contract(has_tap_norm=False, has_own_embedding=True, has_own_head=True)
    tensors = tensors_for(contract)
    tensors["embed_tokens.weight"] = tables["model.embed_tokens.weight"]
    write_drafter_folder(tmp_path / "a", contract, tensors, None, {})
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "zlab"]) == 0
    assert_same_bits(weights(tmp_path / "b"), weights(tmp_path / "a"))
    arguments = ["convert", str(tmp_path / "a"), str(tmp_path / "c"), "--to", "zlab", "--target", str(tmp_path / "t")]
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["dropped"] == ["embed_tokens.weight"]
    kept = {name: tensor for name, tensor in tensors.items() if name != "embed_tokens.weight"}
    assert_same_bits(weights(tmp_path / "c"), kept)


@pytest.mark.parametrize("is_tied", [False, True])
def test_copies_that_the_layout_holds_come_from_the_target_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_tied: bool
) -> None:
    """An export never makes up an embedding."""
    tables = target(tmp_path / "t", is_tied=is_tied)
    drafter(tmp_path / "a", **EAGLE3)
    arguments = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "speculators"]
    assert run(arguments) == 1
    error = capsys.readouterr().err
    assert "the speculators layout of eagle3 drafters holds embed_tokens.weight, and this drafter borrows it" in error
    assert "try: --target" in error
    assert names_in(tmp_path) == ["a", "t"]
    assert run([*arguments, "--target", str(tmp_path / "t")]) == 0
    assert "copied from the target: embed_tokens.weight, lm_head.weight" in capsys.readouterr().err
    found = weights(tmp_path / "b")
    assert torch.equal(found["embed_tokens.weight"], tables["model.embed_tokens.weight"])
    assert torch.equal(found["lm_head.weight"], tables["model.embed_tokens.weight" if is_tied else "lm_head.weight"])
    back = ["convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "zlab", "--target", str(tmp_path / "t")]
    assert run(back) == 0
    assert_same_bits(weights(tmp_path / "c"), weights(tmp_path / "a"))


def test_what_the_old_layout_does_not_say_comes_from_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target(tmp_path / "t")
    drafter(tmp_path / "a")
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "assistant", "-q"]) == 0
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    config = {key: value for key, value in config.items() if not key.startswith("paceline") and key != "vocab_size"}
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))  # as transformers writes it
    capsys.readouterr()
    arguments = ["convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "zlab"]
    assert run(arguments) == 1
    error = capsys.readouterr().err
    assert "does not say draft_vocab_size, target_num_layers, target_vocab_size, vocab_size" in error
    assert "try: --target" in error
    assert run([*arguments, "--target", str(tmp_path / "t")]) == 0
    found = read_drafter(tmp_path / "c").contract
    assert (found.target_num_layers, found.vocab_size, found.target_vocab_size) == (6, 64, 64)
    assert_same_bits(weights(tmp_path / "c"), weights(tmp_path / "a"))


def test_a_target_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter(tmp_path / "a")
    target_folder(tmp_path / "t", vocab_size=99)
    arguments = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "zlab", "--target", str(tmp_path / "t")]
    assert run(arguments) == 1
    assert "\nCompatibilityError: " in capsys.readouterr().err
    assert names_in(tmp_path) == ["a", "t"]


@pytest.mark.parametrize("kind", ["full", "interrupt"])
@pytest.mark.parametrize("at", range(1, 9))
def test_a_failure_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at: int, kind: str
) -> None:
    drafter(tmp_path / "a")
    error = OSError(errno.ENOSPC, "No space left on device") if kind == "full" else KeyboardInterrupt()
    monkeypatch.setattr(os, "fsync", FailingSync(at, error))
    code = run(["convert", str(tmp_path / "a"), str(tmp_path / "new" / "b"), "--to", "zlab"])
    captured = capsys.readouterr()
    assert code == (1 if kind == "full" else 130)
    assert ("\nCapacityError: the disk is full" if kind == "full" else "\ninterrupted\n") in captured.err
    assert captured.out == ""
    assert names_in(tmp_path) == ["a"]


def test_what_the_layout_cannot_state_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter(tmp_path / "a", input_embedding_scale=2.0)
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "new" / "b"), "--to", "assistant"]) == 1
    error = capsys.readouterr().err
    assert "\nCheckpointError: the Hugging Face assistant layout cannot state input_embedding_scale 2.0" in error
    assert names_in(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("norm.weight"), "norm.weight is missing"),
        (lambda tensors: tensors.update({"extra.weight": torch.ones(1)}), "extra.weight is not used"),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(3)}), "norm.weight is"),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(32).to(torch.int8)}), "int8"),
        (lambda tensors: tensors["norm.weight"].fill_(float("nan")), "norm.weight holds NaN"),
        (lambda tensors: tensors.update({"fc.weight_scale": torch.ones(1)}), "fc.weight_scale"),
    ],
)
def test_damaged_drafters_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, message: str
) -> None:
    drafter(tmp_path / "a")
    tensors = weights(tmp_path / "a")
    change(tensors)
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "a" / "model.safetensors.index.json").unlink()
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "zlab"]) == 1
    assert message in capsys.readouterr().err
    assert names_in(tmp_path) == ["a"]


def test_an_output_that_holds_something_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter(tmp_path / "a")
    drafter(tmp_path / "b")
    before = (tmp_path / "b" / "model.safetensors").read_bytes()
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, reason in (("b", "is not empty"), ("a", "is not empty"), ("file", "is a file")):
        assert run(["convert", str(tmp_path / "a"), str(tmp_path / name), "--to", "zlab"]) == 1
        assert f"{reason}; it stays as it is" in capsys.readouterr().err
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == before
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "empty"), "--to", "zlab"]) == 0
    assert names_in(tmp_path / "empty") == NAMES


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter(tmp_path / "a")
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "onnx"]) == 2
    assert "ConfigError: --to is 'onnx'; legal are zlab, assistant, speculators" in capsys.readouterr().err
    assert run(["convert", str(tmp_path / "nothing"), str(tmp_path / "b"), "--to", "zlab"]) == 1
    assert names_in(tmp_path) == ["a"]


def test_files_that_stay_behind_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter(tmp_path / "a")
    (tmp_path / "a" / "README.md").write_text("card")
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "zlab"]) == 0
    assert "not carried along: README.md" in capsys.readouterr().err
    assert run(["convert", str(tmp_path / "a"), str(tmp_path / "c"), "--to", "zlab", "-q"]) == 0
    assert capsys.readouterr().err == ""


def as_nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """A matrix in groups of 16 four-bit numbers: packed codes, a scale per group, and a factor on the scales."""
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.float().unflatten(-1, (-1, 16))
    scales = groups.abs().amax(-1) / 6
    factor = scales.max() / 448
    stored = (scales / factor).to(torch.float8_e4m3fn)
    sizes = groups / (stored.float() * factor).unsqueeze(-1).clamp(min=1e-12)
    codes = torch.bucketize(sizes.abs(), (steps[1:] + steps[:-1]) / 2) + 8 * (sizes < 0)
    codes = codes.view(weight.shape).to(torch.uint8)
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous()
    return {"weight": packed, "weight_scale": stored, "weight_scale_2": factor.reshape(())}


@pytest.mark.parametrize("to", ["zlab", "speculators"])
def test_a_converted_quantised_drafter_loads_and_checks_yes(tmp_path: Path, to: str) -> None:
    """Its weights are rounded for good, its config no longer says so, and its fingerprint is of the whole ones."""
    served = wrap_target(tiny_target(), "plain")
    write_target_folder(tmp_path / "target", served.model)
    folder = write_drafter(tmp_path / "a", served, has_tap_norm=False)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_rounded = ".mlp." in name
        parts = as_nvfp4(tensor) if is_rounded else {"weight": tensor}
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (folder / "config.json").write_text(json.dumps(config))
    load_drafter(str(folder), served)
    assert run(["convert", str(folder), str(tmp_path / "b"), "--to", to, "-q"]) == 0
    assert load_drafter(str(tmp_path / "b"), served).contract.quantization is None
    check = ["check", str(tmp_path / "b"), "--target", str(tmp_path / "target"), "--dtype", "float32"]
    assert run([*check, "--device", "cpu"]) == 0
    assert run(["convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "zlab", "-q"]) == 0
    load_drafter(str(tmp_path / "c"), served)
    fingerprint = load_file(tmp_path / "c" / "fingerprint.safetensors")
    assert bytes(fingerprint.pop("dequantized_from").tolist()) == b"nvfp4"
    save_file(fingerprint, tmp_path / "c" / "fingerprint.safetensors")
    with pytest.raises(CompatibilityError, match="its weights begin to differ"):
        load_drafter(str(tmp_path / "c"), served)
