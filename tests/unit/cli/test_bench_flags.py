"""Flags that hold several things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.cli import bench_flags
from paceline.errors import ConfigError


def test_lists() -> None:
    assert bench_flags.parts(["ttft,tpot", "itl e2el"]) == ("ttft", "tpot", "itl", "e2el")
    assert bench_flags.parts(None) is None
    assert bench_flags.whole_numbers("--concurrency", ["1,4", "16"]) == (1, 4, 16)
    assert bench_flags.numbers("--metric-percentiles", ["50, 99.9"]) == (50.0, 99.9)
    assert bench_flags.limits(["ttft:200 tpot:50"]) == bench_flags.limits(["ttft:200", "tpot:50"])
    assert bench_flags.limits(["ttft:200,tpot:50.5"]) == {"ttft": 200.0, "tpot": 50.5}
    assert bench_flags.pairs("--metadata", ["a=b", "c = d=e"]) == {"a": "b", "c": " d=e"}
    assert bench_flags.json_object("--extra-body", '{"top_k": 5}') == {"top_k": 5}
    for nothing in (
        bench_flags.limits(None),
        bench_flags.pairs("--metadata", None),
        bench_flags.json_object("-", None),
    ):
        assert nothing is None


def test_models() -> None:
    assert (
        bench_flags.one_model("m", None) == bench_flags.one_model(None, "m") == bench_flags.one_model("m", "m") == "m"
    )
    assert bench_flags.at_most_two(None) == (None, None)
    assert bench_flags.at_most_two(["a"]) == ("a", None) and bench_flags.at_most_two(["a", "b"]) == ("a", "b")


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda: bench_flags.one_model("a", "b"), "give one"),
        (lambda: bench_flags.one_model("tpot:50", None), "once per value"),
        (lambda: bench_flags.one_model("http://b:1", None), "once per value"),
        (lambda: bench_flags.one_model("key=value", None), "once per value"),
        (lambda: bench_flags.at_most_two(["a", "b", "c"]), "3 times"),
        (lambda: bench_flags.whole_numbers("--concurrency", ["4,many"]), "'many'"),
        (lambda: bench_flags.whole_numbers("--concurrency", ["-1"]), "'-1'"),
        (lambda: bench_flags.numbers("--metric-percentiles", ["p99"]), "no number"),
        (lambda: bench_flags.limits(["ttft"]), "METRIC:MS"),
        (lambda: bench_flags.limits(["itl:5"]), "METRIC:MS"),
        (lambda: bench_flags.limits(["ttft:5,ttft:6"]), "twice"),
        (lambda: bench_flags.pairs("--metadata", ["a"]), "KEY=VALUE"),
        (lambda: bench_flags.pairs("--metadata", ["a=1", "a=2"]), "twice"),
        (lambda: bench_flags.json_object("--extra-body", "{"), "not JSON"),
        (lambda: bench_flags.json_object("--extra-body", "[1]"), "list, not an object"),
    ],
)
def test_faults(read: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read()
