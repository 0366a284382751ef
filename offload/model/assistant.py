"""A draft without a cache (Gemma 4's assistant): few layers, which attend to its target's keys and values.

A step joins the embedding of the last token, of the target, with a hidden row: the target's of the token before, after
its final norm, or for a token after a drafted one the draft's own output. All steps of a round are at one position, and
see the tokens that the target's cache has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.config.model import ModelConfig
from offload.kernels.device import DeviceKernels
from offload.kernels.recurrence import RecurrenceWeights
from offload.kernels.rope import Scoring
from offload.kv import Cache
from offload.kv.full import FullCache
from offload.kv.last_hidden import LastHidden
from offload.kv.window import WindowCache
from offload.model.decoder import Decoder, Segment
from offload.model.graphs import Tensors
from offload.model.level import Level
from offload.model.passes import Pass
from offload.weights.assistant import AssistantWeights

_UNLIKELY = -1e4  # a logit


class AssistantDecoder(Decoder):
    """The layers of such a draft, and its head."""

    def __init__(self, config: ModelConfig, own: AssistantWeights, target: Decoder, kernels: DeviceKernels) -> None:
        super().__init__(config, own.common, None, kernels)
        self._own, self._target, self._hidden = own, target, torch.empty(0)

    def rows(self, keys: TargetKeys, token: Tensor, hidden: Tensor) -> Tensor:
        """The output [1, hidden] for a token, int64 [1], and the hidden row [1, target's hidden] that it follows."""
        self._hidden = hidden
        return self.forward([Segment(cast(Cache, keys), token)]).clone()

    def of_target(self, hidden: Tensor) -> Tensor:
        """The target's hidden rows with its final norm."""
        return self._target.weights.norm(hidden)

    def of_own(self, out: Tensor) -> Tensor:
        """An output in place of the target's hidden row."""
        return self._own.out(self.weights.norm(out))

    def logits(self, hidden: Tensor, *, block: int | None = None) -> Tensor:
        """See `Decoder.logits`. Of tokens in clusters those of the best have logits, and the others one below the least
        of them."""
        if self._own.clusters is None or self.config.assistant is None:
            return super().logits(hidden, block=block)
        (vectors, tokens), head = self._own.clusters, self.weights.head
        assert head is not None
        assert isinstance(head.weight, Tensor)
        rows = self.weights.norm(hidden)
        best = vectors(rows).topk(self.config.assistant.best, -1).indices
        chosen = tokens[best].flatten(1)
        own = torch.einsum("nh,nth->nt", rows, head.weight[chosen])
        out = own.new_empty(len(rows), self.config.vocab_size)
        return out.copy_(own.min(-1, keepdim=True).values - 1).scatter_(1, chosen, own)

    def _embedded(self, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        joined = self._own.into(torch.cat([self._target.embedded(tokens), self._hidden], 1))
        return joined if out is None else out.copy_(joined)


class TargetKeys:
    """The target's caches as layers of its draft read them: a layer the last one that sees as much. position: of the
    row."""

    def __init__(
        self,
        config: ModelConfig,
        full: FullCache,
        windows: WindowCache | None,
        scorings: Sequence[Scoring],
    ) -> None:
        self._full, self._windows, self._scorings = full, windows, scorings
        self._has_window = [block.attention.window is not None for block in config.blocks]
        self.position = 0

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        scoring = self._scorings[layer]
        if not self._has_window[layer]:
            return self._full.peek(self._full.num_layers - 1, q, self.position, scoring)
        assert self._windows is not None
        return self._windows.peek(self._windows.last, q, self.position, scoring)

    def recur(self, layer: int, rows: Tensor, weights: RecurrenceWeights) -> Tensor:
        raise NotImplementedError("no layer has a state")


class AssistantLevel(Level):
    """Such a draft as a level. hidden: the target's hidden rows, which its levels write."""

    def __init__(
        self,
        name: str,
        decoder: AssistantDecoder,
        full: FullCache,
        keys: TargetKeys,
        hidden: LastHidden,
        *,
        vocab_size: int,
    ) -> None:
        super().__init__(name, decoder, cast(Cache, full), vocab_size=vocab_size)
        self._draft, self._full, self._keys, self._model = decoder, full, keys, hidden
        self._ahead = 0  # tokens after the target's that it has seen
        self._last = torch.empty(0)  # its output of the last step, in place of a hidden row

    @property
    def length(self) -> int:
        return self._full.length + self._ahead

    def shares(self, num_rows: int) -> bool:
        """False: each pass runs alone."""
        return False

    def truncate(self, length: int) -> None:
        self._ahead = min(self._ahead, max(length - self._full.length, 0))

    def _forward(self, passes: Sequence[Pass]) -> list[Tensors]:
        return [self._run_pass(each) for each in passes]

    def _run_pass(self, asked: Pass) -> Tensors:
        """A step after the last token of a pass -> what its `compute` returns of the logits."""
        assert asked.num_logits == 1, "such a draft drafts token by token"
        ids, device = asked.tokens, self._decoder.device
        tokens = ids if isinstance(ids, Tensor) else torch.tensor(ids, dtype=torch.long, device=device)
        at = self.length + len(tokens) - 1  # the position of the last token
        self.stats.rows -= len(tokens) - 1  # counted by the caller, never run
        hidden = self._last
        if not self._ahead or at - 1 < self._model.length:  # rows that are missing read as zeros
            hidden, self._keys.position = self._draft.of_target(self._model.read(at - 1, at)), at
        self._ahead += len(tokens)
        out = torch.zeros(1, self._decoder.config.hidden_size, dtype=hidden.dtype, device=device)
        if self._full.length:  # else there are no keys yet
            out = self._draft.rows(self._keys, tokens[-1:], hidden)
        self._last = self._draft.of_own(out)
        logits = self._draft.logits(out)[:, : self._vocab_size]
        logits = pad(logits, (0, self._vocab_size - logits.shape[1]), value=_UNLIKELY)
        return asked.compute(logits, *asked.given)
