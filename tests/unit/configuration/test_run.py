from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from paceline.configuration.generation import EvaluateRun, GenerateRun
from paceline.configuration.run import TrainRun

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("train_*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    TrainRun.model_validate(tomllib.loads(path.read_text()))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


def _models(model: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [field.annotation for field in model.model_fields.values()]
    return [model] + [
        deep for one in inner if isinstance(one, type) and issubclass(one, BaseModel) for deep in _models(one)
    ]


@pytest.mark.parametrize("model", [*_models(TrainRun), GenerateRun, EvaluateRun])
def test_every_group_is_closed_frozen_and_described(model: type[BaseModel]) -> None:
    assert model.model_config.get("frozen") is True
    assert model.model_config.get("extra") == "forbid"
    assert model.__doc__
    for name, field in model.model_fields.items():
        is_group = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        assert field.description or is_group, f"{model.__name__}.{name} has no description"


def _drafter(**values: Any) -> Any:
    return TrainRun.model_validate(
        {
            "output": "o",
            "target": {"name": "t"},
            "drafter": {"mask_token_id": 0, **values},
            "data": {"files": ["a"]},
            "schedule": {"num_steps": 1, "batch_size": 1, "num_anchors": 1},
        }
    ).drafter


def test_listed_taps_say_how_many_there_are() -> None:
    assert _drafter(target_layer_ids=[1, 8]).num_taps == 2
    assert _drafter().num_taps == 5
    with pytest.raises(ValidationError, match="num_taps is 5, target_layer_ids has 2"):
        _drafter(target_layer_ids=[1, 8], num_taps=5)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        _drafter().num_layers = 3
