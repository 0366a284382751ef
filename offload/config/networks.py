"""Networks of a layer, as they follow from a config: a feed-forward network and a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# gelu_tanh: GELU by its approximation with tanh. clamped_silu: gpt-oss's, of a gate alone (kernels/activation.py).
Activation = Literal["silu", "gelu_tanh", "relu_squared", "clamped_silu"]
CLAMPED_SLOPE, CLAMPED_LIMIT = 1.702, 7.0  # of clamped_silu
Scoring = Literal["softmax", "sigmoid"]
RouterBias = Literal["none", "scores", "ranks"]
Rounded = Literal["none", "scores", "shares"]
MOST_GROUPS = 64  # of experts


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward network. size: of its inner rows; 0 where a layer has none. gated:
    down(activation(gate) * up), else down(activation(up))."""

    size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `count` feed-forward networks like `network`, of which each row runs through the `used`
    ones that its router ranks first, and of equal ones through the first. Its output is the sum of theirs, each times
    its weight.

    A row's scores are products with the router's rows, times `score_scale`; scoring: an expert's share is the softmax
    over all scores, or the sigmoid of its own. score_cap: of scores, as `Attention.cap`. Experts are ranked by shares,
    or if `ranks_scores` by scores. bias: each expert has a number that is added to its score, or to its rank alone.
    groups: of neighbouring experts, of which those with the largest sums of their `group_best` largest ranks,
    `groups_used`, have the experts in use.

    A weight is a share: divided by the sum of those in use if `renormalised`, to which `eps` is added, or which is
    `eps` or more if `floored`; multiplied by `factor`, unless that multiplies the sum over experts (`scales_sum`), and
    by the expert's own factor if `scaled`. The sum of a softmax's largest shares is never small, and has no eps.
    rounded: scores, or scores and shares, are rounded to the dtype of the rows. gates_network: a further score, whose
    sigmoid multiplies the output of the network beside the experts. averaged: of both outputs the mean is taken.

    latent: if not 0, the experts read rows of so many numbers, which a matrix of the layer makes of its rows, and
    another matrix makes the layer's rows of their sum."""

    network: FeedForward
    count: int
    used: int
    renormalised: bool = True
    scoring: Scoring = "softmax"
    score_scale: float = 1.0
    score_cap: float | None = None
    factor: float = 1.0
    scaled: bool = False
    bias: RouterBias = "none"
    gates_network: bool = False
    ranks_scores: bool = False
    groups: int = 1
    groups_used: int = 1
    group_best: int = 2
    eps: float = 1e-20
    floored: bool = False
    scales_sum: bool = False
    rounded: Rounded = "none"
    averaged: bool = False
    latent: int = 0

    def row_size(self, hidden_size: int) -> int:
        """Numbers of the rows that experts read and make."""
        return self.latent or hidden_size

    @property
    def num_scores(self) -> int:
        """Rows of the router's matrix: the experts' and the gate's."""
        return self.count + self.gates_network

    @property
    def needs_softmax(self) -> bool:
        """Whether a softmax is worked out before experts are ranked. Else its exponents rank them as well."""
        return self.scoring == "softmax" and (self.bias == "ranks" or self.groups > 1 or self.rounded == "shares")

    @property
    def factors(self) -> tuple[float, float, float]:
        """The factors of weights, of their sum, and of that plus the output of the network beside the experts."""
        of_sum = (1.0, self.factor) if self.scales_sum else (self.factor, 1.0)
        return (*of_sum, 0.5 if self.averaged else 1.0)
