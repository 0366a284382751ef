"""A request for an answer: what is wanted of it, and the prompt that the model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from offload.decode.sampling import SamplingParams, ThoughtBudget
from offload.engine.request import GenerationRequest
from triforce_cli.answering.calls import Calls
from triforce_cli.answering.citations import ASKED
from triforce_cli.answering.thoughts import Marks, Splitter

if TYPE_CHECKING:
    from triforce_cli.documents import Document


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Wishes for an answer. logprobs: so many of the likeliest tokens at each place, None: no scores. cites: the
    passages that it attends to most are looked for. thinks: False where a model that writes thoughts is to write none.
    thought_tokens: a limit on thoughts, None: there is none. timeout: seconds after which the answer is broken off."""

    max_tokens: int
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    cites: bool = False
    thinks: bool = True
    thought_tokens: int | None = None
    timeout: float | None = None

    @property
    def may_think(self) -> bool:
        """With a constraint a model writes no thoughts: they would have to follow it."""
        return self.thinks and self.sampling.constraint is None


@dataclass(frozen=True)
class Prompt:
    """The tokens that the model reads, and how the answer to them begins and ends.

    documents: in it, where citations are looked for. is_chat: the answer is a reply in a conversation, without white
    space before it. begin: text at the end of the prompt that is a part of the reply. marks: of thoughts that the reply
    may have; None: none. begun: the chat template has opened thoughts. named: tokens that are marks by themselves,
    special or not, by their names. calls: reads those of the tools that were offered; None: none were. end_tokens,
    stops: of the chat template, besides the model's own end tokens.
    """

    tokens: Sequence[int]
    documents: tuple[Document, ...] = ()
    is_chat: bool = False
    begin: str = ""
    marks: Marks | None = None
    begun: bool = False
    named: Mapping[int, str] = field(default_factory=dict)
    calls: Calls | None = None
    end_tokens: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()

    def splitter(self) -> Splitter:
        names = frozenset(self.named.values())
        return Splitter(self.marks, begun=self.begun, begin=self.begin, named=names, trims=self.is_chat)

    def budget(self, tokens: int | None) -> ThoughtBudget | None:
        """So many tokens of thoughts; None where there is no limit, or no thoughts can come any more."""
        splitter = self.splitter()
        splitter.push("")
        if tokens is None or self.marks is None or splitter.state == "said":
            return None
        is_open = self.begun or splitter.state == "thought"
        return ThoughtBudget(tokens, self.marks.end, "" if is_open else self.marks.open)

    def request(self, wanted: Wanted, *, max_tokens: int, reuse: bool = False) -> GenerationRequest:
        """The request to an engine. max_tokens: as many as there is room for. reuse: see GenerationRequest."""
        budget = self.budget(wanted.thought_tokens)
        return GenerationRequest(
            list(self.tokens),
            wanted.sampling if budget is None else replace(wanted.sampling, thoughts=budget),
            max_tokens=min(wanted.max_tokens, max_tokens),
            stop=(*wanted.stops, *self.stops),
            end_tokens=self.end_tokens,
            reuse=reuse,
            logprobs=wanted.logprobs,
            passages=ASKED if wanted.cites else 0,
            named=self.named,
        )
