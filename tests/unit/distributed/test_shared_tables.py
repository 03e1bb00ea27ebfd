"""Whether a drafter keeps its own embedding is one decision for all ranks, taken over every row of the table.

The drafter's embedding equals the target's in the second half of the vocabulary alone, one rank's share of two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import wrap_target
from tests.tiny_kimi import k3_tiny_config, kimi_target
from tests.tiny_run import write_drafter
from tests.unit.distributed.spread import CPU, REQUESTS, TAPPED, settings
from tests.unit.training.processes import run_ranks, values
from torch import Tensor

from paceline.distributed.decoding import Decoder
from paceline.distributed.opening import _Terms, open_target
from paceline.distributed.tensor_decoding import TensorDecoder
from paceline.distributed.world import World
from paceline.models.drafters.vocabulary import DraftVocabulary
from paceline.training.ranks import Ranks

NAME = "own-first-half"


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    model = kimi_target(k3_tiny_config())
    target: Any = wrap_target(model, "row_invariant")  # type: ignore[arg-type]
    fields = {"family": "dflash", "aux_hidden_stream": "attn_res", "target_layer_ids": TAPPED}
    path = write_drafter(models / NAME, target, fingerprint=False, has_own_embedding=True, **fields)
    tensors = load_file(path / "model.safetensors")
    table = model.embed_tokens.weight.detach().clone()
    table[: len(table) // 2] = torch.randn(len(table) // 2, table.shape[1], generator=torch.Generator().manual_seed(9))
    save_file(tensors | {"embed_tokens.weight": table}, path / "model.safetensors")
    return models


def own_half_decides(self: DraftVocabulary, embedding_VD: Tensor, head_VD: Tensor) -> list[str]:
    """The planted fault: a rank looks at its own rows of the table, here the second half."""
    assert self.embed_tokens is not None
    half = len(embedding_VD) // 2
    if torch.equal(self.embed_tokens.weight[half:], embedding_VD[half:]):
        self.embed_tokens = None
    return []


def proposer_of(decoder: Decoder | TensorDecoder) -> Any:
    """What drafts on this rank, whether an engine asks it or a stage."""
    if isinstance(decoder, TensorDecoder):
        proposer: Any = decoder.engine._loop.parts.proposer
        return getattr(proposer, "_inner", proposer)
    return None if decoder._drafting is None else decoder._drafting._proposer


def decide(ranks: Ranks, folder: Path, fields: dict[str, Any], is_planted: bool = False) -> dict[str, Any]:
    """This rank's decision, where it has a drafter, and what was drafted and accepted."""
    world = World(ranks.rank, ranks.size, CPU)
    with patch.object(DraftVocabulary, "drop_copies", own_half_decides if is_planted else DraftVocabulary.drop_copies):
        opened = open_target(world, settings(folder, {"drafter": NAME, **fields}))
    proposer = proposer_of(opened.decoder)
    kept = None if proposer is None else proposer._drafter.vocabulary.embed_tokens is not None
    found = opened.decoder.generate(REQUESTS)
    return {
        "kept": kept,
        "tokens": [one.token_ids for one in found],
        "accepted": [one.acceptance.num_accepted for one in found],
        "drafted": [one.acceptance.num_draft_tokens for one in found],
    }


def test_all_ranks_decide_as_one_process_does(folder: Path, tmp_path: Path) -> None:
    """And draft as it does: stages as a decoder by itself, ranks that share all layers as an engine by itself."""
    alone = decide(Ranks(0, 1, CPU), folder, {})
    with patch.object(_Terms, "shares_every_layer", True):
        engine_alone = decide(Ranks(0, 1, CPU), folder, {})
    assert alone["kept"] is engine_alone["kept"] is True, "equal in one half is not equal"
    assert alone["tokens"] == engine_alone["tokens"]
    for name, fields, expected in (
        ("parts", {"tensor_size": 2}, engine_alone),
        ("stages", {"num_stages": 2}, alone),
    ):
        found = values(run_ranks(decide, tmp_path / name, folder, fields))
        assert {rank["kept"] for rank in found} - {None} == {True}, "whoever drafts keeps it"
        for rank in found:
            assert {key: rank[key] for key in rank if key != "kept"} == {
                key: expected[key] for key in expected if key != "kept"
            }


def test_a_decision_by_ones_own_rows_would_be_seen(folder: Path) -> None:
    assert decide(Ranks(0, 1, CPU), folder, {}, is_planted=True)["kept"] is False
