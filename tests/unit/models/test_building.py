"""Models without weights: what has to be set is not set, and torch's compiler is not imported on the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.tiny import tiny_target, tiny_target_contract

import paceline
from paceline.checkpoint.contract import RopeSettings
from paceline.models.building import empty_target
from paceline.models.embedding import empty_embedding
from paceline.models.positions import position_table

CPU = torch.device("cpu")

# An import takes over a second, of every start; torch does it for much that is computed on the meta device.
_BUILD = """
import sys
import torch
from tests.tiny import PARTS_OF_FAMILY, tiny_drafter_contract, tiny_target_contract
from tests.tiny_kimi import k3_tiny_config, kimi_contract, multimodal_config
from paceline.models.building import empty_drafter, empty_target

cpu = torch.device("cpu")
targets = [tiny_target_contract("llama"), tiny_target_contract("qwen3", tie_word_embeddings=True)]
for contract in [*targets, kimi_contract(k3_tiny_config()), kimi_contract(multimodal_config())]:
    empty_target(contract, torch.bfloat16, cpu)
for family, parts in {"dflash": {}, **PARTS_OF_FAMILY}.items():
    empty_drafter(tiny_drafter_contract(targets[0], family=family, **parts), torch.float32, cpu)
print(sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
"""


def test_no_model_needs_the_compiler() -> None:
    folders = [str(Path(paceline.__file__).parents[1]), str(Path(__file__).parents[3])]
    done = subprocess.run(
        [sys.executable, "-c", _BUILD], capture_output=True, text=True, env={"PYTHONPATH": ":".join(folders)}
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_empty_target_is_a_filled_one_but_for_its_weights(is_tied: bool) -> None:
    contract = tiny_target_contract(tie_word_embeddings=is_tied)
    empty, filled = empty_target(contract, torch.float32, CPU), tiny_target(tie_word_embeddings=is_tied)
    shapes = {name: (value.shape, value.dtype) for name, value in filled.state_dict().items()}
    assert {name: (value.shape, value.dtype) for name, value in empty.state_dict().items()} == shapes
    assert torch.equal(empty.position_table, filled.position_table)
    assert (empty.lm_head.weight is empty.embed_tokens.weight) == is_tied
    assert not any(parameter.requires_grad for parameter in empty.parameters())
    assert all(parameter.is_contiguous() and parameter.device == CPU for parameter in empty.parameters())


def test_an_empty_embedding() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    table = empty_embedding(5, 3)
    assert table.weight.shape == (5, 3) and table.weight.requires_grad
    assert torch.equal(torch.rand(3), expected), "nothing was drawn"


def test_a_position_table_on_the_meta_device_has_the_shape_of_a_real_one() -> None:
    rope = RopeSettings(theta=10_000.0)
    with torch.device("meta"):
        shape = position_table(rope, 8, 16)
    real = position_table(rope, 8, 16)
    assert shape.is_meta and (shape.shape, shape.dtype) == (real.shape, real.dtype) == ((16, 2, 4), torch.float32)
