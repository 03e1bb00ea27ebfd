"""What a fingerprint says of its drafter comes back as it was."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.tiny import tiny_drafter_contract, tiny_target_contract

from paceline.checkpoint.contract import DrafterFamily, RopeSettings
from paceline.models.probe.description import FORMAT, described, read_description, recorded_values


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
        (torch.tensor(list(b'{"format":"2"}'), dtype=torch.uint8), "names no format"),
        (torch.tensor(list(b'{"format":2,"contract":{}}'), dtype=torch.uint8), "names no drafter family"),
    ],
)
def test_what_is_no_description(stored: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_description(stored)
