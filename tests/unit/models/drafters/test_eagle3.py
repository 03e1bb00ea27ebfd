"""The EAGLE-3 network against a slow float64 twin of whole drafts, switch by switch, and its parameters by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.fakes import Lending
from tests.unit.models.conftest import drafter_contract, randomise
from torch import Tensor

from paceline.checkpoint.contract import DrafterContract, Eagle3Settings, RopeSettings, TargetLayerId
from paceline.checkpoint.names import drafter_slots
from paceline.errors import CheckpointError, ConfigError
from paceline.models.building import empty_block_drafter, empty_drafter
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.drafters.table import DRAFTERS
from paceline.ops.attention import attention_reference

PLAIN = Eagle3Settings(norm_before_residual=False, norm_before_fc=False, norm_output=False, doubles_every_layer=False)
NUM_TOKENS, NUM_DRAFTS = 9, 4


def eagle3_contract(**changes: Any) -> DrafterContract:
    """One layer without q/k norms on `target_contract()`; names of `Eagle3Settings` among `changes` are its fields."""
    switches = {field.name: changes.pop(field.name) for field in dataclasses.fields(PLAIN) if field.name in changes}
    defaults: dict[str, Any] = {
        "family": "eagle3",
        "layout": "autoregressive",
        "num_layers": 1,
        "has_qk_norm": False,
        "rope": RopeSettings(theta=100.0),
        "eagle3": dataclasses.replace(PLAIN, **switches),
    }
    fields = defaults | changes
    fields.setdefault("layer_windows", (None,) * fields["num_layers"])
    fields.setdefault("layer_causal", (True,) * fields["num_layers"])
    return drafter_contract(**fields)


def eagle3(seed: int = 1, **changes: Any) -> Eagle3Drafter:
    drafter = Eagle3Drafter(eagle3_contract(**changes))
    randomise(drafter, seed)
    return drafter.requires_grad_(False).eval()


# --- whole drafts: the module, row by row without a cache ---


class Windows:
    """Causal attention over all rows, within each layer's window."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self._windows = windows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, sink_N: Tensor | None = None) -> Tensor:
        row = torch.arange(q.shape[1])
        distance = row[:, None] - row
        visible = (distance >= 0) & (distance < (self._windows[layer] or 10_000))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return attention_reference(q, k, v, visible).transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A text, its taps and a target's ends."""

    taps: list[Tensor]
    tokens: Tensor
    target: Lending

    @classmethod
    def of(cls, seed: int, vocab_size: int = 61, width: int = 24, num_taps: int = 2) -> Sample:
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        taps = [3 * noise(NUM_TOKENS - 1, width) for _ in range(num_taps)]
        tokens = torch.randint(vocab_size, (NUM_TOKENS,), generator=generator)
        return cls(taps, tokens, Lending(noise(vocab_size, width), noise(vocab_size, width)))


def module_drafts(drafter: Eagle3Drafter, sample: Sample) -> tuple[Tensor, list[int]]:
    """Logits [K, V] and ids of greedy drafts after the text's last token."""
    ids, hidden, rows = sample.tokens[1:][None], drafter.features(sample.taps)[None], []
    attend = Windows(drafter.contract.layer_windows)
    for _ in range(NUM_DRAFTS):
        out, recycled = drafter(drafter.embed(ids, sample.target), hidden, torch.arange(ids.shape[1])[None], attend)
        rows.append(drafter.logits(out[0, -1], sample.target))
        drafted = drafter.vocabulary.to_target_ids(rows[-1].argmax())
        ids, hidden = torch.cat((ids, drafted.view(1, 1)), 1), torch.cat((hidden, recycled[:, -1:]), 1)
    return torch.stack(rows), ids[0, NUM_TOKENS - 1 :].tolist()


# --- the same in float64, from parameters by file name, one row after the other ---


def file_tensors(drafter: Eagle3Drafter) -> dict[str, Tensor]:
    """Float64 tensors under the names of a checkpoint."""
    parameters = drafter.checkpoint_parameters()
    found = {}
    for slot in drafter_slots(drafter.contract):
        whole = parameters[slot.parameter]
        first = slot.first_row or 0
        found[slot.name] = whole[first : first + slot.shape[0]].double()
    return found


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x: Tensor, position: int, *, is_neox_style: bool) -> Tensor:
    """Heads [N, H] turned by a position, pair by pair."""
    half, y = x.shape[-1] // 2, x.clone()
    for i in range(half):
        angle = torch.tensor(position * 100.0 ** (-2 * i / x.shape[-1]), dtype=torch.float64)
        a, b = (i, i + half) if is_neox_style else (2 * i, 2 * i + 1)
        y[:, a] = x[:, a] * angle.cos() - x[:, b] * angle.sin()
        y[:, b] = x[:, a] * angle.sin() + x[:, b] * angle.cos()
    return y


