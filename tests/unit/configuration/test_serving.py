"""Settings of a server: what they are where nobody says so, and values that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from paceline.configuration.load import load_settings
from paceline.configuration.serving import ServeRun
from paceline.engine.start_checks import CANARY_MODES
from paceline.errors import ConfigError
from paceline.serving.model import MetricsLevel


def serve(**values: Any) -> ServeRun:
    return ServeRun.model_validate({"model": "m", **values})


def test_a_model_is_enough_and_only_this_machine_is_served() -> None:
    found = serve()
    assert (found.host, found.port, found.api_keys, found.allowed_origins) == ("127.0.0.1", 8000, (), ())
    assert (found.draft_model, found.draft_length, found.canary) == (None, "adaptive", "start")
    assert (found.generation_config, found.per_request_spec_decode_metrics) == ("auto", "none")


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"port": -1}, "port"),
        ({"port": 65536}, "port"),
        ({"port": "8000"}, "port"),
        ({"port": True}, "port"),
        ({"host": ""}, "host"),
        ({"host": " "}, "host"),
        ({"served_model_name": ""}, "served_model_name"),
        ({"api_keys": [""]}, "api_keys"),
        ({"api_keys": "secret"}, "api_keys"),
        ({"api_keys": ["one", "one"]}, "twice"),
        ({"api_keys": ["one", " one"]}, "twice"),
        ({"api_keys": ["two words"]}, "no header can carry"),
        ({"api_keys": ["schlüssel"]}, "no header can carry"),
        ({"api_keys": ["a\x00b"]}, "no header can carry"),
        ({"api_keys": ["a\nb"]}, "no header can carry"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_waiting": -1}, "max_num_waiting"),
        ({"max_itl_ms": 0}, "max_itl_ms"),
        ({"max_itl_ms": float("inf")}, "max_itl_ms"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"request_timeout_s": 0}, "request_timeout_s"),
        ({"request_timeout_s": float("nan")}, "request_timeout_s"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s"),
        ({"stream_interval_s": -0.1}, "stream_interval_s"),
        ({"max_body_mb": 0}, "max_body_mb"),
        ({"prefix_cache": "yes"}, "prefix_cache"),
        ({"canary": "always"}, "canary"),
        ({"per_request_spec_decode_metrics": "all"}, "per_request_spec_decode_metrics"),
        ({"generation_config": "some/folder"}, "generation_config"),
        ({"draft_length": "long"}, "draft_length"),
        ({"draft_length": "off"}, "no draft_model"),
        ({"spec_tokens": 3}, "no draft_model"),
        ({"max_tokens": 5}, "Extra inputs"),
    ],
)
def test_values_that_cannot_be(values: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError, match=part):
        serve(**values)


def test_a_limit_may_be_no_limit() -> None:
    names = ("max_num_waiting", "max_itl_ms", "request_timeout_s", "num_blocks", "max_model_len", "served_model_name")
    found = serve(**dict.fromkeys(names, "none"))
    assert [getattr(found, name) for name in names] == [None] * len(names)
    assert serve(max_num_waiting=0).max_num_waiting == 0  # whoever does not run at once is turned away


def test_keys_are_taken_from_a_file_and_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('model = "m"\nport = 0\napi_keys = ["one", "two"]\n')
    assert load_settings(ServeRun, file).api_keys == ("one", "two")
    assert load_settings(ServeRun, file, ['api_keys=["three"]']).api_keys == ("three",)
    with pytest.raises(ConfigError, match="api_keys") as caught:
        load_settings(ServeRun, file, flags={"api_keys": ["a secret key"]})
    assert "a secret key" not in str(caught.value)


def test_names_are_those_of_server_and_engine() -> None:
    assert get_args(ServeRun.model_fields["per_request_spec_decode_metrics"].annotation) == get_args(MetricsLevel)
    assert set(get_args(ServeRun.model_fields["canary"].annotation)) == set(CANARY_MODES)
