"""The distribution of the next token, as a function of the tokens before it and of the model's logits.

All levels of a sequence use the same function, so drafts are drawn under the rules by which they are verified.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from offload.decode.grammar_text import GrammarText
from offload.decode.penalties import Penalty, Text, Tokens, penalties_of
from offload.decode.sampling import SamplingParams
from offload.decode.sequence import Extended
from offload.decode.warp import Biases, BiasRows, Warping, finite
from offload.errors import UsageError
from offload.grammar.constraint import Constraint
from offload.grammar.grammar import Grammar
from offload.text.tokenizer import Tokenizer

CPU = torch.device("cpu")


class Adjustment:
    """The adjustment of logits by the tokens before each place, in the order of docs/sampling.md.

    Each step works on the result of the earlier ones: it allows no token that they forbid, and it is skipped where it
    would forbid all remaining tokens. So the constraint, which is the first step, always holds.
    The tokens of a sequence are held as an array from call to call; the list that they begin with only grows.
    """

    def __init__(
        self, num_prompt: int, grammar: GrammarText | None, biases: BiasRows | None, penalties: Sequence[Penalty]
    ) -> None:
        self._num_prompt, self._grammar, self._biases, self._penalties = num_prompt, grammar, biases, penalties
        self._tokens: Tokens = np.empty(0, np.int32)
        self._root: Sequence[int] = ()
        self._num_held = 0  # held tokens that cannot change any more

    @property
    def grammar(self) -> GrammarText | None:
        return self._grammar

    def __call__(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """logits [n, V] after each of the last n of `tokens` -> the adjusted logits, fp32, on the CPU. A function of
        its arguments alone."""
        first, logits = len(tokens) - len(logits) + 1, finite(logits)
        if self._grammar is not None:
            forbidden = self._grammar.masks(tokens, first).logical_not_().to(logits.device)
            logits = logits.masked_fill_(forbidden, -torch.inf)  # `finite` returned a new tensor
        if self._biases is not None:
            logits = _further(logits, self._biases(logits))
        if self._penalties:
            text = Text(self._held(tokens), self._num_prompt)
            for penalty in self._penalties:
                logits = _further(logits, penalty(logits, text, first))
        return logits.cpu()

    def _held(self, tokens: Sequence[int]) -> Tokens:
        """`tokens` as an array; tokens that are held already are not copied again."""
        root = tokens
        while isinstance(root, Extended):
            root = root.head
        if root is not self._root:
            self._root, self._num_held = root, 0
        if len(tokens) > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * len(tokens))
        self._tokens[self._num_held : len(tokens)] = tokens[self._num_held :]
        self._num_held = len(root)
        return self._tokens[: len(tokens)]


def _further(before: Tensor, after: Tensor) -> Tensor:
    """The logits [n, V] after a step. Forbidden tokens stay forbidden; a row that would forbid all keeps `before`."""
    left = after.masked_fill(before == -torch.inf, -torch.inf)
    return torch.where((left == -torch.inf).all(-1, keepdim=True), before, left)


@dataclass(frozen=True)
class Distribution:
    """The distribution of one sequence. adjust: None where nothing depends on the tokens before a place."""

    adjust: Adjustment | None
    warp: Warping

    def probs(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """Probabilities [n, V] of logits [n, V]; tokens: as in `Adjustment`."""
        return self.warp(self.adjusted(logits, tokens))

    def adjusted(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        return logits if self.adjust is None else self.adjust(logits, tokens)

    def is_over(self, tokens: Sequence[int]) -> bool:
        """Whether a constraint allows only the end after `tokens`, the prompt and the text."""
        grammar = None if self.adjust is None else self.adjust.grammar
        return grammar is not None and grammar.is_over(tokens)


def distribution_of(
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    *,
    num_prompt: int,
    vocab_size: int,
    end_tokens: Collection[int],
    suppressed: Collection[int] = (),
    device: torch.device = CPU,
) -> Distribution:
    """The distribution of a sequence that begins with a prompt of `num_prompt` tokens. end_tokens: the tokens that end
    the text. suppressed: the model's tokens that are never drawn, as by a bias of -inf. device: of the logits. Raises
    UsageError where a bias names no token of the model, or where the constraint cannot be used."""
    biases = _biases(sampling, tokenizer, vocab_size, end_tokens, suppressed)
    rows = BiasRows(biases, vocab_size, device) if biases else None
    warping = replace(sampling, seed=None)
    penalties, text = penalties_of(sampling, tokenizer, end_tokens), None
    if sampling.constraint is not None:
        grammar = grammar_of(sampling.constraint, tokenizer, vocab_size, frozenset(end_tokens))
        text = GrammarText(grammar.state(), num_prompt, vocab_size)
    if text is None and not penalties:
        return Distribution(None, Warping(warping, biases, rows))
    return Distribution(Adjustment(num_prompt, text, rows, penalties), Warping(warping))


@lru_cache(maxsize=16)
def grammar_of(constraint: Constraint, tokenizer: Tokenizer, vocab_size: int, end_tokens: frozenset[int]) -> Grammar:
    """The compiled grammar of a constraint; results are cached. Raises UsageError."""
    return Grammar.compiled(constraint, tokenizer, vocab_size, end_tokens)


def _biases(
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    vocab_size: int,
    end_tokens: Collection[int],
    suppressed: Collection[int],
) -> Biases:
    ends = end_tokens if sampling.ignore_eos else ()
    never = sorted(token for token in {*suppressed, *ends} if token < vocab_size)
    named = ((_token(name, tokenizer, vocab_size), bias) for name, bias in sampling.logit_bias)
    return (*named, *((token, -np.inf) for token in never))


def _token(name: int | str, tokenizer: Tokenizer, vocab_size: int) -> int:
    """The id of a token that is named by its id or text. Raises UsageError."""
    if isinstance(name, str):
        tokens = tokenizer.encode_piece(name)
        if len(tokens) != 1:
            raise UsageError(
                f"logit-bias names {name!r}, which is {len(tokens)} tokens ({', '.join(map(str, tokens))}); name a "
                "text that is one token, or an id"
            )
        return tokens[0]
    if not 0 <= name < vocab_size:
        raise UsageError(f"logit-bias names token {name}, it must be from 0 to {vocab_size - 1}")
    return name
