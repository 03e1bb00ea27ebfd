"""`paceline check`: a table, a cause, a fix, and an exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import write_drafter, write_target_folder
from tests.unit.cli.test_main import run
from tests.unit.models.probing import PROBE, old_format

from paceline.checkpoint.contract import TargetLayerId
from paceline.cli import check as verb
from paceline.evaluation import contract_search
from paceline.evaluation.contract_search import Score, Verdict
from paceline.models.loading import LoadedTarget, load_drafter

TAPS = (TargetLayerId(0), TargetLayerId(1), TargetLayerId(2))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_folder(tmp_path_factory.mktemp("models") / "target", tiny_target())


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return wrap_target(tiny_target(), "plain")


@pytest.fixture
def drafter(tmp_path: Path, loaded: LoadedTarget) -> Path:
    return write_drafter(tmp_path / "drafter", loaded, target_layer_ids=TAPS)


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def arguments(drafter: Path, target: Path, *more: str) -> list[str]:
    return ["check", str(drafter), "--target", str(target), "--dtype", "float32", "--device", "cpu", *more]


def test_a_drafter_that_fits(drafter: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments(drafter, target)) == 0
    lines = capsys.readouterr().out.splitlines()
    verdicts = {line.split("  ")[0]: line for line in lines}
    stages = ["contract", "taps", "normed taps", "context features", "embedded block rows", "hidden rows", "drafts"]
    assert all(" ok " in verdicts[stage] for stage in stages)
    assert lines[-1] == f"{drafter} fits {target}"


def test_a_drafter_that_a_load_would_refuse(drafter: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(drafter, lambda config: config.update(is_neox_style=False))
    edit(drafter, lambda config: config["dflash_config"].update(mask_token_id=17))
    assert run(arguments(drafter, target)) == 3
    captured = capsys.readouterr()
    assert "context keys and values  differs" in captured.out
    assert "cause: the context keys fit with split halves: is_neox_style should be true" in captured.out
    assert "cause: the stored mask row is token 3's" in captured.out
    assert 'fix:   "is_neox_style": true in the drafter\'s config' in captured.out
    assert captured.err.rpartition("CheckFailedError: ")[2].startswith("the context keys fit with split halves")
    assert 'try: "is_neox_style": true' in captured.err


def test_json(drafter: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments(drafter, target, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], found["methods"], found["causes"]) == (True, ["fingerprint"], [])
    edit(drafter, lambda config: config["dflash_config"].update(target_layer_ids=[-1, 1, 2]))
    assert run(arguments(drafter, target, "--json")) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["causes"][0]["stage"] == "taps"
    assert "matches layer 0, the config says -1" in found["causes"][0]["cause"]
    assert found["causes"][0]["fix"].startswith("correct target_layer_ids in the drafter's config: [0, 1, 2]")
    rows = {row["stage"]: row["ok"] for row in found["stages"]}
    assert rows["contract"] is True and rows["taps"] is False and rows["hidden rows"] is True


def test_what_the_config_says_is_asked_first(drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_target_folder(tmp_path / "other", tiny_target(hidden_size=32, head_size=8))
    assert run(arguments(drafter, other)) == 3
    captured = capsys.readouterr()
    assert "contract  differs" in captured.out and "hidden_size is 32" in captured.out
    assert "nothing more was compared" in captured.out


def test_a_tap_that_no_config_may_have_is_bad_input(
    drafter: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(drafter, lambda config: config["dflash_config"].update(target_layer_ids=[0, 1, 3]))
    assert run(arguments(drafter, target, "--json")) == 1
    assert "3 is the last layer" in capsys.readouterr().err


def test_other_weights_of_the_same_shape(drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_target_folder(tmp_path / "other", tiny_target(seed=5))
    assert run(arguments(drafter, other)) == 3
    assert "no layer of this target matches" in capsys.readouterr().err


def test_recording(drafter: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load_file(drafter / "fingerprint.safetensors")
    old = {name: before[name] for name in ("probe_ids", "tap.0", "tap.1", "tap.2", "context")}
    save_file(old, drafter / "fingerprint.safetensors")
    edit(drafter, lambda config: config["dflash_config"].update(mask_token_id=17))
    assert run(arguments(drafter, target, "--json")) == 1, "of format 1 it would have had eight rows"
    (drafter / "fingerprint.safetensors").unlink()
    edit(drafter, lambda config: config["dflash_config"].update(mask_token_id=3))
    save_file(before, drafter / "fingerprint.safetensors")
    assert run(arguments(drafter, target, "--record")) == 0
    assert "recorded: 32 probe tokens" in capsys.readouterr().out
    history = json.loads((drafter / "provenance.json").read_text())["fingerprint"]
    assert history["recorded_after_training"] is True and history["dtype"] == "float32"
    assert run(arguments(drafter, target)) == 0


def test_nothing_is_recorded_where_the_check_says_no(drafter: Path, target: Path) -> None:
    edit(drafter, lambda config: config.update(is_neox_style=False))
    before = (drafter / "fingerprint.safetensors").read_bytes()
    assert run(arguments(drafter, target, "--record")) == 3
    assert (drafter / "fingerprint.safetensors").read_bytes() == before


def test_a_damaged_fingerprint_is_bad_input(drafter: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(drafter / "fingerprint.safetensors")
    save_file(tensors | {"tap.1": tensors["tap.1"] * float("nan")}, drafter / "fingerprint.safetensors")
    assert run(arguments(drafter, target)) == 1
    assert "tap.1 holds NaN or infinity" in capsys.readouterr().err


def test_a_random_drafter_without_a_fingerprint_says_next_to_nothing(
    tmp_path: Path, target: Path, loaded: LoadedTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    """A drafter that nobody trained is not to pass for one that fits."""
    folder = write_drafter(tmp_path / "drafter", loaded, fingerprint=False)
    assert run(arguments(folder, target, "--json")) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["methods"] == ["prompts"] and "no fingerprint" in found["notes"][0]
    assert "predicts next to nothing" in found["causes"][0]["cause"]
    assert found["readings"][0]["reading"] == "as the config says" and found["readings"][0]["num_prompts"] >= 16


def test_fewer_of_the_built_in_prompts_can_be_asked(
    tmp_path: Path, target: Path, loaded: LoadedTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_drafter(tmp_path / "drafter", loaded, fingerprint=False)
    assert run(arguments(folder, target, "--num-prompts", "17", "--json")) == 3
    assert json.loads(capsys.readouterr().out)["readings"][0]["num_prompts"] == 17


def test_a_better_reading_is_named() -> None:
    declared = Score("as the config says", "", (-3.0,) * 16, 0.4)
    better = Score("theta 1000000", '"rope_theta": 1000000', (-2.5,) * 16, 0.6)
    answer = verb._Answer("d", "t")
    verb._judge(Verdict(declared, (better,), better, 1e-4), answer)
    (cause,) = answer.causes
    assert "theta 1000000" in cause["cause"] and "+0.50 nats" in cause["cause"] and cause["fix"] == better.fix


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda a: [*a[:1], "no-such-drafter", *a[2:]], "no-such-drafter"),
        (lambda a: [*a[:3], "no-such-target", *a[4:]], "no-such-target"),
        (lambda a: [*a, "--prompts", "no-such-file.jsonl"], "no-such-file.jsonl"),
    ],
)
def test_bad_input(
    drafter: Path,
    target: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[list[str]], list[str]],
    part: str,
) -> None:
    assert run(change(arguments(drafter, target))) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and part in captured.err


def test_too_few_prompts(drafter: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text('{"id": "a", "prompt": "w5 w6"}\n{"id": "b", "prompt": "w7"}\n')
    assert run(arguments(drafter, target, "--prompts", str(file))) == 1
    assert "too few to judge by, 16 are needed" in capsys.readouterr().err


def padded(folder: Path, *, seed: int = 0) -> Path:
    """The target with eight rows of padding behind its vocabulary."""
    plain, wide = tiny_target(seed=seed), tiny_target(vocab_size=520)
    states = plain.state_dict()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        states[name] = torch.cat((states[name], torch.zeros(8, 64)))
    wide.load_state_dict(states)
    return write_target_folder(folder, wide)


def test_padding_of_the_vocabulary_is_no_reason_not_to_compare(
    drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments(drafter, padded(tmp_path / "same"), "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["methods"] == ["fingerprint"] and {row["ok"] for row in found["stages"]} == {True}
    assert run(arguments(drafter, padded(tmp_path / "other", seed=5), "--json")) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and "no layer of this target matches" in found["causes"][0]["cause"]


def test_a_layout_that_states_no_vocabulary_is_compared(
    tmp_path: Path, target: Path, loaded: LoadedTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_drafter(tmp_path / "plain", loaded, has_tap_norm=False)
    folder = tmp_path / "assistant"
    assert run(["convert", str(plain), str(folder), "--to", "assistant", "-q"]) == 0
    edit(folder, lambda config: (config.pop("vocab_size"), config.pop("paceline", None)))
    capsys.readouterr()
    assert run(arguments(folder, target, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["methods"] == ["fingerprint"]
    edit(folder, lambda config: (config.update(rope_theta=5e5), config["rope_parameters"].update(rope_theta=5e5)))
    assert run(arguments(folder, target, "--json")) == 3
    assert "theta 10000" in json.loads(capsys.readouterr().out)["causes"][0]["cause"]


def test_a_drafter_that_cannot_be_run_is_never_one_that_fits(
    drafter: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(drafter, lambda config: config["dflash_config"].update(sample_from_anchor=True))
    assert run(arguments(drafter, target, "--json")) == 3
    found = json.loads(capsys.readouterr().out)
    assert "'anchor_sampling'" in found["causes"][0]["cause"] and "nothing more was compared" in found["notes"][0]
    edit(drafter, lambda config: config["dflash_config"].update(sample_from_anchor=False))
    tensors = load_file(drafter / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, drafter / "model.safetensors")
    (drafter / "model.safetensors.index.json").unlink()
    assert run(arguments(drafter, target)) == 1
    assert "fc.weight" in capsys.readouterr().err


def test_a_field_that_no_number_shows(drafter: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(drafter, lambda config: config.update(rms_norm_eps=1e-6))
    assert run(arguments(drafter, target, "--record")) == 3
    captured = capsys.readouterr()
    assert "recorded config          differs" in captured.out
    said = f"recorded with rms_norm_eps 1e-05, the config says 1e-06 ({drafter / 'config.json'})"
    assert said in captured.out and "nothing was recorded: the check says no" in captured.out


def make_old(drafter: Path, loaded: LoadedTarget) -> bytes:
    """Put a fingerprint of format 1 beside the weights."""
    model = load_drafter(str(drafter), loaded).model
    old = {name: tensor.contiguous() for name, tensor in old_format(loaded.model, model, PROBE).items()}
    save_file(old, drafter / "fingerprint.safetensors")
    return (drafter / "fingerprint.safetensors").read_bytes()


def test_a_fingerprint_of_format_1_does_not_decide(
    drafter: Path, target: Path, loaded: LoadedTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    """It sees neither RoPE nor mask row: prompts are asked, and nothing is certified that they do not bear out."""
    before = make_old(drafter, loaded)
    edit(drafter, lambda config: config.update(is_neox_style=False))
    edit(drafter, lambda config: config["dflash_config"].update(mask_token_id=17))
    assert run(arguments(drafter, target, "--record", "--json")) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["methods"] == ["fingerprint", "prompts"]
    assert "format 1" in found["notes"][0] and "nothing was recorded" in found["notes"][-1]
    assert (drafter / "fingerprint.safetensors").read_bytes() == before


def test_one_of_format_1_is_recorded_anew_if_prompts_say_yes(
    drafter: Path,
    target: Path,
    loaded: LoadedTarget,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_old(drafter, loaded)
    verdict = Verdict(Score("as the config says", "", (-1.0,) * 16, 0.7), (), None, None)
    monkeypatch.setattr(contract_search, "search_contract", lambda *_, **__: verdict)
    assert run(arguments(drafter, target, "--record")) == 0
    assert "recorded: 32 probe tokens" in capsys.readouterr().out
    assert run(arguments(drafter, target, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["methods"] == ["fingerprint"]
