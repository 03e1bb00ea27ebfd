"""Fields that every layout has, read into a contract's and written back: decoder, vocabulary, scores, heads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast, get_args

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import (
    AuxHiddenStream,
    ConfidenceSettings,
    DrafterContract,
    DraftSampleMethod,
    MarkovKind,
    MarkovSettings,
)
from paceline.checkpoint.dialects.keys import (
    UNSTATED,
    Place,
    check_keys,
    contradiction,
    is_same,
    lift,
    nested,
    same_names,
)
from paceline.checkpoint.dialects.tensors import has_module
from paceline.checkpoint.rope_keys import read_rope, write_rope
from paceline.errors import CheckpointError

_DTYPES = ("bfloat16", "float16", "float32")

# Our own additions to layouts that have no nested object for them. Nothing in it changes what another reader computes.
OWN_KEY = "paceline"
_OWN_FIELDS = (
    "draft_sample_method",
    "target_name",
    "target_vocab_size",
    "target_num_layers",
    "num_draft_tokens",
    "mask_token_id",
)
_TARGET_SIZES = ("target_vocab_size", "target_num_layers")  # UNSTATED says nothing
_TIE = "tie_word_embeddings"
NO_MASK = -1  # EAGLE-3 has no masked rows
_TRAINED_STEPS = 7  # of DeepSpec's, SpecForge's and TorchSpec's EAGLE-3 trainers; any number may be drafted

# what a contract says where a layout has no word for it
PLAIN_SCORES: Mapping[str, Any] = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
PLAIN_ATTENTION: Mapping[str, Any] = {"has_attention_sink": False, "attention_value_scale": 1.0}
BLOCK_PARTS: Mapping[str, Any] = {"eagle3": None, "latent": None, "has_qk_norm": True}


def read_decoder(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The decoder of a dense drafter.

    Args:
        config: object with Qwen3's names.
        origin: the file, for messages.
    Returns:
        Contract fields, among them rotary settings and dtype; windows and causality are not.
    Raises:
        CheckpointError: a field is missing or malformed; none has a default here, since writers' defaults differ.
    """
    reader = ConfigReader(config, origin)
    num_heads, num_kv_heads = reader.whole("num_attention_heads"), reader.whole("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise reader.error(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    head_size = reader.whole("head_dim")
    if head_size % 2:
        raise reader.error(f"head_dim is {head_size}; rotary positions need an even one")
    return {
        **read_stack(config, origin),
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "attention_bias": reader.flag("attention_bias", default=False),
    }


def read_stack(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """What dense and latent decoders share."""
    reader = ConfigReader(config, origin)
    return {
        "num_layers": reader.whole("num_hidden_layers"),
        "hidden_size": reader.whole("hidden_size"),
        "intermediate_size": reader.whole("intermediate_size"),
        "num_heads": reader.whole("num_attention_heads"),
        "rms_norm_eps": reader.positive("rms_norm_eps"),
        "rope": read_rope(config, origin),
        "max_position_embeddings": reader.whole("max_position_embeddings"),
    }


def write_decoder(contract: DrafterContract) -> dict[str, Any]:
    """The decoder's fields in Qwen3's names, every optional one explicit, rotary settings in both spellings."""
    return {
        "dtype": contract.dtype,
        "num_hidden_layers": contract.num_layers,
        "hidden_size": contract.hidden_size,
        "intermediate_size": contract.intermediate_size,
        "num_attention_heads": contract.num_heads,
        "num_key_value_heads": contract.num_kv_heads,
        "head_dim": contract.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": contract.rms_norm_eps,
        "attention_bias": contract.attention_bias,
        "max_position_embeddings": contract.max_position_embeddings,
        **write_rope(contract.rope),
        "tie_word_embeddings": False,
    }


def read_dtype(reader: ConfigReader, *configs: Mapping[str, Any]) -> str:
    """The stored dtype, in its new or old spelling, at the top level or beside the decoder's fields.

    Raises:
        CheckpointError: it is missing, not supported, or said twice differently.
    """
    found = [(key, config[key]) for config in configs for key in ("dtype", "torch_dtype") if config.get(key)]
    for key, value in found[1:]:
        if value != found[0][1]:
            raise contradiction(found[0][0], found[0][1], key, value, reader)
    dtype = found[0][1] if found else None
    if dtype not in _DTYPES:
        raise reader.error(f"dtype is {dtype!r}; supported are {', '.join(_DTYPES)}")
    return str(dtype)


def read_own_tables(config: Mapping[str, Any], names: Collection[str], reader: ConfigReader) -> dict[str, Any]:
    """Which end of the network the folder brings along.

    Args:
        config: the whole object.
        names: canonical tensor names; empty if the file was not looked at, and then the config decides.
        reader: of the same object.
    Returns:
        `has_own_embedding` and `has_own_head`.
    Raises:
        CheckpointError: the config promises a head that the file does not have, or ties the two ends of which the file
            has one.
    """
    promised = reader.flag("has_own_lm_head", default=False)
    if not names:
        return {"has_own_embedding": False, "has_own_head": promised}
    has_embedding, has_head = has_module(names, "embed_tokens"), has_module(names, "lm_head")
    if promised and not has_head:
        raise reader.error("has_own_lm_head is true, and the weights have no lm_head")
    # where the file has neither, the target lends both, tied or not as they are there
    if has_embedding != has_head and says_tied(config, reader):
        stored, lent = ("an embedding", "lm_head") if has_embedding else ("an lm_head", "embedding")
        raise reader.error(
            f"tie_word_embeddings is true, and the weights have {stored} of their own and no {lent}; "
            f"engines disagree on whether the {lent} is then the drafter's or the target's",
            hint=f"storing the trained {lent}, or tie_word_embeddings false if it is the target's",
        )
    return {"has_own_embedding": has_embedding, "has_own_head": has_head}


def says_tied(config: Mapping[str, Any], reader: ConfigReader) -> bool:
    """Whether a config says, at the top level or beside the decoder's fields, that embedding and head are one."""
    places = (Place("", config), nested(config, "transformer_layer_config", reader))
    said = [(place.path(_TIE), place.values.get(_TIE)) for place in places]
    for path, value in said:
        if value is not None and not isinstance(value, bool):
            raise reader.error(f"{path} is {value!r}, expected true or false")
    return any(value for _, value in said)


def check_tie(config: Mapping[str, Any], contract: DrafterContract, reader: ConfigReader) -> None:
    """Refuse a tie of two stored ends that cannot be one; whether equal sizes hold equal numbers, the weights show.

    Raises:
        CheckpointError: they have different numbers of rows.
    """
    has_both = contract.has_own_embedding and contract.has_own_head
    if has_both and contract.draft_vocab_size != contract.vocab_size and says_tied(config, reader):
        raise reader.error(
            f"tie_word_embeddings is true, and the weights have an embedding of {contract.vocab_size} rows and an "
            f"lm_head of {contract.draft_vocab_size}"
        )


def read_vocabulary(
    reader: ConfigReader, vocab_size: int, target_vocab_size: int, *, full_because: str | None = None
) -> dict[str, Any]:
    """Embedding rows, target vocabulary and draft vocabulary.

    Args:
        reader: of the object with `draft_vocab_size`.
        vocab_size: rows of the drafter's embedding.
        target_vocab_size: ids of the target.
        full_because: why the draft vocabulary must be the target's, or None if it may be smaller.
    Raises:
        CheckpointError: the draft vocabulary is larger than the target's, or smaller and may not be.
    """
    draft = reader.whole("draft_vocab_size", default=target_vocab_size, minimum=min(1, target_vocab_size))
    if draft != target_vocab_size and full_because is not None:
        raise reader.error(
            f"draft_vocab_size is {draft}; {full_because} has the full vocabulary, here {target_vocab_size}"
        )
    if draft > target_vocab_size:
        raise reader.error(f"draft_vocab_size is {draft}, more than the {target_vocab_size} ids of the target")
    return {"vocab_size": vocab_size, "target_vocab_size": target_vocab_size, "draft_vocab_size": draft}


def read_mask_token_id(reader: ConfigReader, vocab_size: int) -> int:
    """The id of masked rows, inside the embedding (`vocab_size` 0 if that is not stated).

    Raises:
        CheckpointError: it is missing or outside; no other id is ever taken instead.
    """
    try:
        mask = reader.whole("mask_token_id", minimum=0)
    except CheckpointError as error:
        raise reader.error(
            error.message, hint="the id that filled the masked rows in training; end or padding ids are no substitute"
        ) from error
    if vocab_size != UNSTATED and mask >= vocab_size:
        raise reader.error(f"mask_token_id is {mask}, the vocabulary has {vocab_size} ids")
    return mask


def read_sample_method(reader: ConfigReader, default: DraftSampleMethod) -> DraftSampleMethod:
    """Our own field `draft_sample_method`; other writers have none, and then the family's default holds."""
    return cast(DraftSampleMethod, _one_of(reader, "draft_sample_method", DraftSampleMethod, default))


def read_stream(reader: ConfigReader) -> AuxHiddenStream:
    """The target's stream that the taps read."""
    return cast(AuxHiddenStream, _one_of(reader, "aux_hidden_stream", AuxHiddenStream, "prefix"))


def _one_of(reader: ConfigReader, key: str, values: object, default: str) -> str:
    found = reader.text(key, default=default)
    if found not in get_args(values):
        raise reader.error(f"{key} is {found!r}; legal are {' and '.join(get_args(values))}")
    return found


def read_scores(flat: Mapping[str, Any], reader: ConfigReader) -> dict[str, Any]:
    """Embedding scale, logit multiplier and soft-cap of a flat object; 0 and null both mean no cap."""
    cap = flat.get("final_logit_softcapping")
    is_off = cap is None or (cap == 0 and not isinstance(cap, bool))
    return {
        "input_embedding_scale": reader.positive("input_embedding_scale", default=1.0),
        "output_multiplier": reader.positive("output_multiplier", default=1.0),
        "final_logit_softcapping": None if is_off else reader.positive("final_logit_softcapping"),
    }


def read_own(config: Mapping[str, Any], reader: ConfigReader, *places: Place) -> dict[str, Any]:
    """Our own additions, from the object `paceline` and other places that hold them, as one flat object."""
    own = nested(config, OWN_KEY, reader)
    check_keys(own, reader, kind="paceline's own", read=_OWN_FIELDS)
    return lift(same_names("draft_sample_method", "target_name", "target_vocab_size"), (own, *places), reader) | {
        key: own.values.get(key) for key in ("target_num_layers", "num_draft_tokens", "mask_token_id")
    }


def check_own(config: Mapping[str, Any], contract: DrafterContract, reader: ConfigReader) -> None:
    """Refuse an addition of ours that its layout has another word for, and that says something else.

    Raises:
        CheckpointError: names the addition and what the drafter was read as.
    """
    own = nested(config, OWN_KEY, reader)
    for key, value in own.values.items():
        says_nothing = value is None or (key in _TARGET_SIZES and is_same(value, UNSTATED))
        found = getattr(contract, key)
        if not says_nothing and not is_same(value, found):
            raise contradiction(own.path(key), value, f"{key} by the layout's own fields", found, reader)


def write_own(contract: DrafterContract) -> dict[str, Any]:
    """The object `paceline` of a contract."""
    own: dict[str, Any] = {
        "draft_sample_method": contract.draft_sample_method,
        "target_name": contract.target_name,
        "target_vocab_size": contract.target_vocab_size,
        "target_num_layers": contract.target_num_layers,
    }
    if contract.family == "eagle3":
        own |= {"num_draft_tokens": contract.num_draft_tokens, "mask_token_id": contract.mask_token_id}
    return {OWN_KEY: own}


def read_num_steps(flat: Mapping[str, Any], reader: ConfigReader, own: ConfigReader) -> int:
    """Trained draft steps of EAGLE-3: not a limit, but what is proposed unless asked otherwise."""
    trained = reader.whole("ttt_length", default=_TRAINED_STEPS)
    stated = own.whole("num_draft_tokens", default=trained)
    if flat.get("ttt_length") is not None and stated != trained:
        raise contradiction("ttt_length", trained, f"{OWN_KEY}.num_draft_tokens", stated, reader)
    return stated


def read_use_aux(value: object, reader: ConfigReader, key: str = "use_aux_hidden_state") -> None:
    """Refuse drafters that read the target's last state instead of taps."""
    if value not in (None, True):
        raise reader.error(
            f"{key} is {value!r}; supported is true: without taps a drafter reads the target's last hidden state"
        )


def read_markov(reader: ConfigReader, *, rank_default: int | None = None) -> MarkovSettings | None:
    """`markov_rank` and `markov_head_type`; rank 0 is no head at all.

    Raises:
        CheckpointError: the rank is missing and has no default, or the kind is missing or unknown.
    """
    rank = reader.whole("markov_rank", minimum=0, default=rank_default)
    if rank == 0:
        return None
    kind = reader.text("markov_head_type")
    if kind not in get_args(MarkovKind):
        raise reader.error(f"markov_head_type is {kind!r}; legal are {', '.join(get_args(MarkovKind))}")
    return MarkovSettings(rank, cast(MarkovKind, kind))


def read_confidence(
    flat: Mapping[str, Any], reader: ConfigReader, markov: MarkovSettings | None, *, enabled_default: bool
) -> ConfidenceSettings | None:
    """The confidence head: `enable_confidence_head`, or the weight of its loss, `confidence_head_alpha`.

    Raises:
        CheckpointError: the two disagree, it is not said what the head reads, or it reads a Markov head where none is.
    """
    enabled = enabled_default
    alpha = flat.get("confidence_head_alpha")
    if alpha is not None:
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha >= 0:
            raise reader.error(f"confidence_head_alpha is {alpha!r}, expected a number of at least 0")
        enabled = alpha > 0
    if flat.get("enable_confidence_head") is not None:
        stated = reader.flag("enable_confidence_head")
        if alpha is not None and stated != enabled:
            raise contradiction("enable_confidence_head", stated, "confidence_head_alpha", alpha, reader)
        enabled = stated
    if not enabled:
        return None
    with_markov = reader.flag("confidence_head_with_markov")
    if with_markov and markov is None:
        raise reader.error("confidence_head_with_markov is true, and markov_rank is 0")
    return ConfidenceSettings(with_markov)


def write_dspark_heads(contract: DrafterContract) -> dict[str, Any]:
    """Markov and confidence head in the names that all DSpark layouts share."""
    markov, confidence = contract.markov, contract.confidence
    return {
        "markov_rank": markov.rank if markov else 0,
        "markov_head_type": markov.kind if markov else "vanilla",
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None and confidence.with_markov,
    }


def require(contract: DrafterContract, form: str, /, **expected: object) -> None:
    """Refuse to write what a layout has no words for.

    Args:
        contract: the drafter.
        form: the layout's name for the message.
        expected: contract field to the value that readers of the layout assume.
    Raises:
        CheckpointError: lists every field that differs, with both values.
    """
    problems = [
        f"{field} {getattr(contract, field)!r} (its readers assume {value!r})"
        for field, value in expected.items()
        if getattr(contract, field) != value
    ]
    if problems:
        raise CheckpointError(
            f"the {form} layout cannot state {'; '.join(problems)}",
            origin={"drafter": contract.origin},
            hint="the drafter's native layout",
        )


def require_stated(contract: DrafterContract, form: str, *fields: str) -> None:
    """Refuse to write sizes of the target that the drafter was read without.

    Args:
        contract: the drafter.
        form: the layout's name for the message.
        fields: contract fields that the layout cannot do without.
    Raises:
        CheckpointError: names them.
    """
    missing = [field for field in fields if getattr(contract, field) == UNSTATED]
    if missing:
        raise CheckpointError(
            f"the {form} layout cannot state a drafter without {', '.join(missing)}, and it was read from one that "
            "does not say",
            origin={"drafter": contract.origin},
            hint="naming the target, whose depth and vocabulary are then taken",
        )
