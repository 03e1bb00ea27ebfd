from __future__ import annotations

import pytest
import torch
from benchmarks.random_dense import (
    DENSE_SHAPES,
    QWEN3_8B,
    SMOLLM2_135M,
    dflash_contract,
    numbering_tokenizer,
    plain_copy,
    random_drafter,
    random_prompts,
    random_target,
    tapped_layers,
)

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.targets.dense import DenseTarget

CPU = torch.device("cpu")


@pytest.mark.parametrize(("contract", "millions"), [(SMOLLM2_135M, 134.5), (QWEN3_8B, 8190.7)])
def test_published_shapes_have_the_published_number_of_parameters(contract, millions) -> None:
    with torch.device("meta"):
        target = DenseTarget(contract, max_positions=2)
    assert round(sum(parameter.numel() for parameter in target.parameters()) / 1e6, 1) == millions


def test_a_drafter_taps_early_quarters_and_late_layers() -> None:
    assert tapped_layers(30) == (1, 7, 15, 22, 27)
    assert tapped_layers(36) == (1, 9, 18, 27, 33)
    contract = dflash_contract(QWEN3_8B)
    assert (contract.num_layers, contract.num_draft_tokens, contract.num_taps) == (5, 15, 5)
    with torch.device("meta"):
        DFlashDrafter(contract, max_positions=2)


@pytest.mark.parametrize("shape", ["tiny-smollm2", "tiny-qwen3"])
def test_random_models_serve_and_their_drafts_are_refused(shape: str) -> None:
    target = random_target(DENSE_SHAPES[shape], CPU, dtype=torch.float32, linear_mode="row_invariant")
    drafter = random_drafter(target, num_layers=2, block_size=4)
    prompts = random_prompts(2, 12, target.contract.vocab_size)
    sampling = SamplingParameters(max_tokens=16, ignore_eos=True)
    settings = EngineSettings(max_num_seqs=2, max_model_len=64)
    plain = Engine(target, None, settings).generate(prompts, sampling)
    drafted = Engine(target, drafter, settings).generate(prompts, sampling)
    assert [one.token_ids for one in plain] == [one.token_ids for one in drafted]
    assert [len(one.token_ids) for one in plain] == [16, 16]
    records = [record for one in drafted for record in one.trace.records]
    assert sum(record.num_accepted for record in records) < len(records) / 4
    assert all(len(set(one.token_ids)) > 4 for one in plain), "a text that repeats itself shows little"


def test_streams_neither_vanish_nor_overflow() -> None:
    target = random_target(DENSE_SHAPES["tiny-qwen3"], CPU, dtype=torch.bfloat16, linear_mode="plain")
    from paceline.models.sequence_attend import sequence_attend

    ids_1T = torch.tensor(random_prompts(1, 30, 512))
    hidden_1TD = target.model(ids_1T, torch.arange(30).unsqueeze(0), sequence_attend(target.model))
    spread = float(target.model.logits(hidden_1TD).float().std())
    assert 0.3 < spread < 3.0


def test_the_same_seed_gives_the_same_weights_and_float32_copies_them() -> None:
    contract = DENSE_SHAPES["tiny-smollm2"]
    one, two, other = (
        random_target(contract, CPU, dtype=torch.bfloat16, seed=seed, linear_mode="plain") for seed in (0, 0, 1)
    )
    weights = [dict(each.model.named_parameters()) for each in (one, two, other)]
    name = "layers.3.mlp.down_proj.weight"
    assert torch.equal(weights[0][name], weights[1][name]) and not torch.equal(weights[0][name], weights[2][name])
    wide = plain_copy(one, torch.float32)
    assert wide.model.lm_head.weight is wide.model.embed_tokens.weight
    for name, parameter in wide.model.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, weights[0][name].float())


def test_every_id_has_a_text() -> None:
    assert numbering_tokenizer(300).decode([299]) == "w299"
    assert min(min(prompt) for prompt in random_prompts(8, 64, 300)) >= 10
