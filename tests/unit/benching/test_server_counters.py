"""Counters of drafting as vLLM and paceline expose them."""

from __future__ import annotations

from paceline.benching.server_counters import read_counters
from paceline.trace.acceptance import DraftTotals

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 45.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 7.0
vllm:generation_tokens_total{engine="0"} 99.0
"""


def test_series_are_added_up() -> None:
    assert read_counters(VLLM) == DraftTotals(15, 45, 20, (13, 0, 7), None)


def test_papers_of_other_servers() -> None:
    assert read_counters("") is None
    assert read_counters('vllm:generation_tokens_total{engine="0"} 99.0\n') is None
    assert read_counters("paceline:spec_decode_num_drafts_total 3\n") == DraftTotals(3, 0, 0, (), None)
    assert read_counters("paceline:spec_decode_num_drafts_total nonsense\nx\n") is None
    stamped = "vllm:spec_decode_num_drafts_total 3 1700000000000\n"
    assert read_counters(stamped) == DraftTotals(3, 0, 0, (), None)
