"""A next-token head (MTP) as a draft: one layer over the model's hidden rows and the tokens that follow them.

Row r of the head joins the hidden row of token r with the embedding of token r + 1, and predicts token r + 2. So its
first row needs two tokens, and its cache has one row less than tokens. Where the model has not run yet, the head's own
output stands for the hidden row. It attends within sinks and a window, as a draft does (kv/streaming.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from offload.config.model import ModelConfig
from offload.kernels.device import DeviceKernels
from offload.kv.last_hidden import LastHidden
from offload.kv.streaming import StreamingCache
from offload.model.decoder import Decoder, Segment
from offload.model.level import Level
from offload.model.passes import Pass
from offload.transfer.memory import sent
from offload.weights.layers import ResidentLayers, Weights
from offload.weights.next_token import NextTokenWeights


class NextTokenDecoder(Decoder):
    """The decoder of a next-token head. Its embeddings and logits are the model's, whose final norm the hidden rows
    have before they are joined."""

    def __init__(self, config: ModelConfig, own: NextTokenWeights, model: Weights, kernels: DeviceKernels) -> None:
        layers = ResidentLayers([own.layer], own.nbytes)
        super().__init__(config, replace(model, layers=layers, final_norm=own.norm, rotated=()), None, kernels)
        self._own, self._model_norm = own, model.final_norm
        self._hidden = torch.empty(0)

    def rows(self, cache: StreamingCache, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The outputs [n, hidden] of rows of `tokens` and `hidden` [n, hidden], normed: what the next rows take for
        hidden rows, and logits are of. The caller has begun the forward on the cache."""
        self._hidden = hidden
        return self.forward([Segment(cache, tokens)]).clone()

    def of_model(self, hidden: Tensor) -> Tensor:
        """The model's hidden rows with its final norm."""
        return self._model_norm(hidden)

    def of_own(self, out: Tensor) -> Tensor:
        """The head's outputs in place of the model's hidden rows."""
        return self._own.norm(out)

    def _embedded(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        own = self._own
        rows = torch.cat([own.embedding_norm(super()._embedded(tokens)), own.hidden_norm(self._hidden)], 1)
        joined = own.join(rows)
        return joined if out is None else out.copy_(joined)


class NextTokenLevel(Level):
    """A next-token head with its cache. hidden: the model's hidden rows, which its levels write."""

    def __init__(
        self, name: str, decoder: NextTokenDecoder, cache: StreamingCache, hidden: LastHidden, *, vocab_size: int
    ) -> None:
        super().__init__(name, decoder, cache, vocab_size=vocab_size)
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

    def _forward(self, passes: Sequence[Pass]) -> list[tuple[Tensor, ...]]:
        return [each.compute(self._logits_of(each), *each.given) for each in passes]

    def _logits_of(self, asked: Pass) -> Tensor:
        """The logits after the last of the pass's tokens, which follow those that the level has."""
        assert asked.num_logits == 1, "a head drafts token by token"
        tokens = asked.tokens if isinstance(asked.tokens, Tensor) else self._on_device(asked.tokens)
        if not self._window.length:
            tokens = tokens[1:]  # the first token has no row before it
        if not len(tokens):  # a sequence of one token: no row, so no more than a guess
            return self._decoder.logits(torch.zeros_like(self._model.read(0, 1)))[:, : self._vocab_size]
        out = self._caught_up_to(tokens)
        return self._decoder.logits(out)[:, : self._vocab_size]

    def _caught_up_to(self, tokens: Tensor) -> Tensor:
        """Run the rows of `tokens` -> the output of the last one, [1, hidden]."""
        cache, model = self._window, self._model
        first_rows = max(min(cache.sinks - cache.length, len(tokens)), 0)
        if first_rows and len(tokens) > first_rows + cache.window:
            self._run(tokens[:first_rows], model.read(cache.length, cache.length + first_rows), sure=True)
            tokens = tokens[first_rows:]
        skipped = cache.skip(len(tokens), least=min(max(model.oldest - cache.length, 0), len(tokens) - 1))
        tokens = tokens[skipped:]
        self._sure += skipped
        out = torch.empty(0)
        while len(tokens):
            count = self._num_ready(len(tokens))
            if count:
                hidden = self._head.of_model(model.read(cache.length, cache.length + count))
            else:
                count, hidden = 1, self._last
            out = self._run(tokens[:count], hidden, sure=hidden is not self._last)
            tokens = tokens[count:]
        return out

    def _num_ready(self, count: int) -> int:
        """Of the next `count` rows those that can run at once: the model has run their tokens, or nobody has."""
        ready = min(max(self._model.length - self._window.length, 0), count, self._window.max_rows)
        return ready if ready or len(self._last) else min(count, self._window.max_rows)

    def _run(self, tokens: Tensor, hidden: Tensor, *, sure: bool) -> Tensor:
        """Run rows -> the output of the last one. sure: the hidden rows are the model's."""
        self._window.begin("decode", len(tokens))
        out = self._head.rows(self._window, tokens, hidden)[-1:]
        self._window.advance(len(tokens))
        self._last = self._head.of_own(out)
        if sure and self._sure == self._window.length - len(tokens):
            self._sure = self._window.length
        return out

    def _on_device(self, tokens: Sequence[int]) -> Tensor:
        return sent(torch.tensor(tokens, dtype=torch.long), self._decoder.device)
