"""The prompts of records, for one model."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from offload.decode.sampling import SamplingParams
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.batch.records import Record
from triforce_cli.documents import Document
from triforce_cli.options.answering import Layout
from triforce_cli.prompts.adaptations import with_calls_as_texts
from triforce_cli.setup.engine import Prepared
from triforce_cli.tools.tools import check_variables, has_place

if TYPE_CHECKING:
    from triforce_cli.prompts.formats import ChatFormat


_MOST_CHECKED, _MOST_REMEMBERED = 64, 8192  # parameters that are known to be supported; characters of a constraint


class Prompts:
    """Makes the prompts of records."""

    def __init__(self, prepared: Prepared, layout: Layout) -> None:
        self._prepared, self._layout = prepared, layout
        self._formats: dict[tuple[bool, bool], ChatFormat] = {}  # with thoughts or without, and with a constraint
        self._check = lru_cache(_MOST_CHECKED)(self._check_sampling)

    def notice(self, wanted: Wanted) -> str:
        """A note on the chat template for the person, or ""."""
        return self._format(wanted).notice

    def check(self, record: Record) -> None:
        """Raises UsageError for sampling parameters that this model does not support. Parameters that were checked
        lately are not checked again."""
        sampling = replace(record.wanted.sampling, seed=None)
        constraint = sampling.constraint
        is_small = constraint is None or len(constraint.text) <= _MOST_REMEMBERED
        (self._check if is_small else self._check_sampling)(sampling)

    def of(self, record: Record, defaults: Mapping[str, Any] | None = None) -> Prompt:
        """The prompt of a record. defaults: variables of the chat template, for records without them; a template need
        not have them. Raises UsageError if the template refuses its messages, or has no variable for one of its fields,
        DoesNotFit for a text that certainly is too long."""
        if record.messages is None:
            tokens = self._prepared.prompt_tokenizer.encode(record.prompt)
            return Prompt(array("i", tokens), (Document("prompt", record.prompt),))
        found, messages = self._format(record.wanted), record.messages
        check_variables(found.template, [*record.variables])
        if messages.have_calls and not has_place(found.template, "tool_calls"):
            messages = with_calls_as_texts(messages)
        prompt = found.prompt_of_messages(messages, {**(defaults or {}), **record.variables})
        if prompt.calls is not None:
            prompt = replace(prompt, calls=replace(prompt.calls, choice=record.choice))
        if (sampling := prompt.sampling(record.wanted)) != record.wanted.sampling:
            self._check_sampling(sampling)
        return replace(prompt, tokens=array("i", prompt.tokens))

    def _check_sampling(self, sampling: SamplingParams) -> None:
        from offload.engine.request import check_sampling

        check_sampling(sampling, self._prepared.request.target, self._prepared.tokenizer)

    def _format(self, wanted: Wanted) -> ChatFormat:
        kind = wanted.may_think, wanted.sampling.constraint is None
        if kind not in self._formats:
            self._formats[kind] = self._layout.format(self._prepared.prompt_tokenizer, wanted)
        return self._formats[kind]
