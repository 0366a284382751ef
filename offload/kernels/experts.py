"""Mixtures of experts by torch's operators (docs/design.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.config.networks import Experts, FeedForward
from offload.formats.stored import StoredMatrix
from offload.kernels.activation import activated, gated
from offload.kernels.exponentials import sigmoid
from offload.kernels.norms import NormWeights

Matrix = Tensor | StoredMatrix
Multiply = Callable[[Tensor, Matrix, Tensor | None], Tensor]


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of one expert. up, and gate if it has one: [size, hidden]. down: [hidden, size]. gate_up_bias: of
    both, [2 * size], or of up alone. down_bias: [hidden]; None, too, on ranks but the first."""

    gate: Matrix | None
    up: Matrix
    down: Matrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def has_integers(self) -> bool:
        """Whether products with all matrices can be in fixed point, see `Encoding.has_integers`."""
        matrices = [each for each in (self.gate, self.up, self.down) if each is not None]
        return all(isinstance(each, StoredMatrix) and each.encoding.has_integers for each in matrices)


@dataclass(frozen=True)
class Router:
    """The weights of a router. matrix: fp32 [scores, hidden], the experts' rows, then that of the gate of the network
    beside them. bias, scale: of each expert, fp32 [experts]. norm: of the rows that are scored; None: the experts'."""

    matrix: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    norm: NormWeights | None = None


@dataclass(frozen=True)
class Mixture:
    """A layer's mixture of experts without the experts' weights. norm: of the rows that the experts read; None: they
    are normed already."""

    experts: Experts
    router: Router
    norm: NormWeights | None = None

    def normed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that the experts read and those that are scored, [T, hidden] each."""
        read = rows if self.norm is None else self.norm(rows)
        return read, read if self.router.norm is None else self.router.norm(rows)


@dataclass(frozen=True)
class Bank:
    """Places for experts on a device, with what is in each of them. content: all of their bytes, uint8 [places, step],
    contiguous."""

    places: Sequence[ExpertWeights]
    content: Tensor

    @property
    def step(self) -> int:
        """Bytes from a place to the next one."""
        return self.content.shape[1]


@dataclass(frozen=True)
class Batch:
    """Experts of a layer in a bank. places: int32 [experts] on the bank's device, the place of each of the layer's
    experts, or -1 for one that is not in the batch."""

    bank: Bank
    places: Tensor


class Room:
    """Memory on a device that the layers of a model use in turns: graphs of their passes would else own some for each
    layer. is_lent: whether it is a prefill's alone, which needs it for what experts make of its rows."""

    is_lent = False

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor, with any numbers: the same one for the same name, shape and dtype."""
        key = name, shape, dtype
        if key not in self._tensors:
            self._tensors[key] = torch.empty(shape, dtype=dtype, device=device)
        return self._tensors[key]


class ExpertHomes(Protocol):
    """The experts of one layer, wherever they are. bank: where most of their batches are. whole: the one batch that all
    experts are always in, None where there is none. room: for what the host works with once it knows which experts were
    chosen; None where it need not know. on_host: whether batches may be in host memory, where the CPU runs them."""

    @property
    def bank(self) -> Bank: ...

    @property
    def whole(self) -> Batch | None: ...

    @property
    def room(self) -> Room | None: ...

    @property
    def on_host(self) -> bool: ...

    def ahead(self, then: ExpertHomes | None = None, *, is_last: bool = True, busy: int = 0) -> None:
        """Begin to fetch experts before their router has chosen, as far as there is room for them. A layer whose rows
        want nearly all of them calls it before its attention. then: the next layer's, which may be fetched to shared
        slots that these do not need; is_last: none of which they need after the coming rows. busy: shared slots that
        others need."""
        ...

    def batches(self, chosen: Tensor) -> Iterator[Batch]:
        """The experts `chosen`, any integers [...], each in one of several batches, in the device's bank or in one in
        host memory, where the CPU runs them. A batch is in its places until the next one is asked for. The number of
        all experts among the chosen ones stands for none."""
        ...


class OnHost(Protocol):
    """The runner of experts in host memory for a device. chosen: the experts of each row, on the host."""

    chosen: Tensor

    def run(self, experts: Experts, batch: Batch, made: Tensor) -> None:
        """Fill the rows of `made`, [T * used, outputs] on the device, of the pairs whose experts are in the batch."""
        ...


class RunExperts(Protocol):
    """A mixture of experts over rows [T, hidden], which are not normed yet: their output [T, hidden]. A row's experts
    are chosen in fp32, what each makes of it is rounded to the dtype, and their weighted sum is rounded once, in the
    order in which they were chosen. beside: the output of the network beside them, [T, hidden], of which the rows are
    multiplied by the sigmoid of their gate, if there is one, and added; factors of sums follow (`Experts.factors`);
    each step is rounded. real: which rows are not
    padding, bool [T]; padding runs through no expert, so that none is fetched or read for it, and its output is any
    number. None: all are. latents: rows [T, latent] that the experts read in place of the normed ones; the output is
    then [T, latent], and nothing is beside it."""

    def __call__(
        self,
        mixture: Mixture,
        homes: ExpertHomes,
        rows: Tensor,
        beside: Tensor | None = None,
        real: Tensor | None = None,
        latents: Tensor | None = None,
    ) -> Tensor: ...


def chosen(
    experts: Experts,
    scores: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The experts of rows with scores [T, experts] fp32, int64 [T, used], the first rank first and the first expert of
    equal ones; and their weights, fp32 [T, used]. bias, scale: see `Router`. dtype: of the rows.

    transformers' topk breaks ties in an order of its own.
    """
    if experts.bias == "scores":
        assert bias is not None
        scores, bias = scores + bias, None
    if experts.rounded != "none":
        scores = scores.to(dtype).float()
    scores = scores if experts.score_cap is None else _capped(scores, experts.score_cap)
    shares, whole = _shares(experts, scores)
    if experts.rounded == "shares":
        shares = shares.to(dtype).float()
    by_scores = experts.ranks_scores or not (experts.scoring == "sigmoid" or experts.needs_softmax)
    ranks = scores if by_scores else shares
    ranks = ranks if bias is None else ranks + bias
    if experts.groups > 1:
        ranks = ranks.masked_fill(~_opened(experts, ranks), -torch.inf)
    found = ranks.sort(dim=1, descending=True, stable=True)[1][:, : experts.used]
    weights = shares.gather(1, found)
    total = _divisor(experts, weights.sum(1, keepdim=True)) if experts.renormalised else whole
    weights = (weights if total is None else weights / total) * experts.factors[0]
    return found, weights if scale is None else weights * scale[found]


