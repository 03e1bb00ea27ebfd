"""What a fingerprint says of its drafter comes back as it was."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.tiny import tiny_drafter_contract, tiny_target_contract

from paceline.checkpoint.contract import (
    ConfidenceSettings,
    ConvolutionSettings,
    DrafterContract,
    DrafterFamily,
    Eagle3Settings,
    LatentAttentionSettings,
    MarkovSettings,
    RopeSettings,
    SelectorSettings,
)
from paceline.models.probe.description import (
    FORMAT,
    MAY_DIFFER,
    FieldDifference,
    described,
    differing_fields,
    read_description,
    recorded_values,
)


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_a_contract_comes_back(family: DrafterFamily) -> None:
    contract = tiny_drafter_contract(tiny_target_contract(), family=family)
    number, fields = read_description(described(contract))
    assert number == FORMAT and fields["family"] == family
    assert recorded_values(fields, contract) == {}
    assert recorded_values(fields, dataclasses.replace(contract, origin="elsewhere")) == {}


def test_what_changed_is_given_as_a_contract_holds_it() -> None:
    contract = tiny_drafter_contract(tiny_target_contract(), rope=RopeSettings(theta=5e5, kind="linear", factor=2.0))
    _, fields = read_description(described(contract))
    edited = dataclasses.replace(contract, rope=RopeSettings(theta=1e4), layer_causal=(True, True))
    assert recorded_values(fields, edited) == {"rope": contract.rope, "layer_causal": (False, False)}


def test_fields_of_other_versions_are_passed_over() -> None:
    contract = tiny_drafter_contract(tiny_target_contract())
    _, fields = read_description(described(contract))
    fields["of_tomorrow"] = 1
    fields["rope"] = {"theta": 1.0, "of_tomorrow": 2}
    del fields["block_size"]
    assert recorded_values(fields, contract) == {}


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        (torch.ones(3), "expected bytes"),
        (torch.tensor(list(b"{"), dtype=torch.uint8), "no JSON"),
        (torch.tensor(list(b"[" * 100_000), dtype=torch.uint8), "no JSON"),
        (torch.tensor(list(b'{"format":"2"}'), dtype=torch.uint8), "names no format"),
        (torch.tensor(list(b'{"format":2,"contract":{}}'), dtype=torch.uint8), "names no drafter family"),
    ],
)
def test_what_is_no_description(stored: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_description(stored)


PARTS: dict[str, Any] = {
    "convolution": ConvolutionSettings(num_taps=2, group_size=8),
    "selector": SelectorSettings(rank=8, top_k=6),
    "markov": MarkovSettings(rank=8, kind="vanilla"),
    "confidence": ConfidenceSettings(with_markov=True),
    "latent": LatentAttentionSettings(16, 16, 8, 8, 16),
    "eagle3": Eagle3Settings(True, False, False, False),
    "draft_top_k": 4,
    "final_logit_softcapping": 30.0,
}
YARN = RopeSettings(1e4, "yarn", 4.0, 2048, attention_factor=None, mscale=1.0, mscale_all_dim=0.8)
LLAMA3 = RopeSettings(1e4, "llama3", 8.0, 2048, 1.0, 4.0)
ROPES = {  # a setting under which the field matters, and another value
    "theta": (RopeSettings(1e4), 1.1e4),
    "kind": (YARN, "linear"),
    "factor": (YARN, 8.0),
    "original_max_position_embeddings": (YARN, 512),
    "low_freq_factor": (LLAMA3, 2.0),
    "high_freq_factor": (LLAMA3, 8.0),
    "beta_fast": (YARN, 8.0),
    "beta_slow": (YARN, 4.0),
    "attention_factor": (YARN, 1.0),
    "mscale": (YARN, 0.5),
    "mscale_all_dim": (YARN, 0.5),
    "truncate": (YARN, False),
}


def differences(recorded: DrafterContract, served: DrafterContract, vocab_size: int = 512) -> list[FieldDifference]:
    return list(differing_fields(read_description(described(recorded))[1], served, vocab_size))


def another(value: Any) -> Any:
    """A value of the same type that is not the given one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 3
    if isinstance(value, tuple):
        return (*value[:-1], 7 if value[-1] is None else another(value[-1]))
    return f"{value}-other"


