"""The tap capability: declared by every target class, believed with its machinery alone, refused in known words."""

from __future__ import annotations

import pytest
import torch
from tests.unit.models.conftest import tiny_target
from torch import nn

from paceline.errors import CompatibilityError
from paceline.models.capabilities import SupportsEagle3, require_taps, supports_eagle3
from paceline.models.targets.table import TARGETS


class WithoutTaps(nn.Module):
    """A target that never heard of taps."""


class OnlyDeclares(nn.Module):
    """The flag without what it promises."""

    supports_eagle3 = True


@pytest.mark.parametrize("architecture", sorted(TARGETS))
def test_every_target_class_and_instance_supports_taps(architecture: str) -> None:
    target = tiny_target(architecture=architecture)
    assert type(target) is TARGETS[architecture]
    assert supports_eagle3(TARGETS[architecture])
    assert supports_eagle3(target)
    assert isinstance(target, SupportsEagle3)
    require_taps(target, "prefix")
    assert list(target.capture_ids) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("model", [WithoutTaps, WithoutTaps(), OnlyDeclares, OnlyDeclares(), torch.nn.Linear(1, 1)])
def test_a_class_without_taps_is_refused(model: object) -> None:
    assert not supports_eagle3(model)
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    with pytest.raises(CompatibilityError, match=f"Model does not support EAGLE3 interface: {name}"):
        require_taps(model, "prefix")


def test_a_class_that_says_no_is_refused_although_it_has_the_methods() -> None:
    class Declines(TARGETS["LlamaForCausalLM"]):
        supports_eagle3 = False

    assert not supports_eagle3(Declines)
    with pytest.raises(CompatibilityError, match="Model does not support EAGLE3 interface"):
        require_taps(Declines, "prefix")


def test_another_stream_than_the_targets_is_refused() -> None:
    with pytest.raises(CompatibilityError, match=r"'attn_res' stream; DenseTarget offers \['prefix'\]"):
        require_taps(tiny_target(), "attn_res")


@pytest.mark.parametrize(("depth", "expected"), [(8, (2, 4, 5)), (30, (2, 15, 27))])
def test_default_capture_ids(depth: int, expected: tuple[int, ...]) -> None:
    assert tiny_target(num_layers=depth).default_capture_ids() == expected
