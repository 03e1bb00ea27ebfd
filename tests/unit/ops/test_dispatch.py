"""Choosing between a reference and a kernel: by device, reported once; and every kernel compiles without a GPU."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from paceline.configuration.environment import LAUNCHES
from paceline.ops import dispatch


class OnCuda:
    """A tensor that says it lives on a GPU."""

    device = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def _nothing_chosen_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_chosen", {})


def reference(x: Tensor) -> Tensor:
    return x


def launcher(x: Tensor) -> Tensor:
    return x + 1


def test_cpu_tensors_take_the_reference_and_gpu_tensors_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    assert dispatch.choose("an op", torch.zeros(1), reference, launcher) is reference
    assert dispatch.choose("an op", OnCuda(), reference, launcher) is launcher
    assert dispatch.implementations() == {"an op on cpu": "reference", "an op on cuda": "triton"}


def test_a_gpu_without_triton_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    with caplog.at_level(logging.DEBUG, logger="paceline"):
        for _ in range(3):
            assert dispatch.choose("an op", OnCuda(), reference, launcher) is reference
            assert dispatch.choose("an op", torch.zeros(1), reference, launcher) is reference
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.DEBUG]
    assert dispatch.implementations()["an op on cuda"] == "reference"


def test_gradients_are_wanted_only_while_recorded() -> None:
    plain, trained = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert dispatch.needs_gradient(plain, trained)
    assert not dispatch.needs_gradient(plain)
    with torch.no_grad():
        assert not dispatch.needs_gradient(trained)


@pytest.mark.parametrize(
    ("is_allowed", "is_interpreting", "capability", "expected"),
    [
        (True, False, (9, 0), True),
        (False, False, (9, 0), False),
        (True, True, (9, 0), False),
        (True, False, (8, 9), False),
    ],
)
def test_kernels_run_into_each_other_only_where_allowed_and_possible(
    monkeypatch: pytest.MonkeyPatch,
    is_allowed: bool,
    is_interpreting: bool,
    capability: tuple[int, int],
    expected: bool,
) -> None:
    monkeypatch.setattr(dispatch, "_dependent_launch_rule", None)  # and put back behind this test
    assert not dispatch.dependent_launch(1), "not unless somebody asks"
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    knobs = SimpleNamespace(knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=is_interpreting)))
    monkeypatch.setattr(dispatch, "triton", knobs)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    dispatch._can_launch_early.cache_clear()
    dispatch.allow_dependent_launch("on" if is_allowed else "off")
    assert dispatch.dependent_launch(1) is dispatch.dependent_launch(16) is expected
    assert not dispatch.dependent_launch(17), "launches of many rows took longer"
    dispatch._can_launch_early.cache_clear()


def test_a_rule_says_when_the_next_launch_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_dependent_launch_rule", None)
    expected = {"at-once": (1, 1), "after-wait": (2, 2), "mixed": (1, 2), "late": (3, 3)}
    assert set(expected) == set(dispatch.DEPENDENT_LAUNCH_RULES) == {*LAUNCHES} - {"on", "off"}
    for rule, (small, large) in expected.items():
        dispatch.allow_dependent_launch(rule)
        assert (dispatch.next_begins(is_small=True), dispatch.next_begins(is_small=False)) == (small, large)
    with pytest.raises(AssertionError):
        dispatch.allow_dependent_launch("early")


WITHOUT_TRITON = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
import torch
from paceline.models.drafters.table import BLOCK_DRAFTERS
from paceline.ops import dispatch
from paceline.ops.grouped_convolution import grouped_convolution
y = grouped_convolution(torch.ones(2, 2), torch.ones(1, 2), torch.zeros(2, 1, 1), torch.arange(2))
assert y.tolist() == [[1, 1], [1, 1]]
assert not dispatch.HAS_TRITON and "triton" not in sys.modules
print("fine")
"""


