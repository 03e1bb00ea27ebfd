"""Random weights of a model that is there already, ours or vLLM's, so that both sides multiply numbers alike.

What a product costs depends on its numbers: a chip at its limit of power runs slower, and it takes less of it where
rows are equal. vLLM's own dummy weights make almost all rows of a drafting step equal: with gains near 0 no layer adds
anything that bf16 keeps, so a row is the embedding of its token, and a drafter's rows are all of one token, the mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

Weights = Literal["normal", "dummy"]
WEIGHTS: tuple[Weights, ...] = ("normal", "dummy")
_EMBEDDING_SCALE = 0.05  # small enough that a tied head does not repeat the last token for ever
_GAIN = 1.25  # of a product: texts wander, and rounding is not blown up from layer to layer
_DUMMY_SCALE, _DUMMY_SEED = 1e-3, 1234


def fill(model: nn.Module | Any, seed: int, weights: Weights = "normal") -> None:
    """Overwrite every parameter.

    Args:
        model: any module; tables are known by "embed" in their names, biases by their ending.
        seed: of all matrices together; not used by "dummy".
        weights: "normal" takes matrices that keep the size of what they multiply, gains of 1 and biases of 0. "dummy"
            is what vLLM's `load_format="dummy"` does: each parameter, gains too, evenly between -0.001 and 0.001, from
            the same seed.
    """
    import torch

    with torch.no_grad():
        generator: torch.Generator | None = None
        for name, parameter in model.named_parameters():
            if generator is None:
                generator = torch.Generator(device=parameter.device).manual_seed(seed)
            if weights == "dummy":
                parameter.uniform_(-_DUMMY_SCALE, _DUMMY_SCALE, generator=generator.manual_seed(_DUMMY_SEED))
            elif parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                is_table = "embed" in name
                scale = _EMBEDDING_SCALE if is_table else _GAIN * parameter.shape[1] ** -0.5
                parameter.normal_(0.0, scale, generator=generator)
