"""Which attention a run's blocks take: the rule at every measured size, what is refused, and that it is said."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.tiny_run import tiny_settings
from tests.unit.models.conftest import drafter_contract
from tests.unit.training.runs import Act, Crash, crash_at, files_below

from paceline.checkpoint.contract import DrafterContract, LatentAttentionSettings
from paceline.configuration.run import TrainRun
from paceline.errors import ConfigError
from paceline.models.loading import LoadedTarget
from paceline.training import attention_choice as choice_module
from paceline.training import preparing
from paceline.training.attention_choice import choose_attention
from paceline.training.flex_attend import FlexBlocks
from paceline.training.loop import train

GPU, CPU = torch.device("cuda"), torch.device("cpu")
RESULTS = Path(__file__).parents[3] / "docs" / "results" / "block-attention.json"
SMOL, LARGE = {"num_heads": 9, "num_kv_heads": 3, "head_size": 64}, {"num_heads": 32, "head_size": 128}
MEASURED = [  # rows, tokens, blocks, rows of a block, heads; whether flex attention is taken
    (64, 384, 32, 8, SMOL, False),
    (64, 512, 64, 8, SMOL, False),
    (16, 2048, 128, 8, SMOL, False),
    (8, 2048, 256, 16, LARGE, True),
    (2, 8192, 512, 16, LARGE, True),
]


def settings(
    batch: int, tokens: int, blocks: int, block_size: int, attention: str = "auto", **changes: Any
) -> TrainRun:
    return tiny_settings(
        Path("run"),
        Path("data"),
        data_max_length=tokens,
        drafter_block_size=block_size,
        schedule_batch_size=batch,
        schedule_num_anchors=blocks,
        schedule_attention=attention,
        **changes,
    )


@pytest.fixture
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_module, "HAS_TRITON", True)


@pytest.mark.usefixtures("_triton")
@pytest.mark.parametrize(("batch", "tokens", "blocks", "block_size", "heads", "takes_flex"), MEASURED)
def test_auto_takes_what_was_measured_to_be_faster(
    batch: int, tokens: int, blocks: int, block_size: int, heads: dict[str, int], takes_flex: bool
) -> None:
    """About even counts as dense: that needs no compiler."""
    run, contract = settings(batch, tokens, blocks, block_size), drafter_contract(**heads)
    assert choose_attention(run, contract, GPU) == (FlexBlocks(tokens, blocks) if takes_flex else None)
    assert choose_attention(run, contract, CPU) is None


def test_the_sizes_above_are_those_of_the_result_file() -> None:
    """And dense masks are never taken where flex attention was clearly faster, nor the other way round."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == len(MEASURED) - 1  # the largest was not measured with the benchmark as it is now
    for row, (batch, tokens, blocks, block_size, heads, takes_flex) in zip(rows, MEASURED[: len(rows)], strict=True):
        assert (row["rows"], row["blocks"]) == (f"{batch} x {tokens}", f"{blocks} x {block_size}")
        assert row["heads"].startswith(f"{heads['num_heads']}/")
        assert row["flex_over_dense"] < 0.5 if takes_flex else row["flex_over_dense"] > 0.8


@pytest.mark.usefixtures("_triton")
def test_ranks_that_share_a_batch_have_fewer_scores_each() -> None:
    run, contract = settings(8, 2048, 256, 16), drafter_contract(**LARGE)
    assert choose_attention(run, contract, GPU, num_ranks=4) is not None
    assert choose_attention(run, contract, GPU, num_ranks=8) is None


@pytest.mark.usefixtures("_triton")
def test_rows_have_no_more_blocks_than_tokens() -> None:
    found = choose_attention(settings(1, 128, 4096, 8, "flex"), drafter_contract(**SMOL), GPU)
    assert found == FlexBlocks(context_size=128, num_blocks=128)


@pytest.mark.usefixtures("_triton")
def test_what_was_asked_for_is_done_at_any_size() -> None:
    small, large = (64, 384, 32, 8), (8, 2048, 256, 16)
    assert choose_attention(settings(*small, "flex"), drafter_contract(**SMOL), GPU) == FlexBlocks(384, 32)
    assert choose_attention(settings(*large, "dense"), drafter_contract(**LARGE), GPU) is None


