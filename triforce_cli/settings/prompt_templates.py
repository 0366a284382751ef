"""Prompt templates: prompts with placeholders, from the tables [templates.NAME] of the configuration file.

[templates.review]
prompt = "Review this for {reader}:\\n\\n{input}"     # {input}: the question, or piped text; others by --var
system = "You are an editor."                       # optional, and so is begin-reply
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.errors import UsageError
from offload.fields import TEXT, Fields, Kind
from triforce_cli.settings.own_names import check_name
from triforce_cli.settings.placeholders import placeholders_in, replaced

TABLE = "templates"
PROMPT, SYSTEM, BEGIN_REPLY = "prompt", "system", "begin-reply"
TEXTS = (PROMPT, SYSTEM, BEGIN_REPLY)
INPUT = "input"  # the placeholder of the question
_PROMPT = Kind("a text, not empty", lambda value: TEXT.fits(value) and value.strip() != "")


@dataclass(frozen=True)
class PromptTemplate:
    """A question with placeholders, its system message and the beginning of its reply; "" for no such."""

    name: str
    prompt: str
    system: str = ""
    begin_reply: str = ""

    @classmethod
    def read(cls, name: str, table: Any, file: Path | None) -> PromptTemplate:
        """The template in a table. Raises UsageError."""
        place = f"{file}: {TABLE}.{name}"
        if not isinstance(table, Mapping):
            raise UsageError(f"{place} must be a table with the key {PROMPT}")
        if unknown := sorted(table.keys() - set(TEXTS)):
            raise UsageError(f"{place}.{unknown[0]} is not known; there are {PROMPT}, {SYSTEM} and {BEGIN_REPLY}")
        fields = Fields(table, place, UsageError, between=".")
        return cls(name, fields.get(PROMPT, _PROMPT), fields.get(SYSTEM, TEXT, ""), fields.get(BEGIN_REPLY, TEXT, ""))

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The names of all placeholders, each once, in the order of the texts."""
        texts = (self.system, self.prompt, self.begin_reply)
        return tuple(dict.fromkeys(name for text in texts for name in placeholders_in(text)))

    @property
    def takes_input(self) -> bool:
        return INPUT in self.placeholders

    def check(self, given: Sequence[str]) -> None:
        """Raises UsageError for a placeholder, but {input}, that is not among the names given by --var."""
        if INPUT in given:
            raise UsageError(f"--var names {INPUT}, and {{{INPUT}}} is the question or piped text; leave it out")
        wanted = [name for name in self.placeholders if name != INPUT]
        if missing := [name for name in wanted if name not in given]:
            options = " ".join(f"--var {name}=TEXT" for name in missing)
            raise UsageError(f"the template {self.name} has the placeholder {{{missing[0]}}}; give {options}")

    def filled(self, values: Mapping[str, str]) -> PromptTemplate:
        """The template with its placeholders replaced. values: of all of them."""
        texts = (replaced(text, values, self.name) for text in (self.prompt, self.system, self.begin_reply))
        return PromptTemplate(self.name, *texts)


@dataclass(frozen=True)
class PromptTemplates:
    """Templates by name. file: where they are from, None without a file."""

    templates: Mapping[str, PromptTemplate] = field(default_factory=dict)
    file: Path | None = None

    @classmethod
    def read(cls, table: Any, file: Path | None) -> PromptTemplates:
        """The templates in a table of tables. Raises UsageError."""
        if not isinstance(table, Mapping):
            raise UsageError(f"{file}: {TABLE} must be tables of prompts, such as [{TABLE}.review]")
        for name in table:
            check_name(name, f"{file}: {TABLE}")
        return cls({name: PromptTemplate.read(name, inner, file) for name, inner in table.items()}, file)

    def named(self, name: str) -> PromptTemplate:
        """The template called `name`. Raises UsageError, which lists all."""
        if name not in self.templates:
            known = ", ".join(self.templates) or "none"
            place = "the configuration file" if self.file is None else self.file
            raise UsageError(f"{place} has no template {name!r}; there are: {known} ([{TABLE}.NAME] makes one)")
        return self.templates[name]
