"""Layers run by torch's operators over any number of rows on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from offload.config.block import Block
from offload.config.mixers import LOW_RANK_PARTS, Latent
from offload.config.model import ModelConfig
from offload.kernels.activation import activated
from offload.kernels.device import DeviceKernels
from offload.kernels.experts import ExpertHomes, RunExperts, run_experts
from offload.kernels.experts_host import HostRows
from offload.kernels.norms import NormWeights, add_normed, normed_heads
from offload.model.heads import gated_heads, index_rows, normed_over_ranks, norms_over_ranks
from offload.model.latent import in_halves, values_of
from offload.model.layer import (
    Add,
    AddNGrams,
    Attend,
    Gate,
    Inject,
    Join,
    LayerStep,
    Mean,
    Mix,
    MixRows,
    Operand,
    Product,
    Recur,
    reads,
    steps_of,
    takes_input,
)
from offload.model.ngrams import add_ngrams
from offload.model.streams import mean_of
from offload.model.sums import Due, OneRank, Sums, dues_of
from offload.speed.routing import wants_nearly_all
from offload.weights.layout import LayerWeights
from offload.weights.linear import Linear, by_heads, product


@dataclass
class _Block:
    """A block of a prefill's rows x [n, hidden], from row `first` on, with its operands between two parts of the work
    on it."""

    first: int
    x: Tensor
    operands: dict[Operand, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.operands = {"x": self.x}


class TorchLayers:
    """Executor of layers' steps by torch's operators and the device's kernels of single steps. The list of steps
    is made once for each set of weights, whose addresses do not change: streamed weights use a few staging buffers."""

    def __init__(
        self,
        config: ModelConfig,
        sums: Sums,
        kernels: DeviceKernels,
        experts: Sequence[ExpertHomes | None],
        run_experts: RunExperts | None,
    ) -> None:
        """experts: of each layer. run_experts: None for torch's operators."""
        self._config, self._sums, self._kernels = config, sums, kernels
        self._experts, self._run_experts = experts, run_experts
        self._steps: dict[tuple[int, int], tuple[LayerWeights, list[LayerStep]]] = {}  # by weights and block

    def run(
        self,
        layer: int,
        weights: LayerWeights,
        x: Tensor,
        caches: MixRows,
        blocks: Sequence[int] | None = None,
        real: Tensor | None = None,
        given: Tensor | None = None,
    ) -> None:
        """Run a layer on x [T, hidden], in place. blocks: numbers of rows of the successive blocks, T in all, in which
        every matrix product runs, so that a row's bits do not depend on T; None: all rows at once. real: which rows are
        not padding, for experts, see `RunExperts`. given: the layer's input [T, size], if it has one."""
        operands: dict[Operand, Tensor] = {"x": x}
        for step in self._steps_of(layer, weights):
            self._run(layer, step, operands, caches, blocks, real, given)

    def run_blocks(
        self,
        layer: int,
        weights: LayerWeights,
        x: Tensor,
        caches: MixRows,
        block: int,
        given: Callable[[int, Tensor], Tensor | None],
        *,
        is_last: bool = False,
    ) -> Iterator[int]:
        """Run a layer on a prefill's rows x [T, hidden], in place, `block` rows at a time, but its experts over all of
        them where kernels run these. Yields how many rows are done after each part of the work, where a prefill may be
        left: a block's steps up to the experts, and those behind them. given: the layer's input of a block [n, hidden]
        by its first row. is_last: whether the next rows are those of the next layer."""
        own, steps, done = self._config.blocks[layer], self._steps_of(layer, weights), 0
        blocks = [_Block(first, rows) for first, rows in zip(range(0, len(x), block), x.split(block), strict=True)]
        last, mixer = steps, list[Due]()
        together = self._run_experts is not None and own.experts is not None and len(blocks) > 1
        self._ahead(layer, x if together else blocks[0].x, is_last=is_last and (together or len(blocks) == 1))
        if together:
            at = next(number for number, step in enumerate(steps) if isinstance(step, Mix))
            first, mix, last = steps[:at], steps[at], steps[at + 1 :]
            assert isinstance(mix, Mix)
            held = {name for step in steps[at:] for name in reads(step)}
            for each in blocks:
                mixer = [] if own.side_by_side else self._dues(own, each)[0]
                with self._sums.due(mixer, x):
                    self._run_steps(layer, first, each, caches, given)
                each.operands = {name: rows for name, rows in each.operands.items() if name in held}
                yield done
            self._mix_blocks(layer, mix, x, blocks)
        for each in blocks:
            due = [part for parts in self._dues(own, each) for part in parts]
            with self._sums.due(due[len(mixer) :], x):
                self._run_steps(layer, last, each, caches, given)
            each.operands.clear()
            done += len(each.x)
            yield done

    def _ahead(self, layer: int, x: Tensor, *, is_last: bool) -> None:
        """Begin to fetch a layer's experts before its router chooses them, where rows x want nearly all, and then those
        of the next layer that has some. is_last: see `ExpertHomes.ahead`."""
        experts, homes = self._config.blocks[layer].experts, self._experts[layer]
        if experts is not None and homes is not None and wants_nearly_all(experts, len(x)):
            homes.ahead(next(filter(None, self._experts[layer + 1 :]), None), is_last=is_last)

    def _dues(self, own: Block, block: _Block) -> tuple[list[Due], list[Due]]:
        squares = norms_over_ranks(self._config, self._sums)
        return dues_of(own, len(block.x), self._config.hidden_size, squares=squares)

    def _run_steps(
        self,
        layer: int,
        steps: Sequence[LayerStep],
        block: _Block,
        caches: MixRows,
        given: Callable[[int, Tensor], Tensor | None],
    ) -> None:
        found = given(block.first, block.x) if any(map(takes_input, steps)) else None
        for step in steps:
            self._run(layer, step, block.operands, caches, given=found)

    def _mix_blocks(self, layer: int, step: Mix, x: Tensor, blocks: Sequence[_Block]) -> None:
        """Run a mixture over the rows of all blocks, x."""
        joined: dict[Operand, Tensor] = {"x": x}
        for name in reads(step) - {"x"}:
            joined[name] = torch.cat([each.operands.pop(name) for each in blocks])
        made = self._mixed(layer, step, joined, None, None)
        for each in blocks:
            each.operands[step.out] = made[each.first : each.first + len(each.x)]

    def _run(
        self,
        layer: int,
        step: LayerStep,
        operands: dict[Operand, Tensor],
        caches: MixRows,
        blocks: Sequence[int] | None = None,
        real: Tensor | None = None,
        given: Tensor | None = None,
    ) -> None:
        """Run a step of a layer, see `run`."""
        x = operands["x"]
        match step:
            case Product():
                self._multiply(step, operands, blocks)
            case Attend():
                attend = partial(caches.attend, layer)
                if step.attention.latent is None:
                    operands["mixed"] = self._attended(layer, step, operands["qkv"], caches, real)
                else:
                    operands["mixed"] = _latent(step, step.attention.latent, operands["qkv"], attend, blocks)
            case Recur():
                rows = _widened(step, operands[step.read], blocks)
                operands[step.out] = caches.recur(layer, rows, step.weights)
            case Mix():
                operands[step.out] = self._mixed(layer, step, operands, blocks, real)
            case Join():
                operands["made"] = step(operands["made"], operands["beside"], self._sums)
            case Add():
                part = operands[step.read]
                add_normed(x, part if step.is_whole else self._sums.total(part), step.norm, step.factor)
            case Mean():
                multiply = partial(_by_block, blocks)
                operands["read"], operands["factors"] = mean_of(x, step.weights, multiply, self._kernels.streams)
            case Inject():
                part = operands[step.part]
                part = part if step.is_whole else self._sums.total(part)
                self._kernels.streams.inject(x, part, operands["factors"])
            case AddNGrams():
                assert given is not None
                convolve = partial(caches.convolve, layer, weights=step.weights.convolution)
                add_ngrams(x, step, given, partial(_by_block, blocks), convolve)
            case Gate():
                assert given is not None
                operands["gated"] = operands["gated"] * given
            case _:
                x *= step.factor

    def multiply(
        self, x: Tensor, linear: Linear, norm: NormWeights | None = None, blocks: Sequence[int] | None = None
    ) -> Tensor:
        """The product of a matrix outside layers, such as the head, with x [n, inputs] -> [n, outputs]. norm: of x
        before it. blocks: as in `run`."""
        return _by_block(blocks, x, lambda rows: linear(rows if norm is None else norm(rows)))

    def _steps_of(self, layer: int, weights: LayerWeights) -> list[LayerStep]:
        block = self._config.blocks[layer]
        key = id(weights), id(block)
        if key not in self._steps:
            self._steps[key] = weights, steps_of(block, weights, alone=isinstance(self._sums, OneRank))
        return self._steps[key][1]

    def _multiply(self, step: Product, operands: dict[Operand, Tensor], blocks: Sequence[int] | None) -> None:
        made = _by_block(blocks, operands[step.read], partial(self._product, step))
        if step.ending == "add":
            add_normed(operands[step.out], made, None, step.factor)
        else:
            operands[step.out] = made

    def _product(self, step: Product, rows: Tensor) -> Tensor:
        """The step's product over rows [n, inputs] with its ending, except for "add"."""
        made = step.linear(rows if step.norm is None else step.norm(rows))
        if step.ending == "gate":
            return self._kernels.gated(made, step.activation)
        return activated(made, step.activation) if step.ending == "activate" else made

    def _mixed(
        self,
        layer: int,
        step: Mix,
        operands: dict[Operand, Tensor],
        blocks: Sequence[int] | None,
        real: Tensor | None,
    ) -> Tensor:
        """The output of a mixture of experts for the rows of x, or for their latents."""
        homes, x = self._experts[layer], operands[step.read]
        assert homes is not None
        beside = operands["beside"] if step.adds else None
        latents = operands["latent"] if step.mixture.experts.latent else None
        run = self._run_experts or partial(run_experts, multiply=product, blocks=blocks, host_rows=HostRows)
        return run(step.mixture, homes, x, beside, real, latents)

    def _attended(self, layer: int, step: Attend, qkv: Tensor, caches: MixRows, real: Tensor | None) -> Tensor:
        """The attention's output: qkv [T, outputs] -> [T, H * D]."""
        own, weights = step.attention, step.weights
        q, *others = qkv.split(own.parts, 1)
        attend = partial(caches.attend, layer)
        if own.indexer is not None:
            key, queries = others.pop(), others.pop()
            index = index_rows(own.indexer, weights, queries, key, real)
            attend = partial(caches.attend_chosen, layer, index=index)
        size = 0 if own.norms_whole else own.head_dim
        if own.shares:
            heads, none = [normed_heads(q, weights.q_norm, size)], [None, None]
        else:
            k = others.pop(0)
            v = normed_heads(k if own.values_are_keys else others.pop(0), weights.v_norm, own.head_dim)
            if norms_over_ranks(self._config, self._sums):
                q, k = normed_over_ranks(q, k, weights, self._sums)
            else:
                q, k = normed_heads(q, weights.q_norm, size), normed_heads(k, weights.k_norm, size)
            heads, none = [q, k, v], []
        attended = attend(*(rows.unflatten(1, (-1, own.head_dim)) for rows in heads), *none)
        return gated_heads(own, attended, others[0]) if own.gate else attended


