from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.configuration.generation import GenerateRun
from paceline.configuration.load import load_settings, parse_override, read_settings_file, to_toml
from paceline.configuration.run import TrainRun
from paceline.errors import ConfigError

SMALLEST = """
output = "out"
[target]
name = "t"
[drafter]
mask_token_id = 0
[data]
files = ["a.npz"]
[schedule]
num_steps = 10
batch_size = 2
num_anchors = 4
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(SMALLEST)
    return path


def test_a_file_with_overrides(run_file: Path) -> None:
    run = load_settings(
        TrainRun, run_file, ["schedule.num_steps=20", "target.name=other", "objective.loss={kl=0.5,ce=1}"]
    )
    assert run.schedule.num_steps == 20
    assert run.target.name == "other"
    assert run.objective.loss_weights == {"kl": 0.5, "ce": 1.0}
    assert run.data.files == (Path("a.npz"),)


def test_later_sources_win(tmp_path: Path) -> None:
    path = tmp_path / "generate.toml"
    path.write_text('model = "file"\nmax_tokens = 1\nseed = 1\n')
    run = load_settings(GenerateRun, path, ["max_tokens=2", "seed=2"], {"seed": 3, "model": None})
    assert (run.model, run.max_tokens, run.seed) == ("file", 2, 3)


def test_yaml_says_the_same_as_toml(tmp_path: Path, run_file: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "output: out\ntarget: {name: t}\ndrafter: {mask_token_id: 0}\ndata: {files: [a.npz]}\n"
        "schedule: {num_steps: 10, batch_size: 2, num_anchors: 4}\n"
    )
    assert load_settings(TrainRun, path) == load_settings(TrainRun, run_file)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("schedule.num_step=5", ["schedule.num_step: no setting has this name", "try: schedule.num_steps"]),
        ("schedul.num_steps=5", ["schedul: no setting has this name", "try: schedule"]),
        ("schedule.num_steps=0", ["schedule.num_steps", "greater than or equal to 1", "found 0"]),
        ("schedule.num_steps='5'", ["schedule.num_steps", "valid integer", "found '5'"]),
        ("schedule.num_steps=2.5", ["schedule.num_steps", "valid integer"]),
        ("schedule.num_steps=true", ["schedule.num_steps", "valid integer"]),
        ("optimizer.learning_rate='1e-3'", ["valid number", "without quotes"]),
        ("optimizer.learning_rate=nan", ["optimizer.learning_rate", "finite"]),
        ("drafter.tap_norm=1", ["drafter.tap_norm", "valid boolean"]),
        ("drafter.target_layer_ids=[3,1]", ["[3, 1] must rise"]),
        ("drafter.target_layer_ids=[1,1]", ["[1, 1] must rise"]),
        ("drafter.target_layer_ids=[-1,1]", ["layer -1 is below 0"]),
        ("drafter.target_layer_ids=[]", ["an empty list taps nothing"]),
        ("device=gpu", ["'gpu' is no device"]),
        ("device=cuda:x", ["'cuda:x' is no device"]),
        ("target.dtype=float8", ["target.dtype", "'float8'"]),
        ("objective.loss=mse", ["objective.loss", "'mse'"]),
        ("objective.loss={mse=1}", ["objective.loss"]),
        ("objective.loss={kl=0}", ["objective.loss"]),
        ("optimizer.warmup_share=0.9", ["warmup_share 0.9 and decay_share 0.2"]),
        ("evaluate.num_conversations=2000", ["evaluate.num_conversations 2000 exceeds the 1024"]),
        ("data.max_length=8", ["data.max_length 8", "block_size 8"]),
        ("data.files=[]", ["data.files"]),
        ('data.files=["a.npz","a.npz"]', ["listed twice: a.npz"]),
        ("optimizer.betas=[0.9,1.0]", ["must both be below 1"]),
        ("schedule=5", ["schedule", "command line (schedule=5)"]),
    ],
)
def test_a_bad_override_says_what_and_where(run_file: Path, override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(TrainRun, run_file, [override])
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_origin_is_the_command_line_or_the_file(run_file: Path) -> None:
    with pytest.raises(ConfigError) as from_line:
        load_settings(TrainRun, run_file, ["schedule.num_steps=no"])
    assert "command line (schedule.num_steps=no)" in str(from_line.value)
    assert "run.toml" not in str(from_line.value)
    run_file.write_text(SMALLEST.replace("num_steps = 10", "num_steps = -1"))
    with pytest.raises(ConfigError) as from_file:
        load_settings(TrainRun, run_file)
    assert from_file.value.origin == {"file": str(run_file)}


def test_several_complaints_come_together(run_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(TrainRun, run_file, ["schedule.num_steps=0", "drafter.colour=red"])
    assert "schedule.num_steps" in str(caught.value)
    assert "drafter.colour" in str(caught.value)


def test_missing_keys_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 1\n")
    with pytest.raises(ConfigError, match="target: must be set") as caught:
        load_settings(TrainRun, path)
    assert "output: must be set" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("run.toml", "a = ", "not valid TOML"),
        ("run.yaml", "a: [1", "not valid YAML"),
        ("run.yaml", "a: 1\na: 2\n", "'a' stands twice"),
        ("run.yaml", "- 1\n", "found list"),
        ("run.yaml", "a: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("run.json", "{}", "not .json"),
        ("run.toml", b"\xff\xfe", "cannot be read"),
        ("run.yaml", "a: 2024-13-45\n", "not valid YAML: month"),
        ("run.yaml", f"a: {'1' * 5000}\n", "not valid YAML: Exceeds"),
        ("run.toml", f"a = {'1' * 5000}\n", "not valid TOML: Exceeds"),
        ("run.toml", f"a = {'[' * 5000}\n", "not valid TOML: maximum recursion"),
        ("run.yaml", f"a: {'[' * 5000}\n", "not valid YAML: maximum recursion"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_unreadable_files(tmp_path: Path, name: str, content: str | bytes, part: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=part) as caught:
        read_settings_file(path)
    assert str(path) in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_settings(TrainRun, tmp_path / "none.toml")


def test_an_empty_yaml_file_is_an_empty_table(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("")
    assert read_settings_file(path) == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=1", ("a.b", 1)),
        ("a = true ", ("a", True)),
        ("a=1e-3", ("a", 1e-3)),
        ("a=bare text", ("a", "bare text")),
        ("a=x=y", ("a", "x=y")),
        ("a=", ("a", "")),
        ("a='quoted'", ("a", "quoted")),
        ("a=[1, 2]", ("a", [1, 2])),
        ("a=1\nvalue2 = 3", ("a", "1\nvalue2 = 3")),
        ("a=/some/path.npz", ("a", "/some/path.npz")),
    ],
)
def test_parse_override(text: str, expected: tuple[str, Any]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("name", ["run.toml", "run.yaml"])
def test_a_byte_order_mark_is_no_part_of_the_settings(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + (b"a = 1\n" if name.endswith("toml") else b"a: 1\n"))
    assert read_settings_file(path) == {"a": 1}


def test_a_number_of_thousands_of_digits_is_bare_text() -> None:
    digits = "1" * 5000
    assert parse_override(f"a={digits}") == ("a", digits)


@pytest.mark.parametrize("text", ["", "a", "=1", ".a=1", "a..b=1", "a=[1", "a='x", "a={b", "a=" + "[" * 5000])
def test_malformed_overrides(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_override(text)


def test_an_override_cannot_enter_a_plain_value(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="seed is already 3"):
        load_settings(TrainRun, run_file, ["seed=3", "seed.inner=1"])


def test_none_unsets_and_survives_the_round_trip(run_file: Path, tmp_path: Path) -> None:
    run = load_settings(TrainRun, run_file, ["objective.gamma=none"])
    assert run.objective.gamma is None
    again = tmp_path / "again.toml"
    again.write_text(to_toml(run))
    assert load_settings(TrainRun, again) == run


@given(
    output=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
    rate=st.floats(1e-9, 1.0),
    seed=st.integers(0, 2**63 - 1),
    taps=st.none() | st.sets(st.integers(0, 200), min_size=1, max_size=8).map(sorted),
    loss=st.sampled_from(["kl", "ce", {"kl": 0.25, "ce": 1.0}]),
)
def test_settings_survive_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, output: str, rate: float, seed: int, taps: list[int] | None, loss: object
) -> None:
    drafter = {"mask_token_id": 0} | ({"target_layer_ids": taps} if taps else {})
    run = TrainRun.model_validate(
        {
            "output": output,
            "seed": seed,
            "target": {"name": "t"},
            "drafter": drafter,
            "data": {"files": ["a"]},
            "optimizer": {"learning_rate": rate},
            "schedule": {"num_steps": 1, "batch_size": 1, "num_anchors": 1},
            "objective": {"loss": loss},
        }
    )
    path = tmp_path_factory.mktemp("round") / "run.toml"
    path.write_text(to_toml(run), encoding="utf-8", newline="")
    assert load_settings(TrainRun, path) == run