def whole(**changes: Any) -> DrafterContract:
    """A contract in which every part is there, as no family has it."""
    return dataclasses.replace(tiny_drafter_contract(tiny_target_contract()), **{**PARTS, **changes})


def altered() -> list[tuple[str, DrafterContract, DrafterContract]]:
    """Every field of the contract and of its parts by name, and two contracts that differ in nothing else."""
    pairs = []
    for field in dataclasses.fields(DrafterContract):
        value = getattr(whole(), field.name)
        if field.name == "rope":
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for inner in dataclasses.fields(value):
                part = dataclasses.replace(value, **{inner.name: another(getattr(value, inner.name))})
                pairs.append((f"{field.name}.{inner.name}", whole(), whole(**{field.name: part})))
        if field.name in PARTS:
            pairs += [(field.name, whole(), whole(**{field.name: None}))]
            pairs += [(field.name, whole(**{field.name: None}), whole())]
        if field.name not in PARTS or not dataclasses.is_dataclass(value):
            pairs.append((field.name, whole(), whole(**{field.name: another(value)})))
    for inner in dataclasses.fields(RopeSettings):
        rope, value = ROPES[inner.name]
        one = whole(rope=rope, head_size=64, latent=None)
        pairs.append((f"rope.{inner.name}", one, dataclasses.replace(one, rope=_with(rope, inner.name, value))))
    return pairs


def _with(rope: RopeSettings, name: str, value: Any) -> RopeSettings:
    return dataclasses.replace(rope, **{name: value})


ALTERED = altered()


@pytest.mark.parametrize(("name", "recorded", "served"), ALTERED, ids=[name for name, _, _ in ALTERED])
def test_every_field_of_the_contract_is_compared(name: str, recorded: DrafterContract, served: DrafterContract) -> None:
    """Fields are enumerated: a new one is compared, or somebody has to write down why not."""
    assert differences(recorded, recorded) == [] and recorded != served
    if name in MAY_DIFFER:
        assert differences(recorded, served) == [] and len(MAY_DIFFER[name]) > 20
    else:
        assert [difference.name for difference in differences(recorded, served)] == [name]


def test_no_field_was_forgotten() -> None:
    names = {name.partition(".")[0] for name, _, _ in ALTERED}
    assert names == {field.name for field in dataclasses.fields(DrafterContract)} >= set(MAY_DIFFER)


def test_spellings_of_one_rotation_are_no_difference() -> None:
    """A derived factor may be written out, and what a kind does not read is of no account."""
    yarn = RopeSettings(1e4, "yarn", 4.0, 2048)
    one = whole(rope=yarn, head_size=64, latent=None)
    derived = 0.1 * 1.3862943611198906 + 1
    assert differences(one, dataclasses.replace(one, rope=_with(yarn, "attention_factor", derived))) == []
    plain = whole(rope=RopeSettings(1e4), latent=None)
    assert differences(plain, dataclasses.replace(plain, rope=RopeSettings(1e4, factor=4.0))) == []


def test_sizes_that_a_layout_does_not_state_are_the_targets() -> None:
    """They are filled in from the target at hand, whose vocabulary may be padded; no other size is excused."""
    recorded = tiny_drafter_contract(tiny_target_contract())
    sizes = ("target_vocab_size", "vocab_size", "draft_vocab_size")
    padded = dataclasses.replace(recorded, **dict.fromkeys(sizes, 520))
    assert differences(recorded, padded, 520) == []
    assert [difference.name for difference in differences(recorded, padded, 512)] == list(sizes)
    unstated = dataclasses.replace(recorded, **dict.fromkeys(sizes, 0))
    assert differences(unstated, recorded, 512) == []
    reduced = dataclasses.replace(recorded, draft_vocab_size=256)
    assert [difference.name for difference in differences(reduced, recorded, 512)] == ["draft_vocab_size"]
    other = dataclasses.replace(recorded, **dict.fromkeys(sizes, 9999))
    assert len(differences(recorded, other, 9999)) == 3, "another tokenizer is no padding"
