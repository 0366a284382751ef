"""A served model: loaded, with a reader of its requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from offload.plan.planner import Plan
from triforce_cli.answering.request import Wanted
from triforce_cli.answering.several import Answers
from triforce_cli.batch.prompts import Prompts
from triforce_cli.options.serving import CONTEXT, ServerFlags
from triforce_cli.screen.output import Output
from triforce_cli.serve.job import Job
from triforce_cli.serve.reader import Reader
from triforce_cli.serve.status import planned
from triforce_cli.setup.engine import Prepared, Setup, open_engine


@dataclass(frozen=True)
class Served:
    """A loaded model. names: in requests. context: tokens. planned: the part of the status that follows from its
    plan."""

    names: tuple[str, ...]
    context: int
    reader: Reader
    planned: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Loader:
    """Loads models with the options of a server. wishes: for answers, where requests have none."""

    flags: ServerFlags
    wishes: Wanted
    output: Output

    @contextmanager
    def loaded(self, setup: Setup, names: tuple[str, ...]) -> Iterator[tuple[Served, Answers[Job]]]:
        """A model and its answers; at the end its memory is given back. Raises ModelError, DoesNotFit, UsageError."""
        flags, output = self.flags, self.output
        prepared = setup.prepare(output, sampling=self.wishes.sampling)
        output.note(prepared.models.answers_note)
        plan = _plan(prepared, flags.batch)
        output.planned(plan)
        context = plan.request.capacity
        prompts = Prompts(prepared.limited(context), flags.wanted.chat.layout())
        output.note(prompts.notice(self.wishes))
        reader = Reader(
            prompts,
            self.wishes,
            context=context,
            most_choices=flags.max_waiting,
            cites=flags.cite,
            keeps_billing=flags.keep_billing,
        )
        about = {**planned(plan, prepared.request.hardware.device_name), "cites": flags.cite}
        with open_engine(prepared, plan, on_progress=output.progress) as engine, Answers[Job](engine) as answers:
            yield Served(names, context, reader, about), answers


def _plan(prepared: Prepared, num_sequences: int) -> Plan:
    """The plan for the context. Raises DoesNotFit."""
    request = prepared.request
    context = request.context
    if request.options.context is None:
        context = min(CONTEXT, request.largest_context() or context)
    plan = request.plan(num_prompt_tokens=context - 1, max_tokens=1)
    return request.together(plan, num_sequences, most=num_sequences)
