"""The decoder: rows in, hidden rows out, layer by layer, in a pass or in a prefill.

It reads a model's description (config/model) and no family's name. Rows of several sequences are packed, not padded:
whatever works on rows works on all of them together, attention works sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, rms_norm, silu

from offload.config.block import Attention, Block
from offload.config.model import ModelConfig
from offload.interrupts import poll
from offload.kernels.cpu import FEW_ROWS, CpuKernels
from offload.kernels.device import NONE, NoKernels
from offload.kernels.norms import NormWeights, add_normed, normed_heads
from offload.kv import Cache
from offload.model.few_rows import FewRows, normed_over_ranks, norms_over_ranks
from offload.model.shared_blocks import SharedBlocks
from offload.model.sums import Due, OneRank, Sums
from offload.transfer.hidden_rows import HiddenRows
from offload.weights.embedding import Embedding
from offload.weights.layers import ResidentLayers, Weights
from offload.weights.layout import LayerWeights

# Called with a block's first row and the block [n, hidden], as the last layer left it; it is written to afterwards.
OnHidden = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Segment:
    """New tokens of one sequence, int64 [n], and the cache that takes them in."""

    cache: Cache
    tokens: Tensor


class Decoder:
    """The layer loop. Knows no concrete cache and no sampling.

    config, weights: of the model, or of the shard of it that this rank runs. sums: over the ranks that have the others.
    kernels: the CPU's, for few rows; without them torch's operators run.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, sums: Sums | None = None, kernels: CpuKernels | NoKernels = NONE
    ) -> None:
        self.config, self.weights, self._sums, self._kernels = config, weights, sums or OneRank(), kernels
        scale, dtype = config.embedding_scale, weights.embedding.dtype
        self._embedding_scale = torch.tensor(scale, dtype=dtype).item() if config.rounds_embedding_scale else scale
        self._idle: list[FewRows] = []  # a pass takes one, and another one where it runs in the middle of a pass

    def over(self, weights: Weights) -> Decoder:
        """The same model over other weights."""
        return Decoder(self.config, weights, self._sums, self._kernels)

    def without_layers(self) -> Decoder:
        """What makes logits of hidden rows, and keeps nothing else of the weights. On rank 0, which has the head."""
        nothing = Embedding(torch.empty(0), self.device, self.weights.embedding.dtype)
        weights = replace(self.weights, embedding=nothing, layers=ResidentLayers((), 0), rotated=())
        return Decoder(self.config, weights, None, self._kernels)

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def stays_in_place(self) -> bool:
        """True on a GPU where all that a pass uses is there, at addresses that do not change, and on no other."""
        alone = isinstance(self.weights.layers, ResidentLayers) and isinstance(self._sums, OneRank)
        return self.device.type == "cuda" and alone and not self.weights.embedding.waits

    @property
    def streams(self) -> bool:
        """Whether weights cross a link in a pass: then one pass at a time can be under way."""
        return not isinstance(self.weights.layers, ResidentLayers)

    @property
    def takes_any_rows(self) -> bool:
        """True where every number of rows is as good as its neighbours, up to FEW_ROWS."""
        return self._kernels.usable

    def forward(
        self,
        segments: Sequence[Segment],
        *,
        blocks: Sequence[int] | None = None,
        shared: SharedBlocks | None = None,
    ) -> Tensor:
        """Run the segments' tokens through all layers, filling their caches -> hidden rows [T, hidden], model dtype.

        The caller has begun the forward on each cache and advances it afterwards. Every layer's weights are used once.
        blocks: every matrix product sees exactly these numbers of rows, one after the other (`T` is their sum), so that
        a row's bits do not depend on how many others there are; None: all at once. shared: those of several segments,
        whose rows come out in its order. With several ranks it ends on all of them.
        """
        tokens = segments[0].tokens if len(segments) == 1 else torch.cat([each.tokens for each in segments])
        if shared is not None:
            tokens, blocks = shared.joined(tokens), shared.sizes
        if blocks is not None and len(tokens) != sum(blocks):
            raise ValueError(f"{len(tokens)} rows are not blocks of {blocks}")
        if self.takes_any_rows and (blocks is not None or len(tokens) <= FEW_ROWS):
            with self._few_rows() as few:
                return self._forward_few(few, tokens, segments)
        x = self._embedded(tokens)
        with self._due(x, self.config.num_layers):
            for layer, weights in enumerate(self.weights.layers):
                self._layer(layer, weights, x, segments, blocks, shared)
        return x

    def prefill(
        self,
        segment: Segment,
        rows: HiddenRows,
        *,
        on_rows: Callable[[int], None] = lambda num_rows: None,
        on_hidden: OnHidden | None = None,
    ) -> None:
        """The same of one segment in phase "prefill", in the blocks of `rows`, so that a layer's intermediates stay
        small. Nothing comes out but what `rows` keep, and what `on_hidden` makes of each block after the last layer.

        `on_rows` is called with each block's number of rows after each layer. With several ranks a prefill can be
        broken off between two blocks. Peak memory: one block's intermediates besides `rows`.
        """
        rows.begin(len(segment.tokens))
        for layer, weights in enumerate(self.weights.layers):
            for start, x in rows.blocks(layer):
                if layer == 0:
                    self._embedded(segment.tokens[start : start + len(x)], x)
                with self._due(x, 1):
                    self._layer(layer, weights, x, [segment])
                if on_hidden is not None and layer == self.config.num_layers - 1:
                    on_hidden(start, x)
                poll()
                on_rows(len(x))

    def _forward_few(self, few: FewRows, tokens: Tensor, segments: Sequence[Segment]) -> Tensor:
        num_rows = tokens.shape[0]
        x = self._embedded(tokens, few.rows(num_rows))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attend(layer, q, k, v, segments)

        with self._due(x, self.config.num_layers):
            for layer, weights in enumerate(self.weights.layers):
                few.layer(layer, weights, num_rows, attend)
        return x

    def _embedded(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, hidden], in `out` where that is given."""
        x = self.weights.embedding.rows(tokens, out=out)
        if (norm := self.config.embedding_norm) is not None:
            x.copy_(rms_norm(x.float(), x.shape[1:], eps=norm.eps))
        return x if self._embedding_scale == 1 else x.mul_(self._embedding_scale)

    @contextmanager
    def _few_rows(self) -> Iterator[FewRows]:
        """Not in use; what is in its rows then stays there until the next pass."""
        dtype = self.weights.embedding.dtype
        assert isinstance(self._kernels, CpuKernels)
        few = self._idle.pop() if self._idle else FewRows(self._kernels, self.config, dtype, self._sums)
        try:
            yield few
        finally:
            self._idle.append(few)

    def finish(self) -> None:
        """Return when all that was computed is there: on a GPU, calls return before it is."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def logits(self, hidden: Tensor, *, blocks: Sequence[int] | None = None) -> Tensor:
        """hidden [n, hidden] -> [n, V] in the model's dtype."""
        assert self.weights.head is not None, "rank 0 alone has the head"
        if self.takes_any_rows and (blocks is not None or len(hidden) <= FEW_ROWS):
            with self._few_rows() as few:
                logits = few.logits(hidden, self.weights.final_norm, self.weights.head)
        else:
            head, norm = self.weights.head, self.weights.final_norm
            logits = _by_block(blocks, hidden, lambda part: head(norm(part)))
        if self.config.logits_scale != 1:
            logits.mul_(self.config.logits_scale)
        if (cap := self.config.logits_cap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _due(self, x: Tensor, num_layers: int) -> AbstractContextManager[None]:
        """The sums over the ranks in so many layers, of all rows: after the attention and after the feed-forward
        network, and before both where heads are normed together."""
        rows, hidden = x.shape
        squares = [Due(rows, 2, torch.float32)] if norms_over_ranks(self.config, self._sums) else []
        return self._sums.due([*squares, Due(rows, hidden), Due(rows, hidden)] * num_layers, x)

    def _layer(
        self,
        layer: int,
        weights: LayerWeights,
        x: Tensor,
        segments: Sequence[Segment],
        blocks: Sequence[int] | None = None,
        shared: SharedBlocks | None = None,
    ) -> None:
        """x [T, hidden], in place."""
        block = self.config.blocks[layer]
        qkv = _by_block(blocks, x, lambda part: weights.qkv(_normed(part, weights.before_attention)))
        beside = _by_block(blocks, x, lambda part: self._feed_forward(weights, part)) if block.side_by_side else None
        gate_size = block.attention.q_size if block.attention.gate else 0
        heads, gate = qkv.split((qkv.shape[1] - gate_size, gate_size), 1)
        q, k, v = self._heads(block.attention, weights, heads if shared is None else shared.apart(heads))
        attended = self._attend(layer, q, k, v, segments)
        attended = attended if shared is None else shared.joined(attended)
        attended = attended * gate.sigmoid() if gate_size else attended
        self._add(x, _by_block(blocks, attended, weights.o), weights.after_attention, block)
        if beside is None:
            beside = _by_block(blocks, x, lambda part: self._feed_forward(weights, part))
        self._add(x, beside, weights.after_feed_forward, block)
        if weights.factor is not None:
            x *= weights.factor

    def _add(self, x: Tensor, part: Tensor, norm: NormWeights | None, block: Block) -> None:
        """To x, in place, what this rank's part of a layer gives."""
        add_normed(x, self._sums.total(part), norm, block.scale)

    def _feed_forward(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """x [n, hidden] -> [n, hidden], of this rank's part of the network."""
        block = self.config.block
        inner = weights.gate_up(
            _normed(x, weights.before_attention if block.side_by_side else weights.before_feed_forward)
        )
        if not block.feed_forward.gated:
            return weights.down(_activated(inner, block))
        gate, up = inner.chunk(2, -1)
        return weights.down(_activated(gate, block).mul_(up))

    def _heads(self, attention: Attention, weights: LayerWeights, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (H + 2 H_kv) * D], or (H + H_kv) where values are keys -> q [T, H, D], k and v [T, H_kv, D], normed where
        the model does that."""
        q, k, *values = qkv.split(attention.parts[: 2 if attention.values_are_keys else 3], 1)
        v = normed_heads(values[0] if values else k, weights.v_norm, attention.head_dim)
        if norms_over_ranks(self.config, self._sums):
            q, k = normed_over_ranks(q, k, weights, self._sums)
        else:
            size = 0 if attention.norms_whole else attention.head_dim
            q, k = normed_heads(q, weights.q_norm, size), normed_heads(k, weights.k_norm, size)
        q, k, v = (rows.unflatten(1, (-1, attention.head_dim)) for rows in (q, k, v))
        return q, k, v

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Each segment's share of these rows, through its cache -> [T, H * D]."""
        if len(segments) == 1:
            return segments[0].cache.attend(layer, q, k, v)
        counts = [len(each.tokens) for each in segments]
        own = zip(q.split(counts), k.split(counts), v.split(counts), strict=True)
        return torch.cat([each.cache.attend(layer, *rows) for each, rows in zip(segments, own, strict=True)])


def _normed(x: Tensor, norm: NormWeights | None) -> Tensor:
    return x if norm is None else norm(x)


def _activated(x: Tensor, block: Block) -> Tensor:
    activation = block.feed_forward.activation
    if activation == "silu":
        return silu(x)
    return gelu(x, approximate="tanh") if activation == "gelu_tanh" else relu(x).square_()


def _by_block(blocks: Sequence[int] | None, x: Tensor, operator: Callable[[Tensor], Tensor]) -> Tensor:
    """`operator` over x in blocks of exactly these numbers of rows."""
    if blocks is None or len(blocks) == 1:
        return operator(x)
    return torch.cat([operator(part) for part in x.split(list(blocks))])
