"""One rank's part of a checkpoint: every number once over all ranks, strict, and nothing of other ranks is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny_kimi import (
    VARIANTS,
    RateStorage,
    k3_tiny_config,
    kimi_contract,
    kimi_target,
    kimi_tensors,
    multimodal_config,
    multimodal_target,
    write_kimi,
)
from tests.unit.distributed.spread import CPU, shared_logits
from tests.unit.models.test_target_weights import MXFP4, pack
from tests.unit.training.processes import run_ranks, values

from paceline.checkpoint.kimi_tensors import open_kimi
from paceline.checkpoint.target_config import read_target_contract
from paceline.checkpoint.weights import load_part, open_safetensors
from paceline.distributed.mesh import TensorGroup
from paceline.distributed.sharded_weights import PartialSource, folder_digest, load_sharded_stage, load_table
from paceline.errors import CheckpointError, ConfigError
from paceline.models.attends import WholeSequence
from paceline.models.targets.kimi_stage import KimiStage

STORAGES: tuple[RateStorage, ...] = ("flat", "padded", "four")
SHARED = {
    "self_attn.qkv_proj.weight",
    "self_attn.decay.A_log",
    "self_attn.o_proj.weight",
    "self_attn.kv_b_proj.weight",
    "mlp.experts.gate_up",
    "mlp.experts.down",
    "mlp.shared_experts.down_proj.weight",
}


def part(folder: Path, index: int, size: int = 2, layers: tuple[int, int] = (0, 8)) -> KimiStage:
    """A rank's part, without the rank."""
    contract = read_target_contract(folder, "tiny")
    tensor = TensorGroup(index, size)
    return load_sharded_stage(contract, folder, *layers, tensor, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = k3_tiny_config()
    return write_kimi(tmp_path_factory.mktemp("one") / "target", config, kimi_tensors(kimi_target(config)))


@pytest.mark.parametrize("size", [2, 4])
def test_parts_make_the_whole(folder: Path, size: int) -> None:
    whole = dict(kimi_target(k3_tiny_config()).named_parameters())
    parts = [dict(part(folder, index, size).named_parameters()) for index in range(size)]
    assert parts[0].keys() == whole.keys()
    for name, tensor in whole.items():
        own = [one[name] for one in parts]
        if own[0].shape == tensor.shape:
            assert all(torch.equal(one, tensor) for one in own), name
            continue
        assert sum(one.numel() for one in own) == tensor.numel(), name
        together = torch.cat([one.flatten() for one in own]).sort().values
        assert torch.equal(together, tensor.flatten().sort().values), name
    for name in SHARED:
        found = [key for key in whole if key.endswith(name)]
        assert found and all(parts[0][key].numel() * size == whole[key].numel() for key in found), name
    assert (
        parts[0]["layers.0.self_attn.decay.A_log"].tolist()
        == whole["layers.0.self_attn.decay.A_log"].tolist()[: 4 // size]
    )


def test_two_processes_compute_the_whole_target_from_all_storages_of_decay_rates(tmp_path: Path) -> None:
    """Within what another order of float32 sums makes; tokens are compared in `test_decoding.py`."""
    config = k3_tiny_config()
    model = kimi_target(config)
    for storage in STORAGES:
        write_kimi(tmp_path / storage, config, kimi_tensors(model, rates=storage))
    first, second = values(run_ranks(shared_logits, tmp_path / "run", tmp_path, STORAGES))
    tokens = torch.arange(5, 17)[None]
    logits = model.logits(model(tokens, tokens, WholeSequence()))
    for storage in STORAGES:
        halves = [rank[f"{storage}, None"] for rank in (first, second)]
        assert torch.allclose(torch.cat([half[0] for half in halves], dim=-1), logits, rtol=1e-5, atol=5e-5)
        assert all(torch.equal(one, two) for one, two in zip(halves[0][1], halves[1][1], strict=True)), "one stream"
    assert first["parameters"]["lm_head.weight"] == (256, 128)
    assert first["rows alone"] and second["rows alone"], "a row's bits are its own over ranks, too"
    # cut as stored, a padded buffer gives the second rank padding
    wrong = [rank["padded, rates not narrowed"] for rank in (first, second)]
    off = (torch.cat([half[0] for half in wrong], dim=-1) - logits).abs().max()
    assert float(off) > 1e-2


def test_packed_experts_are_shared_out_as_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    target = kimi_target(k3_tiny_config())
    packed, plain = kimi_tensors(target), kimi_tensors(target)
    for name in [name for name in plain if ".experts." in name]:
        codes, scale, plain[name] = pack(packed.pop(name))
        stem = name.removesuffix(".weight")
        packed |= {f"{stem}.weight_packed": codes, f"{stem}.weight_scale": scale}
    one = write_kimi(tmp_path / "packed", k3_tiny_config(quantization_config=MXFP4), packed)
    two = write_kimi(tmp_path / "plain", k3_tiny_config(), plain)
    for index in range(2):
        pairs = zip(part(one, index).named_parameters(), part(two, index).named_parameters(), strict=True)
        assert all(name == other and torch.equal(left, right) for (name, left), (other, right) in pairs)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_shared_out(name: str, tmp_path: Path) -> None:
    config = k3_tiny_config(**VARIANTS[name])
    folder = write_kimi(tmp_path / "target", config, kimi_tensors(kimi_target(config)))
    sizes = [sum(one.numel() for one in part(folder, index).parameters()) for index in range(2)]
    whole = sum(one.numel() for one in kimi_target(config).parameters())
    assert sizes[0] == sizes[1] and whole < sum(sizes) < 1.5 * whole


def test_the_tower_of_a_multimodal_target_belongs_to_nobody(tmp_path: Path) -> None:
    folder = write_kimi(tmp_path / "target", multimodal_config(), kimi_tensors(multimodal_target()))
    assert not [name for name, _ in part(folder, 1, layers=(4, 8)).named_parameters() if "vision" in name]


def test_a_rank_reads_no_tensor_of_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    load = PartialSource.load

    def watched(self: PartialSource, name: str) -> Any:
        read.append(name)
        return load(self, name)

    monkeypatch.setattr(PartialSource, "load", watched)
    part(folder, 1, layers=(4, 8))
    assert {name.split(".")[2] for name in read if ".layers." in name} == {"4", "5", "6", "7"}
    assert {name.split(".experts.")[1].split(".")[0] for name in read if ".experts." in name} == {"2", "3"}
    assert "lm_head.weight" in read and "model.embed_tokens.weight" not in read


def test_a_rank_reads_its_part_and_not_a_number_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = k3_tiny_config()
    tensors = kimi_tensors(kimi_target(config), flat_convolution=True)
    folder = write_kimi(tmp_path / "target", config, tensors)
    num_read = 0

    def counted(read: Any) -> Any:
        def wrapper(self: Any, *arguments: Any) -> Any:
            nonlocal num_read
            found = read(self, *arguments)
            num_read += found.numel()
            return found

        return wrapper

    kind = type(open_safetensors(folder))
    monkeypatch.setattr(kind, "_read", counted(kind._read))  # type: ignore[attr-defined]
    for index in range(2):
        num_read = 0
        stage = part(folder, index, layers=(4, 8))
        assert num_read == sum(one.numel() for one in stage.parameters())


def test_parts_of_files_in_other_forms_are_those_of_the_whole(tmp_path: Path) -> None:
    """Convolutions of three dimensions and padded decay rates among them."""
    config = k3_tiny_config()
    tensors = kimi_tensors(kimi_target(config), rates="padded")
    source = open_kimi(open_safetensors(write_kimi(tmp_path / "target", config, tensors)), kimi_contract(config), None)
    for name in ("model.layers.1.self_attn.k_conv1d.weight", "model.layers.1.self_attn.A_log", "lm_head.weight"):
        whole = source.load(name)
        assert torch.equal(load_part(source, name, (1, 3)), whole[1:3])
        if whole.dim() == 2:
            assert torch.equal(load_part(source, name, (1, 3), (2, 4)), whole[1:3, 2:4])


@pytest.mark.parametrize("fault", ["missing", "unused", "already cut", "not finite"])
def test_what_is_refused(fault: str, folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "unused":
        tensors["model.layers.1.self_attn.rotary.weight"] = torch.zeros(2)
    elif fault == "already cut":  # of the shape that a rank's part has
        tensors[name] = tensors[name][:64].clone()
    else:
        tensors[name][100] = float("nan")
    damaged = write_kimi(tmp_path / "damaged", k3_tiny_config(), tensors)
    match = {"already cut": r"is \[64, 128\], expected \[128, 128\]", "not finite": "NaN or infinity"}.get(fault, fault)
    with pytest.raises(CheckpointError, match=match):
        part(damaged, 1)


@pytest.mark.parametrize(
    ("size", "told"), [(3, "num_attention_heads 4 and intermediate_size 256"), (8, "linear_attn_config.num_heads 4")]
)
def test_shares_that_do_not_come_out_even_are_refused(size: int, told: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"{size} ranks per stage cannot share .*{told}"):
        part(folder, 0, size)


def test_a_table_that_a_drafter_borrows_is_whole(folder: Path) -> None:
    contract = read_target_contract(folder, "tiny")
    table = load_table(contract, folder, "lm_head.weight", like=torch.zeros(0, dtype=torch.float32))
    assert torch.equal(table, kimi_target(k3_tiny_config()).lm_head.weight)


def test_folders_are_told_apart_by_their_weights(folder: Path, tmp_path: Path) -> None:
    config = k3_tiny_config()
    same = write_kimi(tmp_path / "same", config, kimi_tensors(kimi_target(config)))
    other = write_kimi(tmp_path / "other", config, kimi_tensors(kimi_target(config, seed=1)))
    longer = write_kimi(tmp_path / "longer", {**config, "rms_norm_eps": 1e-6}, kimi_tensors(kimi_target(config)))
    (same / "README.md").write_text("files that are not read do not count")
    assert folder_digest(same) == folder_digest(folder)
    assert len({folder_digest(one) for one in (folder, other, longer)}) == 3