def _capped(scores: Tensor, cap: float) -> Tensor:
    """c tanh(score / c), by `exponentials.sigmoid`."""
    return (2 * sigmoid(2 * scores / cap) - 1) * cap


def _shares(experts: Experts, scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """Shares [T, experts], and what they are still to be divided by, [T, 1], or None."""
    if experts.scoring == "sigmoid":
        return sigmoid(scores), None
    powers = (scores - scores.amax(1, keepdim=True)).exp()
    whole = powers.sum(1, keepdim=True)
    return (powers / whole, None) if experts.needs_softmax else (powers, whole)


def _opened(experts: Experts, ranks: Tensor) -> Tensor:
    """Which experts are of a group in use, the first group of equal ones, bool [T, experts]."""
    sums = ranks.unflatten(1, (experts.groups, -1)).topk(experts.group_best, 2)[0].sum(2)
    found = sums.sort(dim=1, descending=True, stable=True)[1][:, : experts.groups_used]
    groups = torch.zeros_like(sums, dtype=torch.bool).scatter(1, found, value=True)
    return groups.repeat_interleave(experts.count // experts.groups, 1)


def _divisor(experts: Experts, total: Tensor) -> Tensor:
    """The divisor of shares in use, whose sum is `total`."""
    if experts.scoring == "softmax" and not experts.needs_softmax:
        return total
    return total.clamp_min(experts.eps) if experts.floored else total + experts.eps


def run_experts(
    mixture: Mixture,
    homes: ExpertHomes,
    rows: Tensor,
    beside: Tensor | None = None,
    real: Tensor | None = None,
    latents: Tensor | None = None,
    *,
    multiply: Multiply,
    blocks: Sequence[int] | None = None,
    host_rows: Callable[[Tensor, Tensor], OnHost] | None = None,
) -> Tensor:
    """See `RunExperts`. multiply: a product with a matrix, transposed, plus a bias. host_rows: makes what runs batches
    in host memory (`experts_host.HostRows`), where the rows are elsewhere. blocks: rows of the successive
    blocks, equal ones, in which every product runs, so that a row's bits do not depend on T; None: all rows of an
    expert at once."""
    experts, router = mixture.experts, mixture.router
    read, scored = mixture.normed(rows)
    read = read if latents is None else latents
    parts = [scored] if blocks is None else scored.split(list(blocks))
    scores = torch.cat([part.float() @ router.matrix.T for part in parts]) * experts.score_scale
    of_experts, (_, of_sum, of_both) = scores[:, : experts.count], experts.factors
    found, shares = chosen(experts, of_experts, router.bias, router.scale, dtype=scored.dtype)
    if real is not None:
        found = found.where(real[:, None], experts.count)
    made = rows.new_zeros(*found.shape, read.shape[1])
    on_host = host_rows(read, found) if host_rows is not None and homes.on_host else None
    for batch in homes.batches(found if on_host is None else on_host.chosen):
        if on_host is not None and batch.bank.content.device != rows.device:
            on_host.run(experts, batch, made.flatten(0, 1))
            continue
        for expert, at in enumerate(batch.places.tolist()):
            if at < 0:
                continue
            row, place = (found == expert).nonzero(as_tuple=True)
            if not len(row):
                continue
            weights, own = batch.bank.places[at], read[row]
            block = len(own) if blocks is None else blocks[0]
            filled = pad(own, (0, 0, 0, -len(own) % block))
            through = [_through(experts.network, weights, multiply, part) for part in filled.split(block)]
            made[row, place] = torch.cat(through)[: len(own)]
    total = (made.float() * shares.unsqueeze(2)).sum(1).to(rows.dtype) * of_sum
    if beside is None:
        return total
    if experts.gates_network:
        beside = beside * sigmoid(scores[:, experts.count :].to(rows.dtype).float()).to(rows.dtype)
    return (total + beside) * of_both


def _through(network: FeedForward, weights: ExpertWeights, multiply: Multiply, rows: Tensor) -> Tensor:
    """The output [n, hidden] of one expert for normed rows [n, hidden]."""
    bias = weights.gate_up_bias
    if weights.gate is None:
        inner = activated(multiply(rows, weights.up, bias), network.activation)
    else:
        of_gate, of_up = (None, None) if bias is None else bias.chunk(2)
        both = [multiply(rows, weights.gate, of_gate), multiply(rows, weights.up, of_up)]
        inner = gated(torch.cat(both, 1), network.activation)
    return multiply(inner, weights.down, weights.down_bias)
