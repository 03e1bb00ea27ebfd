"""Settings of a bench: two kinds of set-ups, and what belongs to one of them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.configuration.bench import BenchRun, split_url
from paceline.configuration.load import load_settings, to_toml
from paceline.errors import ConfigError

URL = "http://127.0.0.1:8000"


def run(**values: Any) -> BenchRun:
    return load_settings(BenchRun, flags=values)


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        (URL, "127.0.0.1:8000", URL),
        (f"{URL}/v1/", "127.0.0.1:8000", URL),
        (f"ours={URL}/", "ours", URL),
        ("https://host/deep/v1", "host/deep", "https://host/deep"),
        ("a b=http://[::1]:80", "a b", "http://[::1]:80"),
    ],
)
def test_addresses(text: str, name: str, url: str) -> None:
    assert split_url(text) == (name, url)


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://u:p@x", "http://x?a=b", "ours=x", "http://[x"],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="base_urls"):
        run(base_urls=(text,))


def test_engines_and_servers() -> None:
    engines = run(model="models/m", draft_model="d/m-dflash2", other_draft_model="e/m-dflash2/")
    assert engines.setup_names == ("plain", "dflash2", "dflash2 (2)")
    assert (engines.draft_length, engines.prefix_cache, engines.rounds) == ("adaptive", False, 2)
    assert run(model="m").setup_names == ("plain",)
    servers = run(base_urls=(URL, f"other={URL}"), api_key="k", extra_body={"draft_length": "off"})
    assert servers.setup_names == ("127.0.0.1:8000", "other") and servers.model == "auto"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "model must be set"),
        ({"base_urls": (URL,), "draft_model": "d"}, "draft_model is set, but base_urls are servers"),
        ({"base_urls": (URL,), "threads": 2}, "threads is set, but base_urls are servers"),
        ({"base_urls": (URL,), "prefix_cache": True}, "prefix_cache is set"),
        ({"base_urls": (URL, URL)}, "one name"),
        ({"model": "m", "api_key": "k"}, "api_key is set, but there are no base_urls"),
        ({"model": "m", "endpoint": "chat"}, "endpoint is set"),
        ({"base_urls": (URL,), "api_key": "no good"}, "characters that no header can carry"),
        ({"model": "m", "other_draft_model": "d"}, "no draft_model that it could be compared with"),
        ({"model": "m", "spec_tokens": 3}, "no draft_model to use it"),
        ({"model": "m", "concurrency": (2, 2)}, "a number twice"),
        ({"model": "m", "concurrency": (0,)}, "concurrency"),
        ({"model": "m", "burstiness": 0.5}, "no request_rate"),
        ({"model": "m", "request_rate": 0.0}, "request_rate"),
        ({"base_urls": (URL,), "raw": True, "endpoint": "chat"}, "raw takes texts as they are"),
        ({"model": "m", "goodput": {"itl": 3.0}}, "goodput"),
        ({"model": "m", "goodput": {"ttft": 0.0}}, "goodput"),
        ({"model": "m", "metric_percentiles": (101.0,)}, "metric_percentiles"),
        ({"model": "m", "percentile_metrics": ("speed",)}, "percentile_metrics"),
    ],
)
def test_what_does_not_go_together(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(**values)


def test_a_file_may_say_all_of_it(tmp_path: Path) -> None:
    file = tmp_path / "bench.toml"
    given = run(
        base_urls=(URL,), concurrency=(1, 4), goodput={"ttft": 200.0}, metadata={"gpu": "H200"}, extra_body={"a": [1]}
    )
    file.write_text(to_toml(given))
    assert load_settings(BenchRun, file) == given
    file.write_text('model = "m"\nconcurrency = 4\nmetric_percentiles = 95.0\n')
    assert load_settings(BenchRun, file).concurrency == (4,)
