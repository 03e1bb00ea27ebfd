from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from paceline.configuration.capture import CapturePromptsRun
from paceline.configuration.chat import ChatRun
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


@pytest.mark.parametrize("model", [*_models(TrainRun), GenerateRun, EvaluateRun, ChatRun])
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


def _run(**values: Any) -> Any:
    tables = {
        "target": {"name": "m"},
        "drafter": {"mask_token_id": 0},
        "data": {"files": ["a.npz"]},
        "schedule": {"num_steps": 1, "batch_size": 1, "num_anchors": 1},
    }
    return tables | {"output": "out"} | values


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of every path, in a file or behind KEY=, where no shell looks; a folder named ~ is nobody's wish."""
    monkeypatch.setenv("HOME", str(tmp_path))
    data = {"files": ["~/a.npz", "~/b.npz"], "features": "~/f"}
    drafter = {"mask_token_id": 0, "start_from": "~/d"}
    run = TrainRun.model_validate(_run(output="~/out", data=data, drafter=drafter))
    paths = [run.output, *run.data.files, run.data.features, run.drafter.start_from]
    assert paths == [tmp_path / name for name in ("out", "a.npz", "b.npz", "f", "d")]
    asked = EvaluateRun.model_validate({"model": "m", "draft_model": "d", "prompts": ["~/p.jsonl"]})
    assert asked.prompts == (tmp_path / "p.jsonl",)
    capture = CapturePromptsRun.model_validate({"model": "m", "output": "~/o", "prompts": "~/p", "exclude": ["~/e"]})
    assert (capture.output, capture.prompts, capture.exclude) == (tmp_path / "o", tmp_path / "p", (tmp_path / "e",))
    with pytest.raises(ValidationError, match="names a home folder that does not exist"):
        TrainRun.model_validate(_run(output="~nobody-of-this-name/out"))


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_path_is_not_the_working_folder(empty: str) -> None:
    with pytest.raises(ValidationError, match="is empty"):
        TrainRun.model_validate(_run(output=empty))
    assert TrainRun.model_validate(_run(output=".")).output == Path()


def test_one_file_by_two_names_is_listed_twice(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.npz").symlink_to(tmp_path / "a.npz")
    for other in ("a.npz", "sub/../a.npz", "link.npz"):
        with pytest.raises(ValidationError, match="listed twice"):
            TrainRun.model_validate(_run(data={"files": [str(tmp_path / "a.npz"), f"{tmp_path}/{other}"]}))