def twin_drafts(
    tensors: dict[str, Tensor],
    contract: DrafterContract,
    sample: Sample,
    *,
    embeddings_first: bool = True,
    offset: int = 1,
) -> Tensor:
    """Logits [K, V] of greedy drafts; `offset` is how far the token beside a row lies ahead of it."""
    switches, heads, groups = contract.eagle3, contract.num_heads, contract.num_heads // contract.num_kv_heads
    assert switches is not None
    embedding, head = sample.target.embedding_VD.double(), sample.target.head_VD.double()
    keys: list[list[Tensor]] = [[] for _ in range(contract.num_layers)]
    values: list[list[Tensor]] = [[] for _ in range(contract.num_layers)]

    def attention(layer: int, x: Tensor, position: int) -> Tensor:
        def project(part: str) -> Tensor:
            y = tensors[f"layers.{layer}.self_attn.{part}_proj.weight"] @ x
            if contract.attention_bias:
                y = y + tensors[f"layers.{layer}.self_attn.{part}_proj.bias"]
            return y

        q, k, v = (project(part).view(-1, contract.head_size) for part in "qkv")
        if contract.has_qk_norm:
            q = rms(q, tensors[f"layers.{layer}.self_attn.q_norm.weight"])
            k = rms(k, tensors[f"layers.{layer}.self_attn.k_norm.weight"])
        q, k = (rotated(part, position, is_neox_style=contract.is_neox_style) for part in (q, k))
        keys[layer].append(k)
        values[layer].append(v)
        first = max(0, position + 1 - (contract.layer_windows[layer] or 10_000))
        mixed = torch.zeros(heads, contract.head_size, dtype=torch.float64)
        for n in range(heads):
            seen = range(first, position + 1)
            scores = torch.stack([q[n] @ keys[layer][p][n // groups] for p in seen]) * contract.head_size**-0.5
            for weight, p in zip(scores.softmax(0), seen, strict=True):
                mixed[n] += weight * values[layer][p][n // groups]
        y = tensors[f"layers.{layer}.self_attn.o_proj.weight"] @ mixed.flatten()
        return y + tensors[f"layers.{layer}.self_attn.o_proj.bias"] if contract.attention_bias else y

    def row(token: int, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        x, e = hidden, embedding[token]
        for layer in range(contract.num_layers):
            own = f"layers.{layer}"
            if layer == 0 or switches.doubles_every_layer:
                normed = rms(x, tensors[f"{own}.hidden_norm.weight"])
                both = [rms(e, tensors[f"{own}.input_layernorm.weight"]), normed]
                read = torch.cat(both if embeddings_first else both[::-1])
                residual = normed if switches.norm_before_residual else x
            else:
                read, residual = rms(x, tensors[f"{own}.input_layernorm.weight"]), x
            x = residual + attention(layer, read, position)
            y = rms(x, tensors[f"{own}.post_attention_layernorm.weight"])
            gate, up = tensors[f"{own}.mlp.gate_proj.weight"] @ y, tensors[f"{own}.mlp.up_proj.weight"] @ y
            x = x + tensors[f"{own}.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        out = rms(x, tensors["norm.weight"])
        return out, out if switches.norm_output else x

    out = recycled = torch.zeros(0)
    for position in range(NUM_TOKENS - 1):
        taps = [tap[position].double() for tap in sample.taps]
        if contract.has_tap_norm:
            taps = [rms(tap, tensors[f"fc_norm.{t}.weight"]) for t, tap in enumerate(taps)]
        joined = torch.cat(taps)
        if switches.norm_before_fc:
            joined = rms(joined, tensors["input_norm.weight"])
        out, recycled = row(int(sample.tokens[position + offset]), tensors["fc.weight"] @ joined, position)
    logits = []
    for k in range(NUM_DRAFTS):
        logits.append(head @ out)
        out, recycled = row(int(logits[-1].argmax()), recycled, NUM_TOKENS - 1 + k)
    return torch.stack(logits)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_output": {"norm_output": True},
    "tap norms": {"has_tap_norm": True},
    "q/k norms": {"has_qk_norm": True},
    "biases": {"attention_bias": True},
    "two layers": {"num_layers": 2},
    "two doubled layers": {"num_layers": 2, "doubles_every_layer": True, "norm_before_residual": True},
    "windows": {"num_layers": 2, "layer_windows": (3, None)},
    "interleaved": {"is_neox_style": False},
    "all": {
        "num_layers": 2,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "has_qk_norm": True,
        "layer_windows": (None, 4),
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_equal_the_slow_twin(name: str) -> None:
    drafter, sample = eagle3(**VARIANTS[name]), Sample.of(5)
    logits, ids = module_drafts(drafter, sample)
    expected = twin_drafts(file_tensors(drafter), drafter.contract, sample)
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-4)
    assert ids == expected.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("plain", {"norm_before_residual": True}),
        ("norm_before_residual", {"norm_before_residual": False}),
        ("norm_before_fc", {"norm_before_fc": False}),
        ("plain", {"norm_output": True}),
        ("norm_output", {"norm_output": False}),
        ("tap norms", {"has_tap_norm": False}),
        ("q/k norms", {"has_qk_norm": False}),
        ("windows", {"layer_windows": (4, None)}),
        ("interleaved", {"is_neox_style": True}),
    ],
)
def test_a_switch_read_wrongly_shows(name: str, fault: dict[str, Any]) -> None:
    """B06, P39: every switch is text-neutral and changes the drafts."""
    drafter, sample = eagle3(**VARIANTS[name]), Sample.of(5)
    wrong = eagle3_contract(**(VARIANTS[name] | fault))
    difference = module_drafts(drafter, sample)[0] - twin_drafts(file_tensors(drafter), wrong, sample)
    assert difference.abs().max() > 0.05


@pytest.mark.parametrize("fault", [{"embeddings_first": False}, {"offset": 0}])
def test_order_of_the_halves_and_the_token_beside_a_row_show(fault: dict[str, Any]) -> None:
    drafter, sample = eagle3(), Sample.of(5)
    difference = module_drafts(drafter, sample)[0] - twin_drafts(
        file_tensors(drafter), drafter.contract, sample, **fault
    )
    assert difference.abs().max() > 0.5


def test_norm_output_and_residual_matter_only_where_they_should() -> None:
    """`norm_output` leaves the first draft alone: it changes what the second one starts from."""
    sample, first, second = Sample.of(5), eagle3(), eagle3(norm_output=True)
    a, b = module_drafts(first, sample)[0], module_drafts(second, sample)[0]
    assert torch.equal(a[0], b[0])
    assert not torch.allclose(a[1], b[1], atol=1e-2)


@pytest.mark.parametrize(("normed", "expected"), [(True, [1.697056, 1.131371]), (False, [3.0, 4.0])])
@torch.no_grad()
def test_the_residual_is_the_normed_or_the_raw_state(normed: bool, expected: list[float]) -> None:
    contract = eagle3_contract(
        norm_before_residual=normed,
        hidden_size=2,
        target_hidden_size=2,
        num_heads=1,
        num_kv_heads=1,
        head_size=2,
        intermediate_size=1,
        rms_norm_eps=0.0,
        target_layer_ids=(TargetLayerId(0),),
    )
    drafter = Eagle3Drafter(contract)
    randomise(drafter, 0)
    layer = drafter.layers[0]
    layer.hidden_norm.weight.copy_(torch.tensor([2.0, 1.0]))
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    hidden = torch.tensor([[[3.0, 4.0]]])
    _, recycled = drafter(torch.ones(1, 1, 2), hidden, torch.zeros(1, 1).long(), Windows((None,)))
    torch.testing.assert_close(recycled[0, 0], torch.tensor(expected), atol=1e-6, rtol=0)


def test_one_norm_per_tap_is_not_one_norm_over_all() -> None:
    """Worked numbers: taps [3, 4] and [0.3, 0.4], unit gains."""
    changes = {"hidden_size": 4, "target_hidden_size": 2, "rms_norm_eps": 0.0}
    taps = [torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4])]
    for switch, expected in (
        ("has_tap_norm", [0.848528, 1.131371, 0.848528, 1.131371]),
        ("norm_before_fc", [1.194045, 1.592060, 0.119404, 0.159206]),
    ):
        drafter = Eagle3Drafter(eagle3_contract(**{switch: True}, **changes))
        with torch.no_grad():
            drafter.fc.weight.copy_(torch.eye(4))
        torch.testing.assert_close(drafter.features(taps).detach(), torch.tensor(expected), atol=1e-6, rtol=0)


# --- vocabulary ---


def test_a_reduced_vocabulary_drafts_target_ids_through_its_own_head() -> None:
    """Draft ids 0, 1, 2 stand for 2, 5, 7; the next row reads the embedding of the target id."""
    drafter = eagle3(draft_vocab_size=3, has_own_head=True)
    drafter.vocabulary.target_ids_V = torch.tensor([2, 5, 7])
    sample = Sample.of(5)
    logits, ids = module_drafts(drafter, sample)
    assert logits.shape == (NUM_DRAFTS, 3)
    assert ids == [[2, 5, 7][best] for best in logits.argmax(-1).tolist()]
    drafter.vocabulary.target_ids_V = torch.tensor([2, 6, 8])  # other rows of the embedding
    other, _ = module_drafts(drafter, sample)
    assert torch.equal(other[0], logits[0]) and not torch.equal(other[1:], logits[1:])


def test_own_embedding_and_head_are_used_instead_of_the_targets() -> None:
    """B23."""
    own, sample = eagle3(has_own_embedding=True, has_own_head=True), Sample.of(5)
    nothing = torch.full((61, 24), torch.nan)
    logits, _ = module_drafts(own, dataclasses.replace(sample, target=Lending(nothing, nothing)))
    assert logits.isfinite().all()
    assert own.vocabulary.embed_tokens is not None and own.vocabulary.lm_head is not None
    lent = dataclasses.replace(
        sample, target=Lending(own.vocabulary.embed_tokens.weight, own.vocabulary.lm_head.weight)
    )
    borrowing = eagle3()
    borrowing.load_state_dict(
        {name: tensor for name, tensor in own.state_dict().items() if not name.startswith("vocabulary.")}
    )
    torch.testing.assert_close(module_drafts(borrowing, lent)[0], logits)


# --- parameters and refusals ---


@pytest.mark.parametrize(
    "changes",
    [*VARIANTS.values(), {"has_own_embedding": True, "has_own_head": True, "draft_vocab_size": 7}],
)
def test_parameters_are_those_that_a_checkpoint_fills(changes: dict[str, Any]) -> None:
    drafter = eagle3(**changes)
    parameters = drafter.checkpoint_parameters()
    rows: dict[str, int] = {}
    for slot in drafter_slots(drafter.contract):
        rows[slot.parameter] = rows.get(slot.parameter, 0) + slot.shape[0]
        assert parameters[slot.parameter].shape[1:] == slot.shape[1:], slot.name
    assert rows == {name: parameter.shape[0] for name, parameter in parameters.items()}
    assert drafter.cache_shape == (2, 8)


def test_row_invariant_arithmetic_gives_the_same_drafts() -> None:
    sample = Sample.of(5)
    plain, exact = eagle3(num_layers=2), eagle3(num_layers=2)
    exact.prepare_for_serving("row_invariant")
    torch.testing.assert_close(module_drafts(exact, sample)[0], module_drafts(plain, sample)[0], atol=1e-4, rtol=1e-4)
    assert plain.to(torch.bfloat16).features(sample.taps).dtype == torch.bfloat16, "float32 taps are cast"


def test_an_empty_drafter_has_a_position_table_and_is_no_block_drafter() -> None:
    contract, cpu = eagle3_contract(), torch.device("cpu")
    empty = empty_drafter(contract, torch.bfloat16, cpu)
    assert torch.equal(empty.position_table, Eagle3Drafter(contract).position_table)
    assert {parameter.dtype for parameter in empty.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="'eagle3' drafts token by token"):
        empty_block_drafter(contract, torch.float32, cpu)


def test_the_table_knows_the_family_and_other_contracts_are_refused() -> None:
    assert DRAFTERS["eagle3"] is Eagle3Drafter
    for changes, message in (
        ({"eagle3": None}, "no EAGLE-3 switches"),
        ({"layout": "fill_in"}, "'fill_in'"),
        ({"layer_causal": (False,)}, "cannot see later ones"),
        ({"has_attention_sink": True}, "attention sinks"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Eagle3Drafter(eagle3_contract(**changes))
