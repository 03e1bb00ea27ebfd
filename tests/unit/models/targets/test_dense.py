"""Dense targets against transformers: logits and every hidden state of random Llama and Qwen3 models, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.models.conftest import positions_of, randomise, target_contract, tiny_target
from tests.unit.models.test_fused_layer import Mixes
from tests.unit.models.test_positions import CASES as ROPE_CASES
from tests.unit.models.test_positions import hugging_face_keys
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from paceline.models.attends import WholeSequence
from paceline.models.layers import DecoderLayer, set_linear_mode
from paceline.models.taps import CaptureId, TapCollector
from paceline.models.targets.dense import DenseTarget

TOLERANCE = 1e-4
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def reference_model(architecture: str, rope: str, **changes: Any) -> tuple[nn.Module, DenseTarget]:
    """A random transformers model and ours with its weights; `changes` are fields of the contract."""
    contract = target_contract(
        architecture=architecture, rope=ROPE_CASES[rope], has_qk_norm=architecture == "Qwen3ForCausalLM", **changes
    )
    keys: dict[str, Any] = {
        "hidden_size": contract.hidden_size,
        "intermediate_size": contract.intermediate_size,
        "num_hidden_layers": contract.num_layers,
        "num_attention_heads": contract.num_heads,
        "num_key_value_heads": contract.num_kv_heads,
        "head_dim": contract.head_size,
        "vocab_size": contract.vocab_size,
        "rms_norm_eps": contract.rms_norm_eps,
        "max_position_embeddings": contract.max_position_embeddings,
        "attention_bias": contract.attention_bias,
        "tie_word_embeddings": contract.tie_word_embeddings,
        "rope_parameters": hugging_face_keys(contract.rope),
    }
    if architecture == "LlamaForCausalLM":
        theirs: nn.Module = LlamaForCausalLM(LlamaConfig(mlp_bias=contract.mlp_bias, **keys))
    else:
        theirs = Qwen3ForCausalLM(Qwen3Config(**keys))
    randomise(theirs, 0)
    theirs.eval().requires_grad_(False)
    ours = DenseTarget(contract)
    copy_weights(theirs, ours)
    return theirs, ours.eval().requires_grad_(False)


def copy_weights(theirs: nn.Module, ours: DenseTarget) -> None:
    """Fuse q, k, v and gate, up; every parameter of ours must be filled and every one of theirs used."""
    state = {name.removeprefix("model."): tensor for name, tensor in theirs.named_parameters()}
    filled = {}
    for name in dict(ours.named_parameters()):
        parts = [name]
        for fused_name, sources in FUSED.items():
            if fused_name in name:
                parts = [name.replace(fused_name, source) for source in sources]
        filled[name] = torch.cat([state.pop(part) for part in parts])
    assert not state, f"unused: {sorted(state)}"
    ours.load_state_dict(filled, strict=not ours.contract.tie_word_embeddings)


@torch.no_grad()
def compare(theirs: nn.Module, ours: DenseTarget, token_ids: Tensor) -> tuple[float, float]:
    """Largest difference of logits, and of hidden states over all capture ids."""
    before_norm: list[Tensor] = []
    hook = theirs.model.norm.register_forward_pre_hook(lambda _m, inputs: before_norm.append(inputs[0]))
    expected = theirs(token_ids, output_hidden_states=True)
    hook.remove()
    taps = TapCollector([CaptureId(i) for i in ours.capture_ids])
    hidden = ours(token_ids, positions_of(token_ids), WholeSequence(), taps)
    # The last entry of transformers' list has gone through the final norm; a tap has not.
    states = [*expected.hidden_states[: len(ours.layers)], before_norm[0]]
    worst = max(float((tap - state).abs().max()) for tap, state in zip(taps.collected(), states, strict=True))
    return float((ours.logits(hidden) - expected.logits).abs().max()), worst


VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head": {"num_kv_heads": 4},
    "one-kv-head": {"num_kv_heads": 1},
    "wide-heads": {"head_size": 20},  # 4 * 20 is not 24
    "untied": {"tie_word_embeddings": False},
    "attention-bias": {"attention_bias": True},
    "eps": {"rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_taps_agree_with_transformers(architecture: str, variant: str) -> None:
    theirs, ours = reference_model(architecture, "default", **VARIANTS[variant])
    logits, taps = compare(theirs, ours, torch.randint(0, 61, (2, 17)))
    assert logits <= TOLERANCE and taps <= TOLERANCE


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("rope", sorted(set(ROPE_CASES) - {"default"}))
def test_every_rope_agrees_beyond_the_original_length(architecture: str, rope: str) -> None:
    length = 3 * (ROPE_CASES[rope].original_max_position_embeddings or 32)
    theirs, ours = reference_model(architecture, rope, head_size=16, max_position_embeddings=256)
    logits, taps = compare(theirs, ours, torch.randint(0, 61, (1, length)))
    assert logits <= TOLERANCE and taps <= TOLERANCE


def test_llama_mlp_bias_agrees() -> None:
    theirs, ours = reference_model("LlamaForCausalLM", "default", mlp_bias=True)
    assert max(compare(theirs, ours, torch.randint(0, 61, (2, 9)))) <= TOLERANCE


@pytest.mark.parametrize("fault", ["rope", "qk_norm", "eps", "kv_order", "tap"])
def test_a_planted_fault_is_seen(fault: str) -> None:
    theirs, ours = reference_model("Qwen3ForCausalLM", "default")
    tokens = torch.randint(0, 61, (2, 17))
    first = ours.layers[0]
    assert isinstance(first, DecoderLayer)
    if fault == "rope":
        ours.position_table = ours.position_table.roll(1, dims=0) * torch.tensor([1.0, -1.0]).view(1, 2, 1)
    elif fault == "qk_norm":
        first.self_attn.k_norm = None
    elif fault == "eps":
        ours.norm.eps = 1.0
    elif fault == "kv_order":
        weight = first.self_attn.qkv_proj.weight
        weight[32:48], weight[48:64] = weight[48:64].clone(), weight[32:48].clone()
    else:  # one layer off: only the taps can tell
        ours.layers[1].forward, ours.layers[2].forward = ours.layers[2].forward, ours.layers[1].forward
    assert max(compare(theirs, ours, tokens)) > 100 * TOLERANCE


def test_taps_one_layer_off_are_far_away() -> None:
    theirs, ours = reference_model("LlamaForCausalLM", "default")
    tokens = torch.randint(0, 61, (2, 17))
    states = theirs(tokens, output_hidden_states=True).hidden_states
    taps = TapCollector([CaptureId(2)])
    ours(tokens, positions_of(tokens), WholeSequence(), taps)
    assert (taps.collected()[0] - states[2]).abs().max() <= TOLERANCE
    for wrong in (1, 3, 4):
        assert (taps.collected()[0] - states[wrong]).abs().max() > 100 * TOLERANCE
    # The last state without its final norm is not what transformers lists last.
    last = TapCollector([CaptureId(4)])
    ours(tokens, positions_of(tokens), WholeSequence(), last)
    assert (last.collected()[0] - states[4]).abs().max() > 100 * TOLERANCE


def test_a_tied_head_is_the_embedding_itself() -> None:
    tied, untied = tiny_target(), tiny_target(tie_word_embeddings=False)
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert untied.lm_head.weight is not untied.embed_tokens.weight
    assert "lm_head.weight" not in dict(tied.named_parameters())
    assert "lm_head.weight" in dict(untied.named_parameters())


def test_rows_of_any_length_and_position_agree_with_the_whole() -> None:
    """Positions are absolute and given by the caller: the same tokens elsewhere give other states."""
    target = tiny_target()
    tokens = torch.randint(0, 61, (1, 6))
    here = target(tokens, positions_of(tokens), WholeSequence())
    shifted = target(tokens, positions_of(tokens) + 40, WholeSequence())
    torch.testing.assert_close(here, shifted, rtol=1e-3, atol=1e-4)  # attention sees distances alone
    spread = target(tokens, positions_of(tokens) * 3, WholeSequence())
    assert (here - spread).abs().max() > 1e-2


def test_row_invariant_mode_agrees_with_the_plain_one() -> None:
    target = tiny_target()
    tokens = torch.randint(0, 61, (2, 9))
    plain = target.logits(target(tokens, positions_of(tokens), WholeSequence()))
    set_linear_mode(target, "row_invariant")
    other = target.logits(target(tokens, positions_of(tokens), WholeSequence()))
    torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-4)


def test_packed_mode_agrees_with_the_plain_one_for_one_row_and_for_several() -> None:
    target = tiny_target().to(torch.bfloat16)
    tokens = torch.randint(0, 61, (1, 9))
    for num_rows in (1, 9):
        rows, positions = tokens[:, :num_rows], positions_of(tokens)[:, :num_rows]
        set_linear_mode(target, "plain")
        plain = target.logits(target(rows, positions, WholeSequence()))
        set_linear_mode(target, "packed")  # plain once more where nothing can be packed
        taps = TapCollector([CaptureId(0), CaptureId(2)])
        hidden = target(rows, positions, WholeSequence(), taps)
        assert hidden.shape == (1, num_rows, 24) and all(tap.shape == hidden.shape for tap in taps.collected())
        packed = target.logits(hidden)
        assert packed.shape == (1, num_rows, 61)
        torch.testing.assert_close(packed, plain, rtol=2**-4, atol=2**-4 * float(plain.abs().max()))


@pytest.mark.parametrize("num_rows", [9, 70])  # in five launches a layer, and with the library's products
@pytest.mark.parametrize("captures", [(0, 1, 2), (1,)])
def test_taps_of_fused_layers_are_those_of_the_modules(num_rows: int, captures: tuple[int, ...]) -> None:
    """With many rows layers add to the stream in place: a tap that they were not told of would hold a later stream."""
    target = tiny_target(num_layers=2, max_position_embeddings=128).requires_grad_(False)
    tokens = torch.randint(0, 61, (1, num_rows))
    contract = target.contract
    attend = Mixes((1, num_rows), contract.num_kv_heads, contract.head_size, torch.float32)
    found = {}
    for mode in ("plain", "fused"):
        set_linear_mode(target, mode)  # type: ignore[arg-type]
        taps = TapCollector([CaptureId(capture) for capture in captures])
        with torch.inference_mode():
            hidden = target(tokens, positions_of(tokens), attend, taps)
        found[mode] = [*taps.collected(), hidden]
    assert target._fused
    for fused, plain in zip(found["fused"], found["plain"], strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
