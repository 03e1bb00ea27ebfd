"""Llama and Qwen3 targets over real processes: the tokens of one process, at any cut, whole and in shares."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import write_drafter, write_target_folder
from tests.unit.checkpoint.conftest import TinyGguf
from tests.unit.distributed.spread import CPU, decode, decode_cases, refuse_cases
from tests.unit.training.processes import run_ranks, values
from torch import Tensor

from paceline.checkpoint.contract import TargetLayerId
from paceline.checkpoint.target_config import read_target_contract
from paceline.distributed import sharded_weights
from paceline.distributed.mesh import TensorGroup
from paceline.distributed.sharding import require_shares, sharded_stage
from paceline.distributed.world import World
from paceline.errors import ConfigError
from paceline.models.building import empty_target
from paceline.models.layers import set_linear_mode
from paceline.models.target_weights import fill_target
from paceline.models.targets.dense_stage import DenseStage
from paceline.models.targets.stage import HandOver
from paceline.training.ranks import Ranks

TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 2},
    "qwen3": {"family": "qwen3", "num_kv_heads": 2},
    "biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "vocab_size": 509},
}
TAPS = (TargetLayerId(0), TargetLayerId(2))
CASES: dict[str, dict[str, Any]] = {
    "cut behind layer 0": {"target": "llama", "drafter": "llama-dflash", "borders": (1,)},
    "cut before the last layer": {"target": "qwen3", "drafter": "qwen3-dspark", "borders": (3,)},
    "cut in the middle": {"target": "llama", "drafter": "llama-eagle3", "num_stages": 2},
    "cut, biased": {"target": "biased", "num_stages": 2},
    "shared": {"target": "llama", "drafter": "llama-dflash", "tensor_size": 2},
    "shared, q and k norms": {"target": "qwen3", "drafter": "qwen3-dspark", "tensor_size": 2},
    "shared, token by token": {"target": "llama", "drafter": "llama-eagle3", "tensor_size": 2},
    "shared, library products": {
        "target": "llama",
        "drafter": "llama-dflash",
        "tensor_size": 2,
        "linear_mode": "plain",
    },
    "shared, fused": {
        "target": "qwen3",
        "drafter": "qwen3-dspark",
        "tensor_size": 2,
        "linear_mode": "fused",
    },
    "shared, biased": {"target": "biased", "tensor_size": 2},
    "shared, biased, fused": {"target": "biased", "tensor_size": 2, "linear_mode": "fused"},
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets and drafters under their names."""
    folder = tmp_path_factory.mktemp("dense")
    for name, fields in TARGETS.items():
        model = tiny_target(**fields)
        at = write_target_folder(folder / name, model)
        if name == "biased":
            config = json.loads((at / "config.json").read_text())
            (at / "config.json").write_text(json.dumps({**config, "attention_bias": True, "mlp_bias": True}))
        target = wrap_target(model, "row_invariant")
        for family in {"llama": ("dflash", "eagle3"), "qwen3": ("dspark",)}.get(name, ()):
            taps = (*TAPS[:1], TargetLayerId(1), TAPS[1]) if family == "eagle3" else TAPS
            write_drafter(folder / f"{name}-{family}", target, family=family, target_layer_ids=taps)
    return folder


@pytest.fixture(scope="module")
def alone(dense: Path) -> dict[str, Any]:
    """What one process writes without drafts, by target."""
    return {name: decode(World(0, 1, CPU), dense, {"target": str(dense / name)}) for name in TARGETS}


