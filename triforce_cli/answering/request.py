"""A request for an answer: the user's wishes, and the prompt's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from offload.decode.sampling import SamplingParams, ThoughtBudget
from offload.engine.request import GenerationRequest
from offload.seeds import seed_within
from triforce_cli.answering.citations import ASKED
from triforce_cli.answering.thoughts import Marks, Splitter
from triforce_cli.tools.call_grammar import with_calls
from triforce_cli.tools.calls import Calls

if TYPE_CHECKING:
    from triforce_cli.documents import Document


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Wishes for an answer. logprobs: the number of likeliest tokens to report at each position; None: no scores.
    cites: find the passages that the answer draws on. thinks: False turns off a model's thoughts. thought_tokens: a
    limit on thoughts, or None. timeout: seconds until the answer is stopped."""

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
        """True if thoughts are allowed. With a constraint they are not: they would have to follow it."""
        return self.thinks and self.sampling.constraint is None


@dataclass(frozen=True)
class Earlier:
    """The beginning of an answer, from an earlier run. num_tokens: the last ones of the prompt. num_text, num_thoughts:
    the characters that were written of it."""

    num_tokens: int = 0
    num_text: int = 0
    num_thoughts: int = 0


@dataclass(frozen=True)
class Prompt:
    """The tokens that the model reads, and the marks and ends of its answer.

    documents: in the prompt, searched for citations. is_chat: the answer is a reply in a conversation; its leading
    white space is removed. begin: text at the end of the prompt that belongs to the reply. marks: of thoughts in the
    reply, or None. begun: the chat template has opened thoughts. named: tokens that are marks by themselves, special or
    not, by their names. calls: the parser of tool calls; None if no tools are offered. end_tokens, stops: of the chat
    template, besides the model's own end tokens. earlier: the beginning of the answer, if the prompt has one. notes:
    lines for the log on what was left out of the prompt, or changed for the template.
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
    earlier: Earlier = Earlier()
    notes: tuple[str, ...] = ()

    def splitter(self) -> Splitter:
        names = frozenset(self.named.values())
        return Splitter(self.marks, begun=self.begun, begin=self.begin, named=names, trims=self.is_chat)

    def without_begin(self) -> Prompt:
        """The prompt of whose answer `begin` is not written, as HTTP APIs have it."""
        splitter = self.splitter()
        pieces = [*splitter.push(""), *splitter.flush()]
        said, thoughts = (sum(len(each.text) for each in pieces if each.is_thought is kind) for kind in (False, True))
        return replace(self, earlier=replace(self.earlier, num_text=said, num_thoughts=thoughts))

    def budget(self, tokens: int | None) -> ThoughtBudget | None:
        """The limit of `tokens` on thoughts; None without a limit, or if thoughts are already closed."""
        ahead = self._marks_ahead()
        if tokens is None or self.marks is None or ahead is None:
            return None
        return ThoughtBudget(tokens, self.marks.closes(may_call=self.calls is not None), ahead[0])

    def sampling(self, wanted: Wanted) -> SamplingParams:
        """The sampling parameters of the answer. A constraint is on an answer alone: where tools are offered, the reply
        may be calls instead. What is demanded of calls is a constraint on what follows thoughts. Raises UsageError if
        their form cannot be followed."""
        answer = wanted.sampling.constraint
        if self.calls is None or (answer is None and not self.calls.follow):
            return wanted.sampling
        thoughts = self._marks_ahead() if answer is None else None
        return replace(wanted.sampling, constraint=with_calls(answer, self.calls, self.named, thoughts))

    def _marks_ahead(self) -> tuple[str, str] | None:
        """The marks of thoughts that may still open, "" if they are open, and close; None after thoughts."""
        splitter = self.splitter()
        splitter.push("")
        if self.marks is None or splitter.state == "said":
            return None
        is_open = self.begun or splitter.state == "thought"
        return "" if is_open else self.marks.open, self.marks.close

    def request(self, wanted: Wanted, *, max_tokens: int, reuse: bool = False) -> GenerationRequest:
        """The request to an engine. max_tokens: the tokens that the context has room for. reuse: see
        GenerationRequest."""
        budget, begun = self.budget(wanted.thought_tokens), self.earlier.num_tokens
        marks = () if self.marks is None else self.marks.tokens
        anywhere = tuple(stop for stop in wanted.stops if not marks or any(mark in stop for mark in marks))
        sampling = replace(self.sampling(wanted), seed=seed_within(wanted.sampling.seed, begun))
        return GenerationRequest(
            list(self.tokens),
            sampling if budget is None else replace(sampling, thoughts=budget),
            max_tokens=min(wanted.max_tokens, max_tokens),
            stop=(*anywhere, *self.stops),
            answer_stop=tuple(stop for stop in wanted.stops if stop not in anywhere),
            answer=None if self.marks is None else self.splitter,
            end_tokens=self.end_tokens,
            begun=begun,
            reuse=reuse,
            logprobs=wanted.logprobs,
            passages=ASKED if wanted.cites else 0,
            named=self.named,
        )