def run_python(code: str, folder: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = Path(dispatch.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=variables | {"PYTHONPATH": str(source), "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_works_without_triton(tmp_path: Path) -> None:
    assert run_python(WITHOUT_TRITON, tmp_path) == "fine\n"


COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paceline.ops import block_rows, candidate_walk, commit_step, context_kv, draw_candidates, finalise_block
from paceline.ops import finalise_rows, grouped_convolution, noise, paged_attention_kernel, sample_tokens, step_rows
from paceline.ops import draft_chances, largest_ids, linear_gated, stop_row, store_drafts, target_distribution
from paceline.ops import add_norm, observe_drafts, top_k_tokens, vocab_statistics
from paceline.ops.skinny_launch import make_cut
from paceline.ops.skinny_tile import Tile

def compile_for_hopper(function, pointers, sizes, constants):
    signature = {name: "*" + kind for name, kind in pointers.items()} | sizes | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
    assert compiled["cubin"]
    return compiled["ptx"]

def waits_before_others_begin(code):
    return 0 < code.find("griddepcontrol.wait") < code.find("griddepcontrol.launch_dependents")

def named(names, kind):
    return dict.fromkeys(names.split(), kind)

for dtype in ("fp32", "bf16"):
    compile_for_hopper(
        grouped_convolution._grouped_convolution_kernel,
        named("x_ptr base_ptr delta_ptr y_ptr", dtype) | {"offset_ptr": "i64"},
        named("width num_groups group_size delta_stride", "i32"),
        {"TAPS": 2, "BLOCK": 1024},
    )
    for has_noise in (True, False):
        compile_for_hopper(
            candidate_walk._candidate_walk_kernel,
            named("unary_ptr projected_ptr predecessor_ptr successor_ptr", dtype)
            | named("temperature_ptr gumbel_ptr scores_ptr", "fp32")
            | named("candidate_ptr anchor_ptr ids_ptr", "i64"),
            named("num_candidates", "i32"),
            {"NUM_DRAFTS": 7, "RANK": 256, "HAS_NOISE": has_noise, "CANDIDATES": 16, "CHUNK": 128},
        )
    for is_neox in (True, False):
        compile_for_hopper(
            context_kv._write_context_kv_kernel,
            named("kv_ptr planes_ptr", dtype)
            | named("gain_ptr table_ptr", "fp32")
            | named("position_ptr row_ptr", "i64"),
            named("num_positions num_heads layer_stride side_stride head_stride", "i32")
            | named("eps value_scale", "fp32"),
            {"HEAD_SIZE": 80, "HALF": 40, "IS_NEOX": is_neox, "HEADS": 4, "CHANNELS": 128},
        )
compile_for_hopper(
    sample_tokens._sample_tokens_kernel,
    named("scores_ptr", "bf16") | named("temperature_ptr best_ptr", "fp32")
    | named("seed_ptr position_ptr best_id_ptr", "i64"),
    named("vocab_size", "i32"),
    {"DOMAIN": 0x4452_4654, "GREEDY_BELOW": 1e-5, "TILE": 2048},
)
STATISTICS = named("best_ptr mass_ptr noisy_ptr", "fp32") | named("best_id_ptr noisy_id_ptr", "i64")
SETTINGS = named("temperature_ptr", "fp32") | named("seed_ptr anchor_position_ptr", "i64")
TEMPERED = {"IS_TEMPERED": False, "GREEDY_BELOW": 1e-5, "LOWEST": 0.01}
for num_candidates in (0, 16):
    compile_for_hopper(
        vocab_statistics._vocab_statistics_kernel,
        named("logits_ptr", "bf16" if num_candidates else "fp32")
        | named("outside_mass_ptr log_q_ptr", "fp32") | named("candidate_ptr", "i64") | STATISTICS | SETTINGS,
        named("num_rows vocab_size", "i32"),
        {"NUM_CANDIDATES": num_candidates, "HAS_LOG_Q": num_candidates > 0, "TILE": 2048} | TEMPERED,
    )
    compile_for_hopper(
        stop_row._stop_noise_kernel,
        named("logits_ptr", "bf16" if num_candidates else "fp32")
        | named("noisy_ptr log_q_ptr", "fp32") | named("accepted_ptr candidate_ptr noisy_id_ptr", "i64") | SETTINGS,
        named("num_rows vocab_size", "i32"),
        {"NUM_CANDIDATES": num_candidates, "HAS_LOG_Q": num_candidates > 0, "TILE": 2048} | TEMPERED,
    )
    compile_for_hopper(
        stop_row._row_masses_kernel,
        named("logits_ptr", "bf16" if num_candidates else "fp32")
        | named("temperature_ptr best_ptr mass_ptr", "fp32") | named("best_id_ptr", "i64"),
        named("num_rows vocab_size", "i32"),
        {"TILE": 4096} | TEMPERED,
    )
for tells_nan in (False, True):
    compile_for_hopper(
        largest_ids._largest_of_runs_kernel,
        named("scores_ptr", "bf16") | named("best_ptr", "fp32") | named("id_ptr", "i64"),
        named("vocab_size num_turns", "i32"),
        {"TELLS_NAN": tells_nan, "TURN": 2048, "GROUP": 8, "STAGES": 4},
    )
VERDICT = (
    named("logits_ptr log_q_ptr", "fp32")
    | named("candidate_ptr draft_ptr step_ptr verdict_ptr", "i64") | STATISTICS | SETTINGS
)
VERDICT_SIZES = named("num_requests num_tiles num_candidates vocab_size", "i32")
BLOCK_OF_8 = {"NUM_ROWS": 8, "GREEDY_BELOW": 1e-5, "ACCEPT": 0x4143_4350, "TILES": 32, "CANDIDATES": 16}
compile_for_hopper(
    finalise_block._finalise_block_kernel,
    VERDICT | named("outside_mass_ptr", "fp32"),
    VERDICT_SIZES,
    BLOCK_OF_8 | {"HAS_LOG_Q": True, "ALL_GREEDY": False},
)
for reads_q, is_draw, stop_tiles in ((True, True, 0), (True, False, 0), (True, True, 128), (False, True, 0)):
    compile_for_hopper(
        finalise_rows._finalise_rows_kernel,
        VERDICT,
        VERDICT_SIZES | named("num_stop_tiles", "i32"),
        BLOCK_OF_8 | TEMPERED | {"ROWS": 8, "READS_Q": reads_q, "HAS_LOG_Q": reads_q, "ALL_GREEDY": not reads_q}
        | {"IS_DRAW": is_draw, "STOP_TILES": stop_tiles},
    )
CHANCES = named("slope_ptr intercept_ptr", "fp64") | named("features_ptr", "fp32") | named("is_known_ptr", "i8")
for source in (0, 1, 2):
    compile_for_hopper(
        draft_chances._hold_back_drafts_kernel,
        named("slots_ptr ids_ptr kept_ptr", "i64") | named("log_q_ptr confidence_ptr", "fp32")
        | named("thresholds_ptr", "fp64") | named("is_adaptive_ptr", "u8") | CHANCES,
        named("trash_slot num_kept", "i32"),
        {"NUM_DRAFTS": 7, "NUM_CANDIDATES": 16, "SOURCE": source, "FROM_HEAD": 2, "HOLDS_BACK": source > 0}
        | {"HAS_ADAPTIVE": True, "LIMIT": 40.0, "DRAFTS": 8, "CANDIDATES": 16},
    )
compile_for_hopper(
    observe_drafts._observe_drafts_kernel,
    named("slots_ptr draft_ptr accepted_ptr", "i64") | named("teaches_ptr", "u8") | named("sums_ptr", "fp64") | CHANCES,
    named("num_requests num_kept", "i32"),
    {"NUM_DRAFTS": 7, "HAS_TEACHES": True, "REQUESTS": 128, "DRAFTS": 8},
)
SLOTS = named("slots_ptr whole_ptr", "i64")
COLUMNS = {"NUM_WHOLE": 15, "LENGTH": 0, "ANCHOR": 1, "STEP": 2}
compile_for_hopper(
    step_rows._step_rows_kernel,
    SLOTS | named("context_ptr draft_ptr candidate_ptr whole_out_ptr token_out_ptr position_out_ptr", "i64")
    | named("cell_out_ptr draft_out_ptr candidate_out_ptr", "i64") | named("table_ptr", "i32")
    | named("fractions_ptr log_q_ptr fractions_out_ptr log_q_out_ptr", "fp32"),
    named("num_requests trash_slot num_kept num_blocks vocab_size num_positions", "i32"),
    COLUMNS | {"IS_ALIVE": 3, "TOP_K": 5, "SEED": 6, "NUM_FRACTIONS": 3, "BLOCK_SIZE": 32, "NUM_ROWS": 16,
               "NUM_CANDIDATES": 16, "HAS_CONTEXT": True, "HAS_CELLS": True, "ROWS": 16, "CANDIDATES": 256},
)
compile_for_hopper(
    block_rows._block_rows_kernel,
    SLOTS | named("whole_out_ptr token_out_ptr position_out_ptr", "i64") | named("beyond_out_ptr", "i1")
    | named("fractions_ptr temperature_out_ptr", "fp32"),
    named("num_requests mask_id vocab_size max_positions", "i32"),
    COLUMNS | {"SEED": 6, "NUM_FRACTIONS": 3, "TEMPERATURE": 0, "NUM_ROWS": 16, "ROWS": 16},
)
compile_for_hopper(
    commit_step._commit_step_kernel,
    SLOTS | named("waiting_ptr starts_ptr positions_ptr draft_ptr accepted_ptr bonus_ptr fault_ptr", "i64")
    | named("num_zero_q_ptr ends_ptr report_ptr", "i64"),
    named("num_kept", "i32"),
    COLUMNS | {"IS_ALIVE": 3, "LIMIT": 4, "FIRST_STOP": 7, "NUM_STOPS": 8, "SOUND": 0, "NUM_ROWS": 16, "NUM_COUNTS": 5,
               "ROWS": 16, "KEPT": 16},
)
for has_q in (True, False):
    compile_for_hopper(
        store_drafts._store_drafts_kernel,
        named("slots_ptr ids_ptr candidate_ptr wanted_ptr kept_ids_ptr kept_candidate_ptr waiting_ptr", "i64")
        | named("log_q_ptr kept_log_q_ptr", "fp32"),
        named("waiting_stride num_kept", "i32"),
        {"NUM_DRAFTS": 7, "NUM_CANDIDATES": 16, "HAS_WANTED": has_q, "HAS_Q": has_q, "KEPT": 16, "CELLS": 256},
    )
compile_for_hopper(
    top_k_tokens._best_of_groups_kernel,
    named("scores_ptr", "bf16") | named("keys_ptr", "i64"),
    named("vocab_size num_groups", "i32"),
    {"GROUP": 64, "GROUPS": 32},
)
compile_for_hopper(
    top_k_tokens._top_k_in_groups_kernel,
    named("scores_ptr values_ptr", "bf16") | named("keys_ptr ids_ptr", "i64"),
    named("vocab_size num_groups", "i32"),
    {"NUM_BEST": 16, "BEST": 16, "GROUP": 64, "KEYS": 1024},
)
DRAW = named("seed_ptr step_ptr position_ptr ids_ptr", "i64")
DRAW_KEYS = {"HAS_STEP": True, "DOMAIN": 0x4452_4654, "CANDIDATES": 16}
compile_for_hopper(
    noise._candidate_gumbel_kernel,
    DRAW | named("noise_ptr", "fp32"),
    named("num_drafts first num_candidates", "i32"),
    DRAW_KEYS,
)
compile_for_hopper(
    draw_candidates._draw_candidates_kernel,
    DRAW | named("drawn_ptr", "i64") | named("scores_ptr", "bf16") | named("temperature_ptr log_q_ptr", "fp32"),
    named("num_drafts first num_candidates", "i32"),
    DRAW_KEYS,
)
compile_for_hopper(
    draw_candidates._candidate_log_q_kernel,
    named("scores_ptr temperature_ptr log_q_ptr", "fp32"),
    named("num_drafts num_candidates", "i32"),
    {"CANDIDATES": 16},
)
compile_for_hopper(
    target_distribution._temper_logits_kernel,
    named("logits_ptr", "bf16") | named("temperature_ptr tempered_ptr", "fp32"),
    named("num_rows vocab_size", "i32"),
    {"GREEDY_BELOW": 1e-5, "LOWEST": 0.01, "TILE": 4096},
)
for queries, is_shared, has_tail in ((16, True, False), (64, True, True), (128, False, False)):
    compile_for_hopper(
        paged_attention_kernel._paged_attention_kernel,
        named("q_ptr planes_ptr tail_ptr y_ptr", "bf16")
        | named("sums_ptr sink_ptr", "fp32")
        | named("table_ptr counter_ptr", "i32")
        | named("slot_ptr start_ptr first_ptr", "i64"),
        named("num_rows num_blocks num_columns q_request_stride q_row_stride q_head_stride", "i32")
        | named("window least_turns alone_turns", "i32")
        | named("scale", "fp32"),
        {"KV_HEADS": 3, "GROUP": 3, "HEAD": 64, "CHANNELS": 64, "PAGE": 64, "QUERIES": queries, "KEYS": 128,
         "IS_SHARED": is_shared, "JOIN_STAGES": 4, "FETCHED": 2, "HAS_TAIL": has_tail, "IS_CAUSAL": False,
         "HAS_FIRSTS": has_tail, "HAS_SINK": has_tail, "BEGINS": 0 if has_tail else 2},
    )
for tile in (Tile(32, 32, 2), Tile(32, 64, slices=4), Tile(32, 16, slices=4, is_held=True)):
    cut = make_cut(tile, torch.empty(3, 72, dtype=torch.bfloat16), is_pair=True, is_dependent=False)
    code = compile_for_hopper(
        linear_gated._linear_gated_kernel,
        named("x_ptr weight_ptr bias_ptr y_ptr", "bf16") | named("squares_ptr parts_ptr", "fp32")
        | {"counter_ptr": "i32"},
        named("num_rows num_squares", "i32") | {"eps": "fp32"},
        {"NUM_OUTPUTS": 37, "SQUARES": 4, "HAS_SQUARES": True, "HAS_BIAS": True, "CUT": cut._replace(begins=2)},
    )
    assert waits_before_others_begin(code)
    first_read = min(code.find(name) % len(code) for name in ("ld.global", "cp.async.ca", "cp.async.cg"))
    assert (first_read < code.index("griddepcontrol.wait")) is tile.is_held
for may_begin_early in (False, True):
    code = compile_for_hopper(
        add_norm._add_norm_kernel,
        named("x_ptr y_ptr sum_ptr normed_ptr", "bf16") | {"gain_ptr": "fp32"},
        {"width": "i32", "eps": "fp32"},
        {"ADDS": True, "COPIES": False, "BLOCK": 1024, "USE_PDL": may_begin_early},
    )
    assert waits_before_others_begin(code) if may_begin_early else "griddepcontrol" not in code
print("compiled")
"""


@pytest.mark.skipif(not dispatch.HAS_TRITON, reason="Triton is not installed")
def test_every_kernel_compiles(tmp_path: Path) -> None:
    """The interpreter runs plain Python; the compiler takes a part of it. No GPU is needed to ask it."""
    assert run_python(COMPILE, tmp_path) == "compiled\n"


def shared_kernel_names(folder: Path) -> list[str]:
    """Names that more than one kernel of a folder's files has."""
    names = Counter(
        node.name
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == "kernel" for mark in node.decorator_list)
    )
    return sorted(name for name, count in names.items() if count > 1)


def test_no_two_kernels_share_a_name_in_a_cache_of_compiled_code(tmp_path: Path) -> None:
    ops = Path(dispatch.__file__).parent
    assert shared_kernel_names(ops) == []
    for name in ("candidate_walk.py", "sample_tokens.py"):
        (tmp_path / name).write_text((ops / "candidate_walk.py").read_text(encoding="utf-8"), encoding="utf-8")
    assert shared_kernel_names(tmp_path) != []  # the test would see it
