"""Routes beside completions, what surrounds them, and the documentation that comes with them; over a real port."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.served import MAX_MODEL_LEN, NAME, Running, models_of, opener, running

from paceline import __version__
from paceline.checkpoint.generation_defaults import SamplingDefaults


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(
        api_keys=("one-key", "another-key"), max_body_bytes=2000, allowed_origins=("http://page.test",)
    ) as server:
        server.client.headers["Authorization"] = "Bearer another-key"
        yield server


def test_models(served: Running) -> None:
    found = served.client.get("/v1/models").json()
    (card,) = found["data"]
    assert found["object"] == "list" and card["object"] == "model"
    assert (card["id"], card["max_model_len"], card["draft_model"]) == (NAME, MAX_MODEL_LEN, "tests/drafter")
    assert served.client.get(f"/v1/models/{NAME}").json() == card
    missing = served.client.get("/v1/models/none")
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "model"


def test_tokens_there_and_back(served: Running) -> None:
    tokenizer = models_of()[0].tokenizer
    text = "the sea é \U0001f642"
    found = served.client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == tokenizer.encode(text) and found["count"] == len(found["tokens"])
    assert found["max_model_len"] == MAX_MODEL_LEN and len(found["token_strs"]) == found["count"]
    assert served.client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "tea"}]
    chat = served.client.post("/tokenize", json={"messages": messages}).json()
    assert chat["tokens"] == tokenizer.encode_chat(messages) and "token_strs" not in chat
    open_turn = served.client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert open_turn["tokens"] == chat["tokens"][:-1]
    goes_on = served.client.post("/tokenize", json={"messages": messages, "continue_final_message": True}).json()
    assert goes_on["tokens"] == open_turn["tokens"][:-1]
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = served.client.post("/tokenize", json={"messages": messages, "tools": tools}).json()
    assert with_tools["tokens"] == tokenizer.encode(tokenizer.render(messages, tools=tools).text)
    for body in ({}, {"prompt": "a", "messages": messages}):
        assert served.client.post("/tokenize", json=body).status_code == 400
    for tokens in ([-1], [10**6]):
        refused = served.client.post("/detokenize", json={"tokens": tokens})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"


def test_the_rest_of_a_server(served: Running) -> None:
    assert served.client.get("/health").content == b"" == served.client.get("/ping").content
    assert served.client.get("/version").json() == {"version": __version__}
    assert served.client.get("/server_info").json() == {"target": {"name": NAME}}
    paths = served.client.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/tokenize"} <= set(paths)
    assert all(each["summary"] for path in paths.values() for each in path.values())
    assert served.client.get("/docs").status_code == 200


def test_keys_are_asked_for(served: Running) -> None:
    for authorization in ("Bearer wrong", "Bearer one", "one-key", ""):
        refused = served.client.get("/v1/models", headers={"Authorization": authorization})
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    assert served.client.get("/v1/models", headers={"Authorization": "Bearer one-key"}).status_code == 200
    for path in ("/health", "/ping", "/version"):
        assert served.client.get(path, headers={"Authorization": ""}).status_code == 200


def test_request_ids_and_sizes(served: Running) -> None:
    assert served.client.get("/ping", headers={"X-Request-Id": "mine-7"}).headers["X-Request-Id"] == "mine-7"
    body = {"prompt": "tea", "max_tokens": 2}
    answers = [served.client.post("/v1/completions", json=body | {"stream": stream}) for stream in (True, False)]
    assert len({answer.headers["X-Request-Id"] for answer in answers}) == 2
    large = served.client.post("/v1/completions", json={"prompt": "tea " * 1000})
    assert large.status_code == 413 and large.headers["X-Request-Id"]


def test_pages_of_allowed_origins_may_ask(served: Running) -> None:
    asked = {"Origin": "http://page.test", "Access-Control-Request-Method": "POST"}
    allowed = served.client.options("/v1/completions", headers=asked)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "http://page.test"
    refused = served.client.options("/v1/completions", headers=asked | {"Origin": "http://other.test"})
    assert "access-control-allow-origin" not in refused.headers


def test_paths_and_methods_that_are_not_there(served: Running) -> None:
    missing = served.client.get("/v1/nothing")
    assert missing.status_code == 404 and set(missing.json()["error"]) == {"message", "type", "param", "code"}
    wrong = served.client.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["Allow"] == "POST"


def test_metrics_can_be_scraped(served: Running) -> None:
    served.client.post("/v1/completions", json={"prompt": "tea", "max_tokens": 5, "ignore_eos": True})
    families = {family.name: family for family in text_string_to_metric_families(served.client.get("/metrics").text)}
    assert families["paceline:generation_tokens"].samples[0].value >= 5
    assert families["paceline:request_success"].type == "counter"


def test_unknown_fields_are_said_once(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        for _ in range(2):
            body = {"prompt": "tea", "max_tokens": 1, "telepathy": 3}
            assert served.client.post("/v1/completions", json=body).status_code == 200
    assert sum("telepathy" in record.message for record in caplog.records) == 1


def test_what_the_makers_advise_is_sampled_with_where_a_request_says_nothing() -> None:
    body = {"prompt": "tea", "max_tokens": 12, "seed": 3}
    texts = {}
    for temperature in (0.0, 1.0):
        with running(opener(defaults=SamplingDefaults(temperature=temperature))) as server:
            texts[temperature] = server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            told = server.client.post("/v1/completions", json=body | {"temperature": 0}).json()
            assert told["choices"][0]["text"] == texts[0.0]
    assert texts[0.0] != texts[1.0]