OBSTACLES: dict[str, tuple[DrafterContract, torch.device, bool, str]] = {
    "cpu": (drafter_contract(**LARGE), CPU, True, "has gradients on a GPU alone, the device is cpu"),
    "no-triton": (drafter_contract(**LARGE), GPU, False, "Triton, which flex attention is compiled by, is not"),
    "sinks": (drafter_contract(**LARGE, has_attention_sink=True), GPU, True, "attention sinks, which flex attention"),
    "latent": (
        drafter_contract(**LARGE, latent=LatentAttentionSettings(8, 8, 16, 16, 16)),
        GPU,
        True,
        "latent attention, which is trained by dense masks",
    ),
    "windows": (
        drafter_contract(**LARGE, layer_windows=(16, None)),
        GPU,
        True,
        "gradients flex attention was seen to get",
    ),
    "head-size": (drafter_contract(num_heads=512), GPU, True, "heads of 16 channels or more, not of 8"),
    "eagle3": (drafter_contract(**LARGE, family="eagle3"), GPU, True, "from one row per block, by dense masks"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_flex_is_refused_where_it_cannot_be_had_and_auto_takes_dense_masks(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    contract, device, has_triton, text = OBSTACLES[name]
    monkeypatch.setattr(choice_module, "HAS_TRITON", has_triton)
    with pytest.raises(ConfigError, match=f"schedule.attention is 'flex'; .*{text}") as refused:
        choose_attention(settings(8, 2048, 256, 16, "flex"), contract, device)
    assert refused.value.hint == "schedule.attention=auto, or dense"
    with caplog.at_level(logging.INFO):
        assert choose_attention(settings(8, 2048, 256, 16), contract, device) is None
    assert text in caplog.text


@pytest.mark.usefixtures("_triton")
@pytest.mark.parametrize(
    ("attention", "batch", "said"),
    [
        ("auto", 8, "flex attention: 8 x 4096 rows, 6144 keys and 32 heads make 6.44e+09 scores, at least 1e+09"),
        ("auto", 1, "dense masks: 1 x 4096 rows, 6144 keys and 32 heads make 8.05e+08 scores, below 1e+09"),
        ("flex", 1, "flex attention: asked for"),
        ("dense", 8, "dense masks: asked for"),
    ],
)
def test_it_is_said_which_was_taken_and_why(
    attention: str, batch: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        choose_attention(settings(batch, 2048, 256, 16, attention), drafter_contract(**LARGE), GPU)
    assert [record.message for record in caplog.records] == [f"training blocks attend by {said}"]


def test_other_names_and_flex_for_eagle3_are_refused_when_settings_are_read() -> None:
    with pytest.raises(ValidationError, match="'auto', 'dense' or 'flex'"):
        settings(2, 24, 4, 4, "sparse")
    eagle3 = {"drafter_family": "eagle3", "drafter_mask_token_id": None}
    with pytest.raises(ValidationError, match=r"schedule.attention is 'flex'; family 'eagle3' attends from one row"):
        settings(2, 24, 4, 4, "flex", **eagle3)
    assert settings(2, 24, 4, 4, "dense", **eagle3).schedule.attention == "dense"
    assert tiny_settings(Path("run"), Path("data")).schedule.attention == "auto"


# --- whole runs ---


def test_a_run_says_it_once_and_a_refused_one_leaves_no_folder(
    target: LoadedTarget, tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"schedule.attention is 'flex'"):
        train(tiny_settings(tmp_path / "run", data, schedule_attention="flex"), target)
    assert files_below(tmp_path) == ["data.npz"]
    with caplog.at_level(logging.INFO):
        train(tiny_settings(tmp_path / "run", data, schedule_num_steps=2), target)
    assert sum("training blocks attend by" in record.message for record in caplog.records) == 1


def test_the_choice_reaches_every_step(
    target: LoadedTarget, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flex attention has no gradients here: the first step says so, which nothing else could."""
    flex = FlexBlocks(24, 4, is_compiled=False)
    monkeypatch.setattr(preparing, "choose_attention", lambda *sizes: flex)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        train(tiny_settings(tmp_path / "run", data), target)


def test_another_attention_is_another_run(
    target: LoadedTarget, tmp_path: Path, data: Path, at_step: Callable[[Act], None]
) -> None:
    """It rounds otherwise, so weights of both would be those of neither."""
    at_step(crash_at(13))
    with pytest.raises(Crash):
        train(tiny_settings(tmp_path / "run", data), target)
    before = files_below(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"not the run that was saved: schedule.attention was 'auto', is 'dense'\n"):
        train(tiny_settings(tmp_path / "run", data, schedule_attention="dense"), target, resume=True)
    assert files_below(tmp_path / "run") == before
