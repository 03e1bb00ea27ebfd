"""What the layers of a hybrid target ask of whoever runs them, beyond `Attend`.

A Kimi layer has one of two kinds of attention, and neither is a softmax over keys and values per head:

* Latent attention caches one row per token, [normed latent; shared key], from which every head's keys and values
  follow. The caller stores rows and decides how scores are formed: explicitly, by expanding every row into keys and
  values (cheaper over a whole sequence), or absorbed, by folding the expansion into queries and outputs (cheaper over a
  cache). Both are the same function; they round differently.
* Delta attention caches a matrix per head and the last rows before a short convolution. The caller keeps both, and says
  from which state a row starts. Where rows may be rejected, it runs them on the kept state without changing it, records
  what each row would add, and replays the accepted rows afterwards.

The layer computes projections, gates and norms, which know nothing of any cache. Three callers exist or will:

    over whole sequences       `attends.WholeSequence`       explicit, chunked recurrence from zero; nothing is kept
    the same, row-invariant    `sequence_attend`             absorbed, recurrence row by row, for comparisons of bits
    step by step               `stepwise.StepwiseContext`    contiguous rows and states, records, `commit`
    the engine's               paged rows, states by slot: `rows_BTX` go into its planes, `rows_BTC` into its records

Order within one pass of the last two, per layer: `latent` stores the pass's own rows, then attends; `delta` convolves
with the kept history, records its inputs, then runs the recurrence from the kept state. States, histories and lengths
change once per pass, at commit, by as many rows as were accepted; all rows is what a prompt or a plain step commits.
A place that changes hands is emptied first: unlike keys past a length, a state that was left behind is read.

B requests, T rows of the pass, N heads, Q width of a query (its own channels, then those of the shared key), X width of
a cached row, R its latent part, P own channels of a query, V value channels, C convolved channels, K key channels, W
taps of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from paceline.models.layers import Attend, LinearMode
from paceline.ops.causal_convolution import causal_convolution
from paceline.ops.delta_attention import DeltaGate, DeltaInputs
from paceline.ops.multi_head_latent_attention import absorb_queries, expand_values


@dataclass(frozen=True)
class LatentHeads:
    """How every head reads latent rows.

    Attributes:
        key_NPR: each head's key matrix; a head's key is [key latent; shared key].
        value_NVR: each head's value matrix.
        scale: of scores, in both forms.
        mode: arithmetic of the products.
    """

    key_NPR: Tensor
    value_NVR: Tensor
    scale: float
    mode: LinearMode

    @property
    def latent_size(self) -> int:
        """R, the part of a row that values come from."""
        return self.key_NPR.shape[-1]

    def absorb(self, q_BTNQ: Tensor) -> Tensor:
        """Queries that meet cached rows as they are, [B, T, N, X]."""
        return absorb_queries(q_BTNQ, self.key_NPR, mode=self._mode)

    def expand(self, mixed_BTNR: Tensor) -> Tensor:
        """Values from mixtures of latents, [B, T, N, V]."""
        return expand_values(mixed_BTNR, self.value_NVR, mode=self._mode)

    @property
    def _mode(self) -> LinearMode:
        return "row_invariant" if self.mode == "row_invariant" else "plain"


class DeltaProjections(NamedTuple):
    """What delta attention reads of each row: projections before the convolution, and logits of its gates."""

    rows_BTC: Tensor  # queries, keys and values, end to end
    forget_BTNK: Tensor
    beta_BTN: Tensor


class DeltaWeights(NamedTuple):
    """A layer's convolution and gate, all float32."""

    convolution_CW: Tensor
    gate: DeltaGate

    @property
    def num_heads(self) -> int:
        """N."""
        return self.gate.a_log_N.shape[0]


@runtime_checkable
class HybridAttend(Attend, Protocol):
    """`Attend`, and the two kinds of attention of a hybrid target; `layer` counts decoder layers of either kind."""

    def latent(self, layer: int, q_BTNQ: Tensor, rows_BTX: Tensor, heads: LatentHeads) -> Tensor:
        """Store the pass's rows and attend over them and what is cached before them.

        Args:
            layer: 0-based decoder layer.
            q_BTNQ: queries, neither scaled nor absorbed.
            rows_BTX: rows to cache.
            heads: matrices and scale.
        Returns:
            [B, T, N, V], row t from the rows up to its own.
        """
        ...

    def delta(self, layer: int, rows: DeltaProjections, weights: DeltaWeights) -> Tensor:
        """Run the convolution and the recurrence from what is kept before the pass.

        Args:
            layer: 0-based decoder layer.
            rows: of the pass.
            weights: of the layer.
        Returns:
            [B, T, N, K], the state's answer to each row's query, before norm and gate.
        """
        ...


def convolve(
    rows: DeltaProjections, weights: DeltaWeights, histories_SHC: Tensor | None = None, slots_B: Tensor | None = None
) -> DeltaInputs:
    """The short convolution of a pass, and its result as the recurrence takes it.

    Args:
        rows: of the pass.
        weights: of the layer.
        histories_SHC: rows before the pass, by slot or by request; None for zeros.
        slots_B: which history is whose; None: in order.
    """
    mixed_BTC = causal_convolution(rows.rows_BTC, weights.convolution_CW, histories_SHC, slots_B)
    q, k, v = mixed_BTC.unflatten(-1, (3, weights.num_heads, -1)).unbind(-3)
    return DeltaInputs(q, k, v, rows.forget_BTNK, rows.beta_BTN)
