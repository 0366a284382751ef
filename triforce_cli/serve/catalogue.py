"""The catalogue of a server: the models that requests may name."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from offload.config.reading import read_config
from offload.hub.library import entries, locate, stored_name
from triforce_cli.apis.api import ApiError
from triforce_cli.setup.choice import NONE, choose_models
from triforce_cli.setup.engine import Setup


class Catalogue:
    """The first model, under its names, and where others are allowed, all that are installed. limit: tokens of their
    contexts at most; None: the models' own limits. created: when the server began, in seconds since 1970."""

    def __init__(
        self, first: Setup, names: tuple[str, ...], *, has_others: bool = False, limit: int | None = None
    ) -> None:
        self.names, self.created = names, int(time.time())
        self._first, self._has_others, self._limit = first, has_others, limit
        self._contexts = dict[str, int]()  # of models that were loaded

    def name_of(self, wanted: object) -> str:
        """The name by which a wanted model is loaded; null is the first one. Raises ApiError."""
        if wanted is None or wanted in self.names:
            return self.names[0]
        name = stored_name(wanted) if self._has_others and isinstance(wanted, str) else None
        if name is None:
            raise self.no_model(wanted)
        return self.names[0] if self._is_first(name) else name

    def names_of(self, name: str) -> tuple[str, ...]:
        """The names of a model that is loaded by this one."""
        return self.names if name == self.names[0] else (name,)

    def setup_of(self, name: str) -> Setup:
        """The set-up of a model. An installed one has the draft that suits it, and a context of no more than its own
        limit. Raises ModelError."""
        if name == self.names[0]:
            return self._first
        options = self._first.options
        models = choose_models(Path(name), NONE if self._first.models.draft is None else None)
        if options.context is not None:
            options = replace(options, context=min(options.context, read_config(models.target).context_limit))
        return replace(self._first, models=models, options=options)

    def loaded(self, name: str, context: int) -> None:
        """A model has so many tokens of context, as it was loaded."""
        self._contexts[name] = context

    def listed(self) -> list[dict[str, Any]]:
        """The models as OpenAI's and Anthropic's clients know them. The context of one that was not loaded yet may
        become shorter."""
        ours = [(name, self._contexts[self.names[0]]) for name in self.names]
        return [
            {
                "id": name, "object": "model", "type": "model", "display_name": name, "created": self.created,
                "owned_by": "triforce", "context_length": context,
            }
            for name, context in (*ours, *self._others())
        ]  # fmt: skip

    def _others(self) -> Iterator[tuple[str, int]]:
        """(name, context) of the installed models besides the first."""
        for entry in entries() if self._has_others else ():
            if entry.config is None or entry.problem or entry.state != "whole" or self._is_first(entry.name):
                continue
            limit = entry.config.context_limit
            most = limit if self._limit is None else min(limit, self._limit)
            yield entry.name, self._contexts.get(entry.name, most)

    def _is_first(self, name: str) -> bool:
        return locate(name) == self._first.models.target

    def no_model(self, name: object) -> ApiError:
        """The refusal of a name that is none of a model."""
        known, shown = ", ".join(self.names), json.dumps(name)[:80]
        given = shlex.quote(name) if isinstance(name, str) and name.isprintable() and 0 < len(name) <= 80 else "NAME"
        if self._has_others:
            remedy = "/v1/models lists them all"
        else:
            remedy = f"triforce serve --serve-as {given} adds a name, --models the models that are installed"
        return ApiError(404, f"there is no model {shown}; there is {known} ({remedy})", "model_not_found")
