"""A next-token head (MTP) as a draft: one layer over the model's hidden rows and the tokens that follow them.

Row r of the head joins the hidden row of token r with the embedding of token r + 1, and predicts token r + 2. So its
first row needs two tokens, and its cache has one row less than tokens. Where the model has not run yet, the head's own
output stands for the hidden row. It attends within sinks and a window, as a draft does (kv/streaming.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.config.model import ModelConfig
from offload.formats.quantised import Codes
from offload.kernels.device import DeviceKernels
from offload.kernels.norms import normed_heads
from offload.kv.last_hidden import LastHidden
from offload.kv.streaming import StreamingCache
from offload.model.decoder import Decoder, Segment
from offload.model.graphs import GraphPool, Tensors
from offload.model.level import Level
from offload.model.passes import Pass
from offload.transfer.link import Link
from offload.transfer.memory import sent
from offload.weights.layers import ResidentLayers
from offload.weights.linear import Linear, Parts
from offload.weights.loader import Weights
from offload.weights.next_token import NextTokenWeights
from offload.weights.streams import StreamWeights

_UNLIKELY = -1e4  # a logit
MOST_GRAPHED = 16  # rows of a pass that runs as a graph: what a round may have verified


class NextTokenDecoder(Decoder):
    """The decoder of a next-token head. Its embeddings and logits are the model's, whose final norm the hidden rows
    have before they are joined."""

    def __init__(self, config: ModelConfig, own: NextTokenWeights, model: Weights, kernels: DeviceKernels) -> None:
        layers, head = ResidentLayers([own.layer], own.nbytes), _first_rows(model.head, config.vocab_size)
        weights = replace(
            model, layers=layers, final_norm=own.norm, head=head, scoring=(), experts=own.experts, ngrams={}
        )
        super().__init__(config, weights, None, kernels)
        self._own, self._model_norm = own, model.final_norm
        self._hidden = torch.empty(0)

    def rows(self, cache: StreamingCache, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The outputs [n, hidden] for rows of `tokens` and of `hidden` [n, hidden], which is normed. Logits are made of
        outputs, and the next rows take outputs for hidden rows, see `of_own`. The caller has begun the forward on the
        cache."""
        self._hidden = hidden
        return self.forward([Segment(cache, tokens)]).clone()

    def of_model(self, hidden: Tensor) -> Tensor:
        """The model's hidden rows with its final norm, or their streams as they are."""
        return hidden if isinstance(self._model_norm, StreamWeights) else self._model_norm(hidden)

    def of_own(self, out: Tensor) -> Tensor:
        """The head's outputs in place of the model's hidden rows."""
        return out if isinstance(self._own.norm, StreamWeights) else self._own.norm(out)

    def _embedded(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        own, count = self._own, self.config.streams.count if self.config.streams else 1
        embedded = own.embedding_norm(self._rows_of(tokens, None))[:, None].expand(-1, count, -1)
        hidden = normed_heads(self._hidden, own.hidden_norm, self.config.hidden_size).unflatten(1, (count, -1))
        joined = own.join(torch.cat([embedded, hidden], 2).flatten(0, 1)).unflatten(0, (-1, count)).flatten(1)
        return joined if out is None else out.copy_(joined)


def _first_rows(head: Linear | None, count: int) -> Linear | None:
    """The model's head for the first tokens of its vocabulary."""
    if head is None or isinstance(head.weight, Codes | Parts) or count == head.weight.shape[0]:
        return head
    return Linear(head.weight[:count], None)


@dataclass(frozen=True)
class _Rows:
    """Rows that run together: tokens [n] and hidden rows [n, hidden]. is_sure: the hidden rows are the model's.
    is_last: logits are wanted after the rows."""

    tokens: Tensor
    hidden: Tensor
    is_sure: bool
    is_last: bool


class NextTokenLevel(Level):
    """A next-token head with its cache. hidden: the model's hidden rows, which its levels write."""

    def __init__(
        self,
        name: str,
        decoder: NextTokenDecoder,
        cache: StreamingCache,
        hidden: LastHidden,
        *,
        vocab_size: int,
        link: Link | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        super().__init__(name, decoder, cache, vocab_size=vocab_size, link=link, pool=pool)
        self._head, self._window, self._model = decoder, cache, hidden
        self._last = torch.empty(0)  # output of the last row, normed, [1, hidden]
        self._sure = 0  # first rows whose hidden rows were the model's

    @property
    def length(self) -> int:
        return self._window.length + 1 if self._window.length else 0

    def shares(self, num_rows: int) -> bool:
        """False: each pass runs alone."""
        return False

    def truncate(self, length: int) -> None:
        """Rows that took the head's own outputs are run again once the model has run."""
        self._sure = min(self._sure, max(length - 1, 0))
        self._window.truncate(self._sure)
        self._sure = min(self._sure, self._window.length)

    def _forward(self, passes: Sequence[Pass]) -> list[Tensors]:
        return [self._run_pass(each) for each in passes]

    def _run_pass(self, asked: Pass) -> Tensors:
        """Run the tokens of a pass, which follow those that the level has -> what its `compute` returns of the logits
        after the last one."""
        assert asked.num_logits == 1, "a head drafts token by token"
        tokens = asked.tokens if isinstance(asked.tokens, Tensor) else self._on_device(asked.tokens)
        if not self._window.length:
            tokens = tokens[1:]  # the first token has no row before it
        if not len(tokens):  # a sequence of one token: no row, so no more than a guess
            return asked.compute(self._logits_of(self._model.read(0, 1)), *asked.given)
        made: Tensors = ()
        for part in self._parts(tokens):
            made = self._run_rows(part, asked if part.is_last else None)
            if part.is_sure and self._sure == self._window.length - len(part.tokens):
                self._sure = self._window.length
        return made

    def _parts(self, tokens: Tensor) -> Iterator[_Rows]:
        """The rows of `tokens` in parts that run one after the other. Rows that no later row sees are left out."""
        cache, model = self._window, self._model
        first_rows = max(min(cache.sinks - cache.length, len(tokens)), 0)
        if first_rows and len(tokens) > first_rows + cache.window:
            hidden = self._head.of_model(model.read(cache.length, cache.length + first_rows))
            yield _Rows(tokens[:first_rows], hidden, is_sure=True, is_last=False)
            tokens = tokens[first_rows:]
        skipped = cache.skip(len(tokens), least=min(max(model.oldest - cache.length, 0), len(tokens) - 1))
        tokens = tokens[skipped:]
        self._sure += skipped
        self.stats.rows -= skipped  # counted by the caller, never run
        while len(tokens):
            if count := self._num_ready(len(tokens)):
                hidden = self._head.of_model(model.read(cache.length, cache.length + count))
            else:
                hidden = self._last
            some, tokens = tokens[: len(hidden)], tokens[len(hidden) :]
            yield _Rows(some, hidden, is_sure=count > 0, is_last=not len(tokens))

    def _num_ready(self, count: int) -> int:
        """The number of the next `count` rows that can run at once: rows whose tokens the model has run, or all rows
        while the head has no output; no more than the cache takes. 0: the next row takes the head's last output for its
        hidden row."""
        ready = min(max(self._model.length - self._window.length, 0), count, self._window.max_rows)
        return ready if ready or len(self._last) else min(count, self._window.max_rows)

    def _run_rows(self, rows: _Rows, asked: Pass | None) -> Tensors:
        """Run rows -> what the pass's `compute` returns of the logits after the last one. asked: None without any."""

        def compute(tokens: Tensor, hidden: Tensor, *given: Tensor) -> list[Tensors]:
            out = self._head.rows(self._window, tokens, hidden)[-1:]
            made = () if asked is None else asked.compute(self._logits_of(out), *given)
            return [(*made, self._head.of_own(out))]

        count, inputs = len(rows.tokens), [rows.tokens, rows.hidden, *(asked.given if asked is not None else ())]
        self._window.begin("decode", count)
        found, graphs, key = None, self._graphs, self._window.graph_key
        if graphs is not None and graphs.has_room and key is not None and asked is not None and count <= MOST_GRAPHED:
            first_passes = graphs.first_passes
            found = graphs.run((key, asked.compute), inputs, compute)
            self.stats.first_passes += graphs.first_passes - first_passes
            if found is None:
                self._window.begin("decode", count)
        [(*made, self._last)] = found or compute(*inputs)
        self._window.advance(count)
        return tuple(made)

    def _logits_of(self, out: Tensor) -> Tensor:
        """The logits [1, V] of an output. Tokens outside the head's vocabulary have a logit of -1e4: such a token is
        nearly impossible, unless a constraint allows no other."""
        logits = self._decoder.logits(out)[:, : self._vocab_size]
        return pad(logits, (0, self._vocab_size - logits.shape[1]), value=_UNLIKELY)

    def _on_device(self, tokens: Sequence[int]) -> Tensor:
        return sent(torch.tensor(tokens, dtype=torch.long), self._decoder.device)
