"""The decoder: rows in, hidden rows out, layer by layer, in a pass or in a prefill.

It reads a model's description (config/model) and no family's name. Rows of several sequences are packed, not padded:
operators on rows run over all of them together, attention runs sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from offload.config.model import ModelConfig
from offload.interrupts import poll
from offload.kernels.cpu import FEW_ROWS, CpuKernels
from offload.kernels.device import NONE, DeviceKernels
from offload.kernels.experts import RunExperts
from offload.kernels.pooled import IndexRows
from offload.kernels.recurrence import RecurrenceWeights
from offload.kernels.rows import products_alike
from offload.kv import Cache
from offload.model.heads import norms_over_ranks
from offload.model.layer import MixRows
from offload.model.layer_inputs import LayerInputs
from offload.model.native_layers import NativeLayers
from offload.model.ngrams import NGramInputs
from offload.model.streams import mean_of
from offload.model.sums import OneRank, Sums, dues_of
from offload.model.torch_layers import TorchLayers
from offload.transfer.hidden_rows import HiddenRows
from offload.weights.embedding import Embedding
from offload.weights.experts import in_prefill, prefill_turn
from offload.weights.layers import ResidentLayers
from offload.weights.loader import Weights
from offload.weights.streams import StreamWeights

# Called with a block's first row and the block [n, hidden], the last layer's output; the block is overwritten later.
OnHidden = Callable[[int, Tensor], None]


PADDING = -1  # in place of a token, of a model with experts; others pad with any token


@dataclass(frozen=True)
class Segment:
    """New tokens of one sequence, int64 [n], and the cache to which their rows are appended."""

    cache: Cache
    tokens: Tensor


class Decoder:
    """The layer loop. It depends on no concrete cache and on no sampling.

    config, weights: of the model, or of this rank's shard. sums: over the ranks; None for one rank. kernels: the
    device's; a CPU's run layers of few rows, otherwise torch's operators do.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, sums: Sums | None = None, kernels: DeviceKernels = NONE
    ) -> None:
        self.config, self.weights, self._sums, self._kernels = config, weights, sums or OneRank(), kernels
        scale, dtype = config.embedding_scale, weights.embedding.dtype
        self._embedding_scale = torch.tensor(scale, dtype=dtype).item() if config.rounds_embedding_scale else scale
        experts = weights.experts or (None,) * config.num_layers
        layers = partial(TorchLayers, config, self._sums, kernels)
        self._operators = layers(experts, self._run_experts)
        self._prefill = layers([*map(in_prefill, experts)], self._run_experts and kernels.prefill_experts)
        self._native: NativeLayers | None = None
        if isinstance(kernels, CpuKernels):
            self._native = NativeLayers(kernels, config, dtype, self._sums, experts)
        self._inputs = None if weights.inputs is None else LayerInputs(config, weights.inputs)
        self._ngrams = NGramInputs(config, weights.ngrams) if weights.ngrams else None

    def over(self, weights: Weights) -> Decoder:
        """A decoder of the same model with other weights."""
        return Decoder(self.config, weights, self._sums, self._kernels)

    def without_layers(self) -> Decoder:
        """A decoder with the final norm and the head alone, for `logits`. On rank 0, which has the head."""
        nothing = Embedding(torch.empty(0), self.device, self.weights.embedding.dtype)
        weights = replace(self.weights, embedding=nothing, layers=ResidentLayers((), 0))
        weights = replace(weights, scoring=(), experts=(), inputs=None, ngrams={})
        return Decoder(self.config, weights, None, self._kernels)

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def stays_in_place(self) -> bool:
        """Whether all tensors of a pass are on one GPU at fixed addresses, as graphs need."""
        alone = isinstance(self.weights.layers, ResidentLayers) and isinstance(self._sums, OneRank)
        waits = self.weights.embedding.waits or self._waits_for_routers
        return self.device.type == "cuda" and alone and not waits

    @property
    def _waits_for_routers(self) -> bool:
        """Whether torch's operators run experts: the host has to know which ones a layer's router chose."""
        return any(self.weights.experts) and self._run_experts is None

    @property
    def _run_experts(self) -> RunExperts | None:
        """The kernels that run experts on the device; None: torch's operators, also over rows of 32 bits on a GPU."""
        is_taken = self.device.type == "cpu" or self.weights.embedding.dtype.itemsize == 2
        return self._kernels.experts if is_taken else None

    @property
    def streams(self) -> bool:
        """Whether weights cross a link in a pass. Then only one pass at a time can run."""
        resident = isinstance(self.weights.layers, ResidentLayers) and not self.weights.streamed_experts
        return not resident

    @property
    def takes_any_rows(self) -> bool:
        """Whether any number of rows up to FEW_ROWS runs without padding to blocks."""
        return self._native is not None

    def table_rows(self, segments: Sequence[Segment]) -> Tensor | None:
        """The rows of the layer table for the segments' tokens, or n-grams' embeddings of layers side by side, [T,
        numbers] on the device; None without one. No part of a graph: the host reads them."""
        if self._ngrams is not None:
            return torch.cat([wait() for wait in self._begin_ngrams(segments).values()], 1)
        if self._inputs is None:
            return None
        return self._inputs.weights.rows(torch.cat([each.tokens for each in segments]).clamp(min=0))

    def _begin_ngrams(self, segments: Sequence[Segment]) -> Mapping[int, Callable[[], Tensor]]:
        """Begin to read the embeddings of n-grams, see `NGramInputs.begin`; empty without any."""
        if self._ngrams is None:
            return {}
        return self._ngrams.begin([_mixing(each.cache).with_earlier(each.tokens.clamp(min=0)) for each in segments])

    def _given_by_layer(
        self,
        segments: Sequence[Segment],
        table_rows: Tensor | None,
        x: Tensor,
        multiply: Callable[..., Tensor],
        waiting: Mapping[int, Callable[[], Tensor]],
    ) -> Callable[[int], Tensor | None]:
        """A function of a layer that gives its input in a pass, if it has one. x: the embedded rows. waiting: for the
        embeddings of n-grams, where `table_rows` has none."""
        if self._inputs is not None:
            found = self.table_rows(segments) if table_rows is None else table_rows
            return self._inputs.of_all(cast(Tensor, found), x, multiply).unbind().__getitem__
        if table_rows is not None:
            layers = self.config.with_ngrams
            parts = dict(zip(layers, table_rows.chunk(len(layers), 1), strict=True))
            return parts.get
        return lambda layer: waiting[layer]() if layer in waiting else None

    def forward(
        self, segments: Sequence[Segment], *, block: int | None = None, table_rows: Tensor | None = None
    ) -> Tensor:
        """Run the segments' tokens through all layers, filling their caches -> hidden rows [T, hidden], model dtype.

        The caller has begun the forward on each cache and advances it afterwards. Every layer's weights are used once.
        block: torch's products run in blocks of `block` rows, of which T is a multiple, so that a row's bits do not
        depend on T; None: all rows of a segment at once. With several ranks a forward always runs to its end on all.
        table_rows: of all tokens; None: they are read here.
        """
        tokens = segments[0].tokens if len(segments) == 1 else torch.cat([each.tokens for each in segments])
        waiting = self._begin_ngrams(segments) if table_rows is None else {}
        real = None
        if self.config.experts is not None:  # padding runs through no expert
            real, tokens = tokens != PADDING, tokens.clamp(min=0)
        if (native := self._native_for(len(tokens), block)) is not None:
            x, run, multiply = self._embedded(tokens, native.rows(len(tokens))), native.run, native.multiply
        else:
            blocks = self._blocks([len(each.tokens) for each in segments], block)
            x, run = self._embedded(tokens), partial(self._operators.run, blocks=blocks, real=real)
            multiply = partial(self._operators.multiply, blocks=blocks)
        given = self._given_by_layer(segments, table_rows, x, multiply, waiting)
        caches = _mixing(segments[0].cache) if len(segments) == 1 else _Caches(segments)
        with self._due(x, range(self.config.num_layers)):
            for layer, weights in enumerate(self.weights.layers):
                run(layer, weights, x, caches, given=given(layer))
        return x

    def prefill(
        self,
        cache: Cache,
        tokens: Sequence[int],
        rows: HiddenRows,
        *,
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
        on_hidden: OnHidden | None = None,
    ) -> None:
        """Append `tokens`, which may be empty, to `cache`, layer by layer in the blocks of `rows`, so that a layer's
        intermediates stay small. `rows` hold the hidden rows between layers.

        on_tokens: called with the number of tokens done; a block in one layer counts as its share of the layers.
        on_hidden: called with each block after the last layer. Without it, last layers that share keys and values of
        others do not run: no token needs them. With it, layers that share a window's run behind it block by block,
        and an interrupted prefill may have appended whole blocks. With several ranks a prefill can be interrupted
        between two blocks. Peak memory: one block's intermediates besides `rows`.
        """
        step = rows.block if on_hidden is not None and self.config.shares_windows else max(len(tokens), 1)
        with prefill_turn(self.weights.experts, len(tokens), rows.together):
            for first in range(0, len(tokens), step):

                def done(num_tokens: int, first: int = first) -> None:
                    on_tokens(first + num_tokens)

                def take(start: int, x: Tensor, first: int = first) -> None:
                    assert on_hidden is not None
                    on_hidden(first + start, x)

                self._append(cache, tokens[first : first + step], rows, done, take if on_hidden is not None else None)

    def _append(
        self,
        cache: Cache,
        tokens: Sequence[int],
        rows: HiddenRows,
        on_tokens: Callable[[int], None],
        on_hidden: OnHidden | None,
    ) -> None:
        """A prefill of tokens that the caches can take layer by layer, see `prefill`."""
        row_layers, num_layers = 0, (self.config.prefilled if on_hidden is None else self.config).num_layers
        with torch.inference_mode():
            cache.begin("prefill", len(tokens))
            on_host = torch.tensor(tokens, dtype=torch.long)
            ids = on_host.to(self.device)
            earlier = None if self._ngrams is None else _mixing(cache).with_earlier(on_host)
            rows.begin(len(tokens))
            for layer, weights in enumerate(islice(self.weights.layers, num_layers)):
                of_ngrams = None
                if self._ngrams is not None and earlier is not None and layer in self._ngrams:
                    of_ngrams = self._ngrams.of_prefill(layer, earlier, rows.block)
                for start, x in rows.groups(layer):
                    if layer == 0:
                        for part, own in zip(x.split(rows.block), ids[start:].split(rows.block), strict=False):
                            self._embedded(own, part)
                    given: Callable[[int, Tensor], Tensor | None] = partial(self._given, layer, on_host[start:])
                    if of_ngrams is not None:
                        given = partial(_of_block, of_ngrams, start)
                    run = partial(self._prefill.run_blocks, is_last=start + len(x) == len(tokens))
                    done = 0
                    for count in run(layer, weights, x, _mixing(cache), rows.block, given):
                        if on_hidden is not None and layer == num_layers - 1 and count > done:
                            on_hidden(start + done, x[done:count])
                        poll()
                        row_layers, done = row_layers + count - done, count
                        on_tokens(row_layers // num_layers)
            cache.advance(len(tokens))
            self.finish()

    def _given(self, layer: int, tokens: Tensor, first: int, x: Tensor) -> Tensor | None:
        """The input of a layer for a prefill's block x, from row `first` of the rows of `tokens` on, if it has one."""
        if self._inputs is None:
            return None
        own = tokens[first : first + len(x)]
        return self._inputs.of_layer(layer, own, self._embedded(own.to(self.device)))

    def embedded(self, tokens: Tensor) -> Tensor:
        """The tokens' embeddings as the first layer reads them: int64 [T] -> [T, hidden]."""
        return self._embedded(tokens)

    def _embedded(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        """The tokens' embeddings [T, hidden], normed and scaled as the model requires, or as many copies as there are
        streams, side by side; in `out` if it is given."""
        if (streams := self.config.streams) is not None:
            copies = self._rows_of(tokens, None).repeat(1, streams.count)
            return copies if out is None else out.copy_(copies)
        return self._rows_of(tokens, out)

    def _rows_of(self, tokens: Tensor, out: Tensor | None) -> Tensor:
        x = self.weights.embedding.rows(tokens, out=out)
        if (norm := self.config.embedding_norm) is not None:
            x.copy_(rms_norm(x.float(), x.shape[1:], eps=norm.eps))
        return x if self._embedding_scale == 1 else x.mul_(self._embedding_scale)

    def _native_for(self, num_rows: int, block: int | None) -> NativeLayers | None:
        """The executor by the CPU's kernels, if `num_rows` rows run on it; None where torch's operators run."""
        if self._native is None or (block is None and num_rows > FEW_ROWS):
            return None
        return self._native

    def _blocks(self, rows: Sequence[int], block: int | None) -> list[int] | None:
        """The numbers of rows in which torch's products run; None: all at once. rows: number of rows of each segment.
        Blocks have one row where a row's place in a block of `block` rows would change its bits."""
        if block is None:
            return list(rows) if len(rows) > 1 else None
        if sum(rows) % block:
            raise ValueError(f"{sum(rows)} rows are no blocks of {block}")
        size = block if self._rounds_alike(block) else 1
        return [size] * (sum(rows) // size)

    def _rounds_alike(self, block: int) -> bool:
        """Whether a row has the same bits at every place of a block. For GPUs, the tests check this."""
        if self.device.type != "cpu":
            return True
        config, dtypes = self.config, {self.weights.embedding.dtype}
        if config.stored_in or config.head_encoding:
            dtypes.add(torch.float32)  # in which stored matrices are multiplied
        products = (*config.all_products, *config.head_products, (config.vocab_size, config.hidden_size, False))
        if config.experts is not None:
            dtypes.add(torch.float32)  # in which rows are scored
            products = (*products, (config.experts.num_scores, config.hidden_size, False))
        return all(products_alike(products, block, dtype, torch.get_num_threads()) for dtype in dtypes)

    def logits(self, hidden: Tensor, *, block: int | None = None) -> Tensor:
        """The logits of hidden rows: hidden [n, hidden], or all of their streams -> [n, V] in the model's dtype. block:
        as in `forward`."""
        assert self.weights.head is not None, "rank 0 alone has the head"
        last, head = self.weights.final_norm, self.weights.head
        native, blocks = self._native_for(len(hidden), block), self._blocks([len(hidden)], block)
        if native is not None:
            multiply: Callable[..., Tensor] = native.multiply
        else:
            multiply = partial(self._operators.multiply, blocks=blocks)
        if isinstance(last, StreamWeights):
            hidden, norm = mean_of(hidden, last, multiply, self._kernels.streams).rows, None
        else:
            norm = last
        logits = multiply(hidden, head, norm)
        if self.config.logits_scale != 1:
            logits.mul_(self.config.logits_scale)
        if (cap := self.config.logits_cap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def finish(self) -> None:
        """Wait until a GPU has computed everything that was launched."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _due(self, x: Tensor, layers: Sequence[int]) -> AbstractContextManager[None]:
        """Expect the sums over the ranks of `layers`: after the mixer and after the feed-forward network, and before
        the attention where heads are normed over ranks."""
        rows, hidden = len(x), self.config.hidden_size
        squares = norms_over_ranks(self.config, self._sums)
        blocks = [self.config.blocks[layer] for layer in layers]
        dues = [due for block in blocks for part in dues_of(block, rows, hidden, squares=squares) for due in part]
        return self._sums.due(dues, x)


def _of_block(given: Callable[[int, int], Tensor], start: int, first: int, x: Tensor) -> Tensor:
    """The input of a layer for a prefill's block x, from row `first` of those after row `start` on."""
    return given(start + first, len(x))


def _mixing(cache: Cache) -> MixRows:
    """A cache as layers see it. For a model with states it is one that has them (worker/worker.py)."""
    return cast(MixRows, cache)


class _Caches:
    """The caches of several sequences, as layers see them: each mixes its own rows."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._caches = [each.cache for each in segments]
        self._counts = [len(each.tokens) for each in segments]

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        own = zip(*(self._split(rows) for rows in (q, k, v)), strict=True)
        return torch.cat([each.attend(layer, *rows) for each, rows in zip(self._caches, own, strict=True)])

    def attend_chosen(self, layer: int, q: Tensor, k: Tensor, v: Tensor, index: IndexRows) -> Tensor:
        each = zip(*(rows.split(self._counts) for rows in (q, k, v, index.q, index.k)), strict=True)
        made = list[Tensor]()
        every = zip(self._caches, each, self._split(index.real), strict=True)
        for cache, (queries, keys, values, *rows), real in every:
            of_index = IndexRows(rows[0], rows[1], index.norm, real)
            made.append(_mixing(cache).attend_chosen(layer, queries, keys, values, of_index))
        return torch.cat(made)

    def _split(self, rows: Tensor | None) -> Sequence[Any]:
        """Each sequence's rows; None for each where there are none."""
        return [None] * len(self._counts) if rows is None else rows.split(self._counts)

    def with_earlier(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("each sequence has ids of its own before its tokens")

    def convolve(self, layer: int, rows: Tensor, weights: RecurrenceWeights) -> Tensor:
        own = zip(self._caches, rows.split(self._counts), strict=True)
        return torch.cat([_mixing(each).convolve(layer, some, weights) for each, some in own])

    def recur(self, layer: int, rows: Tensor, weights: RecurrenceWeights) -> Tensor:
        own = zip(self._caches, rows.split(self._counts), strict=True)
        return torch.cat([_mixing(each).recur(layer, some, weights) for each, some in own])