def _latent(
    step: Attend,
    latent: Latent,
    qkv: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    blocks: Sequence[int] | None,
) -> Tensor:
    """The output of latent attention: qkv [T, outputs] -> [T, H * value_dim]."""
    queries, row, *gate = qkv.split(step.attention.parts, 1)
    weights, rotated = step.weights, (latent.rotated,)
    assert weights.k_norm is not None
    assert weights.k_b is not None
    assert weights.v_b is not None
    if (q_norm := weights.q_norm) is not None and (q_b := weights.q_b) is not None:
        queries = _by_block(blocks, queries, lambda rows: q_b(q_norm(rows)))
    plain, others = queries.unflatten(1, (step.attention.num_heads, -1)).split((latent.plain, *rotated), 2)
    low, key = row.split((latent.rank, *rotated), 1)
    q = in_halves(others, _by_block(blocks, plain, partial(by_heads, weight=weights.k_b.weight)))
    held = in_halves(key, weights.k_norm(low))[:, None]
    values = values_of(attend(q, held, held), latent).flatten(2)
    attended = _by_block(blocks, values, partial(by_heads, weight=weights.v_b.weight)).flatten(1)
    return gated_heads(step.attention, attended, gate[0]) if gate else attended


def _widened(step: Recur, rows: Tensor, blocks: Sequence[int] | None) -> Tensor:
    """Projected rows [T, sum(parts)] -> [T, sum(row_parts)], with gates and times in place of the numbers that they are
    products with."""
    if step.low_rank is None:
        return rows
    parts = list(rows.split(step.recurrence.parts, 1))
    for part, linear in zip(LOW_RANK_PARTS, step.low_rank, strict=True):
        parts[part] = _by_block(blocks, parts[part].contiguous(), linear)
    return torch.cat(parts, 1)


def _by_block(blocks: Sequence[int] | None, x: Tensor, operator: Callable[[Tensor], Tensor]) -> Tensor:
    """`operator` over x in blocks of the given numbers of rows."""
    if blocks is None or len(blocks) == 1:
        return operator(x)
    return torch.cat([operator(part) for part in x.split(list(blocks))])
