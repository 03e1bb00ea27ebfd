"""What a bench was asked to do: set-ups of this process or servers, prompts, how requests come, and what is told."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, Strict, field_validator, model_validator

from paceline.configuration.fields import Count, CountOrZero, Flag, Name, OrNone, PathName, PositiveNumber
from paceline.configuration.generation import DraftLength, ModelRun

MetricName = Literal["ttft", "tpot", "itl", "e2el"]
GoodputName = Literal["ttft", "tpot", "e2el"]
Percentile = Annotated[float, Strict(), Field(ge=0, le=100, allow_inf_nan=False)]

UNKNOWN_MODEL = "auto"
_OF_ENGINES = (
    "draft_model",
    "other_draft_model",
    "spec_tokens",
    "draft_sample_method",
    "verify_method",
    "draft_length",
    "draft_vocab_size",
    "max_model_len",
    "dtype",
    "device",
    "linear_mode",
    "threads",
    "offline",
    "max_num_seqs",
    "prefix_cache",
    "canary",
)
_OF_SERVERS = ("endpoint", "api_key", "extra_body", "request_timeout_s")


def split_url(text: str) -> tuple[str, str]:
    """Name and address of a server: of `NAME=http://host:port`, or of the address alone, whose name is `host:port`.

    Raises:
        ValueError: it is no address of HTTP.
    """
    name, separator, url = text.partition("=")
    if not separator or not url.startswith(("http://", "https://")):
        name, url = "", text
    url = url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # a port that is no number shows here
    except ValueError as error:
        raise ValueError(f"{text!r} is no address: {error}") from error
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{text!r} is no address of a server; it looks like http://host:port")
    return name.strip() or parts.netloc + parts.path, url


def _is_server(text: str) -> str:
    split_url(text)
    return text


ServerUrl = Annotated[Name, AfterValidator(_is_server)]


class BenchRun(ModelRun):
    """Set-ups on the same prompts: a target with and without drafters in this process, or servers."""

    model: Name = Field(
        UNKNOWN_MODEL,
        description="target that runs here; of servers, the name to ask for, where auto takes the only one they have",
    )
    other_draft_model: Annotated[Name | None, OrNone] = Field(None, description="a second drafter, to compare with")
    draft_length: DraftLength = Field(
        "adaptive", description="adaptive drafts as many as pay, as serve does; fixed spec_tokens every step, off none"
    )
    max_num_seqs: Annotated[Count | None, OrNone] = Field(
        None, description="slots of each engine; unset takes the largest concurrency, and 16 without any"
    )
    prefix_cache: Flag = Field(False, description="keep the keys of texts: with it, a second round finds the first's")
    canary: Literal["start", "off"] = Field("start", description="start measures no drafter that fails its canary")
    base_urls: tuple[ServerUrl, ...] = Field(
        (), description="servers to measure in place of this process, as http://host:port or NAME=http://host:port"
    )
    endpoint: Literal["auto", "chat", "completions"] = Field(
        "auto", description="auto asks chats as chats, and token ids or raw texts as completions"
    )
    api_key: Annotated[Name | None, OrNone] = Field(None, description="key for the servers")
    extra_body: dict[str, JsonValue] = Field({}, description="further fields of every request to a server")
    request_timeout_s: PositiveNumber = Field(600.0, description="seconds after which an answer of a server has failed")
    dataset_path: Annotated[PathName | None, OrNone] = Field(
        None, description="prompt file (.jsonl, plain text or held-out .npz); unset takes the shipped prompts"
    )
    num_prompts: Annotated[Count | None, OrNone] = Field(
        None, description="requests per pass; beyond the file's prompts it begins anew; unset asks each once"
    )
    concurrency: tuple[Count, ...] = Field(
        (), description="requests in flight, one load each; none is 1, and no limit where request_rate is set"
    )
    request_rate: Annotated[PositiveNumber | None, OrNone] = Field(
        None, description="requests per second that arrive, whether or not others have ended; unset is a closed loop"
    )
    burstiness: PositiveNumber = Field(
        1.0, description="shape of the gamma distribution between arrivals: 1 is Poisson, less is burstier"
    )
    rounds: Count = Field(2, description="passes of each set-up; the order reverses from one to the next")
    num_warmups: Annotated[CountOrZero | None, OrNone] = Field(
        None, description="requests before each load that do not count; unset takes a whole pass"
    )
    percentile_metrics: tuple[MetricName, ...] = Field(
        ("ttft", "tpot", "itl", "e2el"), description="latencies that the table shows; results have all"
    )
    metric_percentiles: tuple[Percentile, ...] = Field((99.0,), description="percentiles besides mean and median")
    goodput: dict[GoodputName, PositiveNumber] = Field(
        {}, description="milliseconds of ttft, tpot or e2el that a good request keeps to"
    )
    metadata: dict[str, str] = Field({}, description="what the result shall say besides")
    save_result: Flag = Field(False, description="write the result as a file")
    result_dir: Annotated[PathName | None, OrNone] = Field(
        None, description="folder of that file; naming one saves it there, unset is the working folder"
    )

    @model_validator(mode="before")
    @classmethod
    def _numbers_may_be_whole(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for key in ("concurrency", "metric_percentiles"):
                if isinstance(values.get(key), int | float) and not isinstance(values[key], bool):
                    values = values | {key: [values[key]]}
        return values

    @field_validator("api_key")
    @classmethod
    def _key_can_be_sent(cls, key: str | None) -> str | None:
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise ValueError("the key has characters that no header can carry")
        return key

    @model_validator(mode="after")
    def _one_kind_of_set_up(self) -> Self:
        of_others: tuple[str, ...] = _OF_SERVERS
        why = "there are no base_urls to ask"
        if self.base_urls:
            of_others, why = _OF_ENGINES, "base_urls are servers, which decide that themselves"
        elif self.model == UNKNOWN_MODEL:
            raise ValueError("model must be set: a target to run here; or base_urls, servers to measure")
        for name in of_others:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is set, but {why}")
        return self

    @model_validator(mode="after")
    def _set_ups_differ(self) -> Self:
        names = [split_url(text)[0] for text in self.base_urls]
        if len(set(names)) < len(names):
            raise ValueError("two of base_urls have one name; give them others, as NAME=http://host:port")
        if self.other_draft_model is not None and self.draft_model is None:
            raise ValueError("other_draft_model is set, but there is no draft_model that it could be compared with")
        return self

    @model_validator(mode="after")
    def _loads_make_sense(self) -> Self:
        if len(set(self.concurrency)) < len(self.concurrency):
            raise ValueError(f"concurrency has a number twice: {', '.join(map(str, self.concurrency))}")
        if self.request_rate is None and self.burstiness != 1.0:
            raise ValueError("burstiness is set, but there is no request_rate: in a closed loop nothing arrives")
        if self.raw and self.endpoint == "chat":
            raise ValueError("raw takes texts as they are, and endpoint chat puts them into a chat")
        return self

    @property
    def setup_names(self) -> tuple[str, ...]:
        """Names of the set-ups, the one that others are compared with first."""
        if self.base_urls:
            return tuple(split_url(text)[0] for text in self.base_urls)
        names = ["plain"]
        for drafter in (self.draft_model, self.other_draft_model):
            if drafter is not None:
                short = _last_part(drafter).removeprefix(f"{_last_part(self.model)}-")
                names.append(short if short not in names else f"{short} (2)")
        return tuple(names)


def _last_part(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]