def placed(dense: Path, case: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    return {**case, "target": str(dense / case["target"]), "scripts": alone[case["target"]].get("tokens")}


@pytest.fixture(scope="module")
def ranks(dense: Path, alone: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found, all cases in one start of the processes."""
    cases = {name: placed(dense, case, alone) for name, case in CASES.items()}
    return values(run_ranks(decode_cases, tmp_path_factory.mktemp("two") / "run", dense, cases))


@pytest.mark.parametrize("name", CASES)
def test_two_processes_write_what_one_writes_without_drafts(
    name: str, ranks: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    first, second = (rank[name] for rank in ranks)
    assert first == second
    assert first.get("tokens") == alone[CASES[name]["target"]]["tokens"], first
    if "drafter" in CASES[name]:
        assert 0 < sum(first["accepted"]) < sum(first["drafted"]) and first["drafted"][2] == 0


def faulty(ranks: Ranks, folder: Path, fault: str, case: dict[str, Any]) -> dict[str, Any]:
    """A case with something wrong on every rank."""
    hand_over, part = DenseStage.hand_over, sharded_weights.part_of

    def without_taps(self: DenseStage, *arguments: Any) -> HandOver:
        handed = hand_over(self, *arguments)
        return dataclasses.replace(handed, taps={at: torch.zeros_like(tap) for at, tap in handed.taps.items()})

    def same_heads(slot: Any, contract: Any, tensor: TensorGroup) -> Any:
        own = TensorGroup(0, tensor.size) if ".qkv_proj" in slot.parameter else tensor
        return part(slot, contract, own)

    def from_zero(self: DenseStage, handed: HandOver, positions_BT: Tensor) -> Any:
        return self.begin(handed.prefix_BTD, positions_BT - positions_BT[:, :1])

    plants = {
        "taps stay behind": patch.object(DenseStage, "hand_over", without_taps),
        "every rank has the first heads": patch.object(sharded_weights, "part_of", same_heads),
        "later stages count from zero": patch.object(DenseStage, "receive", from_zero),
    }
    with plants.get(fault, nullcontext()):
        return decode_cases(ranks, folder, {fault: case})[fault]  # type: ignore[no-any-return]


@pytest.mark.parametrize("fault", ["every rank has the first heads", "later stages count from zero"])
def test_faults_change_the_text(fault: str, dense: Path, alone: dict[str, Any], tmp_path: Path) -> None:
    spread = {"tensor_size": 2} if "heads" in fault else {"num_stages": 2}
    case = {"target": str(dense / "llama"), **spread}
    found = values(run_ranks(faulty, tmp_path / "run", dense, fault, case))
    assert found[0].get("tokens") and found[0]["tokens"] != alone["llama"]["tokens"]


def test_taps_that_stay_behind_are_told_by_the_fingerprint(dense: Path, tmp_path: Path) -> None:
    case = {"target": str(dense / "llama"), "drafter": "llama-dflash", "borders": (3,)}
    found = values(run_ranks(faulty, tmp_path / "run", dense, "taps stay behind", case))
    assert found[1]["error"] == "CompatibilityError" and found[0]["error"] == "OtherRankFailedError"


@pytest.mark.parametrize("size", [2])
def test_parts_make_the_whole(size: int, dense: Path) -> None:
    """Every number of the file is on one rank, but for what is whole on each."""
    for name, fields in TARGETS.items():
        contract = read_target_contract(dense / name, name)
        parts = [
            dict(
                sharded_weights.load_sharded_stage(
                    contract, dense / name, 0, 4, TensorGroup(index, size), dtype=torch.float32, device=CPU
                ).named_parameters()
            )
            for index in range(size)
        ]
        for key, tensor in tiny_target(**fields).named_parameters():
            own = [one[key] for one in parts]
            if own[0].shape == tensor.shape:
                assert all(torch.equal(one, tensor) for one in own), key
                continue
            together = torch.cat([one.flatten() for one in own]).sort().values
            assert torch.equal(together, tensor.flatten().sort().values), key
            assert "proj" in key or "embed" in key or "head" in key, key
        whole = {key.rpartition("layers.0.")[2] for key in parts[0] if "norm" in key or key.endswith("down_proj.bias")}
        assert whole, "norms and biases behind sums are everyone's"


def test_a_gguf_file_is_cut_as_a_folder_is(tmp_path: Path) -> None:
    """Behind the row order that llama.cpp stores, and through quantised blocks that span a cut of columns."""
    tiny = TinyGguf(tmp_path / "tiny.gguf")
    tiny.types |= {f"blk.{layer}.{name}.weight": "Q8_0" for layer in range(2) for name in ("attn_q", "ffn_down")}
    path = tiny.write()
    contract = read_target_contract(path, "tiny")
    whole = empty_target(contract, torch.float32, CPU)
    fill_target(whole, contract, path)
    weights = dict(whole.named_parameters())
    share = sharded_weights.load_sharded_stage(contract, path, 0, 2, TensorGroup(1, 2), dtype=torch.float32, device=CPU)
    own = dict(share.named_parameters())
    q, k, v = weights["layers.1.self_attn.qkv_proj.weight"].split([32, 16, 16])
    assert torch.equal(own["layers.1.self_attn.qkv_proj.weight"], torch.cat([q[16:], k[8:], v[8:]]))
    assert torch.equal(own["layers.1.mlp.down_proj.weight"], weights["layers.1.mlp.down_proj.weight"][:, 32:])
    assert torch.equal(own["embed_tokens.weight"], weights["embed_tokens.weight"][32:])
    assert sharded_weights.folder_digest(path) != sharded_weights.folder_digest(tmp_path)


@pytest.mark.parametrize("mode", ["packed", "fused"])
def test_layers_whose_products_are_summed_have_no_form_that_skips_the_sum(mode: Any) -> None:
    contract = tiny_target(hidden_size=128, head_size=32).contract
    for size in (1, 2):
        stage: Any = sharded_stage(contract, 0, 4, TensorGroup(0, size))
        set_linear_mode(stage.to(torch.bfloat16), mode)
        flat = [layer._flat for layer in stage.layers if layer._flat is not None]
        fused = [layer._fused for layer in stage.layers if layer._fused is not None]
        assert len(flat) == (4 if size == 1 and stage.lm_head.is_packed and mode == "packed" else 0)
        assert len(fused) == (4 if mode == "fused" else 0)
        assert all((form.total is not None) == (size > 1) for form in fused)


def test_a_tied_head_follows_its_table(dense: Path) -> None:
    """Of one rank both are one tensor; on the last of several stages the head is a copy, and no table is read."""
    contract = read_target_contract(dense / "llama", "llama")
    embedding = tiny_target(**TARGETS["llama"]).embed_tokens.weight

    def stage(start: int, end: int, tensor: TensorGroup) -> Any:
        return sharded_weights.load_sharded_stage(
            contract, dense / "llama", start, end, tensor, dtype=torch.float32, device=CPU
        )

    share = stage(0, 4, TensorGroup(1, 2))
    assert share.lm_head.weight is share.embed_tokens.weight
    assert torch.equal(share.lm_head.weight, embedding[256:])
    last = stage(3, 4, TensorGroup(1, 2))
    assert last.embed_tokens is None and torch.equal(last.lm_head.weight, embedding[256:])
    assert torch.equal(
        sharded_weights.load_table(contract, dense / "llama", "lm_head.weight", like=embedding), embedding
    )


def test_sizes_that_do_not_divide_are_refused_before_weights(dense: Path, tmp_path: Path) -> None:
    model = tiny_target(num_heads=6, num_kv_heads=3, head_size=16)
    write_target_folder(tmp_path / "three", model)
    cases = {"three": ({"target": str(tmp_path / "three"), "tensor_size": 2},) * 2}
    for rank in values(run_ranks(refuse_cases, tmp_path / "run", dense, cases)):
        assert "2 ranks per stage cannot share num_key_value_heads 3 evenly" in rank["three"]["told"]
        assert rank["read"] == 0
    with pytest.raises(ConfigError, match="intermediate_size 130"):
        require_shares(dataclasses.replace(model.contract, intermediate_size=130), 3)
