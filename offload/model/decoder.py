"""The decoder: rows in, hidden rows out, layer by layer, in a pass or in a prefill.

It reads a model's description (config/model) and no family's name. Rows of several sequences are packed, not padded:
whatever works on rows works on all of them together, attention works sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from offload.config.model import ModelConfig
from offload.interrupts import poll
from offload.kernels.cpu import FEW_ROWS, CpuKernels
from offload.kernels.device import NONE, DeviceKernels
from offload.kernels.rows import products_alike
from offload.kv import Cache
from offload.model.heads import norms_over_ranks
from offload.model.native_layers import NativeLayers
from offload.model.sums import Due, OneRank, Sums
from offload.model.torch_layers import TorchLayers
from offload.transfer.hidden_rows import HiddenRows
from offload.weights.embedding import Embedding
from offload.weights.layers import ResidentLayers, Weights

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
        self, config: ModelConfig, weights: Weights, sums: Sums | None = None, kernels: DeviceKernels = NONE
    ) -> None:
        self.config, self.weights, self._sums, self._kernels = config, weights, sums or OneRank(), kernels
        scale, dtype = config.embedding_scale, weights.embedding.dtype
        self._embedding_scale = torch.tensor(scale, dtype=dtype).item() if config.rounds_embedding_scale else scale
        self._operators = TorchLayers(config, self._sums)
        self._native: NativeLayers | None = None
        if isinstance(kernels, CpuKernels):
            self._native = NativeLayers(kernels, config, dtype, self._sums)

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
        return self._native is not None

    def forward(self, segments: Sequence[Segment], *, block: int | None = None) -> Tensor:
        """Run the segments' tokens through all layers, filling their caches -> hidden rows [T, hidden], model dtype.

        The caller has begun the forward on each cache and advances it afterwards. Every layer's weights are used once.
        block: torch's products see blocks of so many rows, of which T is a multiple, so that a row's bits do not depend
        on how many others there are; None: all of a segment at once. With several ranks it ends on all of them.
        """
        tokens = segments[0].tokens if len(segments) == 1 else torch.cat([each.tokens for each in segments])
        if (native := self._native_for(len(tokens), block)) is not None:
            x, run = self._embedded(tokens, native.rows(len(tokens))), native.run
        else:
            blocks = self._blocks([len(each.tokens) for each in segments], block)
            x, run = self._embedded(tokens), partial(self._operators.run, blocks=blocks)
        with self._due(x, self.config.num_layers):
            for layer, weights in enumerate(self.weights.layers):
                run(layer, weights, x, partial(_attend, segments))
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
                    self._operators.run(layer, weights, x, segment.cache.attend)
                if on_hidden is not None and layer == self.config.num_layers - 1:
                    on_hidden(start, x)
                poll()
                on_rows(len(x))

    def _embedded(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, hidden], in `out` where that is given."""
        x = self.weights.embedding.rows(tokens, out=out)
        if (norm := self.config.embedding_norm) is not None:
            x.copy_(rms_norm(x.float(), x.shape[1:], eps=norm.eps))
        return x if self._embedding_scale == 1 else x.mul_(self._embedding_scale)

    def _native_for(self, num_rows: int, block: int | None) -> NativeLayers | None:
        """What runs so many rows by the CPU's kernels; None: torch's operators do."""
        if self._native is None or (block is None and num_rows > FEW_ROWS):
            return None
        return self._native

    def _blocks(self, rows: Sequence[int], block: int | None) -> list[int] | None:
        """The numbers of rows that torch's products see; None: all. rows: of each segment. A row is a block by itself
        where its place in one of `block` rows would change its bits."""
        if block is None:
            return list(rows) if len(rows) > 1 else None
        if sum(rows) % block:
            raise ValueError(f"{sum(rows)} rows are no blocks of {block}")
        size = block if self._rounds_alike(block) else 1
        return [size] * (sum(rows) // size)

    def _rounds_alike(self, block: int) -> bool:
        """Whether a row has the same bits at every place of a block. A GPU's places are tried by its tests."""
        if self.device.type != "cpu":
            return True
        config, dtype = self.config, self.weights.embedding.dtype
        products = (*config.all_products, (config.vocab_size, config.hidden_size, False))
        return products_alike(products, block, dtype, torch.get_num_threads())

    def finish(self) -> None:
        """Return when all that was computed is there: on a GPU, calls return before it is."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def logits(self, hidden: Tensor, *, block: int | None = None) -> Tensor:
        """hidden [n, hidden] -> [n, V] in the model's dtype. block: as of `forward`."""
        assert self.weights.head is not None, "rank 0 alone has the head"
        norm, head = self.weights.final_norm, self.weights.head
        if (native := self._native_for(len(hidden), block)) is not None:
            logits = native.logits(hidden, norm, head)
        else:
            logits = self._operators.logits(hidden, norm, head, self._blocks([len(hidden)], block))
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


def _attend(segments: Sequence[Segment], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each segment's share of the rows q [T, H, D], k and v [T, H_kv, D], through its cache -> [T, H * D]."""
    if len(segments) == 1:
        return segments[0].cache.attend(layer, q, k, v)
    counts = [len(each.tokens) for each in segments]
    own = zip(q.split(counts), k.split(counts), v.split(counts), strict=True)
    return torch.cat([each.cache.attend(layer, *rows) for each, rows in zip(segments, own, strict=True)])
