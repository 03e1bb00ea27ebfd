"""The same weights in transformers: the oracle for ids and logits, and the peer for speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.checkpoint.gguf import open_gguf
from paceline.checkpoint.locate import locate_target
from paceline.checkpoint.weights import open_safetensors
from paceline.errors import CheckpointError

if TYPE_CHECKING:
    from paceline.checkpoint.contract import RopeSettings, TargetContract
    from paceline.checkpoint.weights import TensorSource


def load_in_transformers(name: str, contract: TargetContract, dtype: torch.dtype) -> Any:
    """Build the transformers model of a target, on the CPU, from the files that we read ourselves.

    Args:
        name: folder, `.gguf` file, hub name or alias, as `load_target` takes it.
        contract: of the loaded target.
        dtype: of the weights.
    """
    path = locate_target(name)
    source = open_gguf(path) if path.suffix == ".gguf" else open_safetensors(path)
    return build_model(contract, source, dtype)


def build_model(contract: TargetContract, source: TensorSource, dtype: torch.dtype) -> Any:
    """A `LlamaForCausalLM` or `Qwen3ForCausalLM` that holds a source's tensors, in eval mode.

    Raises:
        CheckpointError: the model has a tensor that the source lacks, or the other way round.
    """
    import transformers

    config_class, model_class = {
        "LlamaForCausalLM": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "Qwen3ForCausalLM": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[contract.architecture]
    keys = config_keys(contract)
    model = model_class(config_class(**keys)).to(dtype)
    state = {name: source.load(name).to(dtype) for name in source.names() if not name.endswith("inv_freq")}
    if contract.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    found = model.load_state_dict(state, strict=False)
    if found.missing_keys or found.unexpected_keys:
        raise CheckpointError(
            f"transformers misses {found.missing_keys} and does not know {found.unexpected_keys}",
            origin={"weights": source.origin},
        )
    # `.to(dtype)` rounds the rotary frequencies as well; every serving path of transformers keeps them in float32.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    # Ids end a text only where a caller says so, and no sampling default of the model may interfere.
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0, use_cache=True)
    return model.eval().requires_grad_(False)


def config_keys(contract: TargetContract) -> dict[str, Any]:
    """A contract in the words of a transformers config."""
    keys = {
        "hidden_size": contract.hidden_size,
        "intermediate_size": contract.intermediate_size,
        "num_hidden_layers": contract.num_layers,
        "num_attention_heads": contract.num_heads,
        "num_key_value_heads": contract.num_kv_heads,
        "head_dim": contract.head_size,
        "vocab_size": contract.vocab_size,
        "rms_norm_eps": contract.rms_norm_eps,
        "max_position_embeddings": contract.max_position_embeddings,
        "attention_bias": contract.attention_bias,
        "tie_word_embeddings": contract.tie_word_embeddings,
        "rope_parameters": _rope_keys(contract.rope),
        "bos_token_id": contract.bos_token_id,
        "eos_token_id": list(contract.stop_token_ids),
        "pad_token_id": None,
    }
    return keys | ({"mlp_bias": contract.mlp_bias} if contract.architecture == "LlamaForCausalLM" else {})


_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


def _rope_keys(rope: RopeSettings) -> dict[str, Any]:
    values = asdict(rope)
    chosen = {field: values[field] for field in _ROPE_FIELDS[rope.kind] if values[field] is not None}
    return {"rope_type": rope.kind, "rope_theta": rope.theta, **chosen}


@dataclass(frozen=True)
class TimedText:
    """What `generate` gave and when.

    Attributes:
        token_ids: new tokens.
        prefill_s: until the first of them was there.
        decode_s: from the first to the last.
    """

    token_ids: tuple[int, ...]
    prefill_s: float
    decode_s: float


class _Arrivals:
    """A streamer that only notes when each token arrived; the prompt comes first and counts as none."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, _ids: Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate_greedily(
    model: Any, prompt_ids: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int] = ()
) -> TimedText:
    """`model.generate`, greedy, with its cache; without `stop_token_ids` it goes on to `max_tokens`."""
    arrivals = _Arrivals()
    prompt = torch.tensor([list(prompt_ids)])
    began_s = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            eos_token_id=list(stop_token_ids) or None,
            streamer=arrivals,
        )
    token_ids = tuple(output[0, prompt.shape[1] :].tolist())
    first_s, last_s = arrivals.times_s[1], arrivals.times_s[-1]
    return TimedText(token_ids, first_s - began_s, last_s - first_s)


def next_logits(model: Any) -> Callable[[Sequence[int]], Tensor]:
    """A function from token ids to the transformers model's logits of the next one, in float32."""

    def of(ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1].float()
        return logits

    return of
