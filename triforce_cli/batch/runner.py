"""The batch of `triforce generate --input-jsonl`: all records run on one plan, made for the longest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import DoesNotFit
from triforce_cli.answering.answer import Answer
from triforce_cli.answering.ending import LENGTH, End, check_ends
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.answering.several import Answers
from triforce_cli.batch.prompts import Prompts
from triforce_cli.batch.records import Id, Record, after, named, read_records
from triforce_cli.batch.results import ResultFile, Results, ResultStream
from triforce_cli.ground import log
from triforce_cli.ground.inputs import Note
from triforce_cli.ground.text import duration
from triforce_cli.options.answering import Layout
from triforce_cli.screen.output import Output
from triforce_cli.screen.progress import TimeLeft
from triforce_cli.screen.utf8 import read_input
from triforce_cli.setup.engine import Prepared, Setup, open_engine

if TYPE_CHECKING:
    from offload.metrics import Stats
    from offload.plan.planner import Plan
    from offload.plan.request import Request

_ORDER = ("text", "thoughts", "tool_calls", "tokens", "logprobs", "finish_reason", "citations")  # of a result


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One `triforce generate` of many prompts, parsed. wanted: defaults for fields that a line leaves out.
    num_sequences: prompts that run at a time; None: the number that is predicted to be the fastest."""

    source: Path
    target: Path | None
    wanted: Wanted
    num_sequences: int | None
    layout: Layout
    setup: Setup
    echo: bool
    quiet: bool
    as_json = True

    def run(self) -> None:
        """Check every line, then load, then answer them."""
        with Output(quiet=self.quiet) as output:
            text = read_input(self.source, "the prompts", note=output.note)
            records = read_records(text, str(self.source), self.wanted)
            with ResultStream(output.document) if self.target is None else ResultFile(self.target) as results:
                rest = after(records, results.done, str(self.target))
                if results.done:
                    output.note(f"{len(results.done)} of {len(records)} results are in {self.target}")
                if rest:
                    with self._told_if_stopped(results, len(records), output):
                        self._answer(records, rest, results, output)
                _tell_cut(records, results.finish_reasons, output)

    @contextmanager
    def _told_if_stopped(self, results: Results, total: int, output: Output) -> Iterator[None]:
        """If the run does not finish, note how many results the file has."""
        try:
            yield
        except BaseException:
            if self.target is not None:
                output.note(
                    f"{len(results.done)} of {total} results are in {self.target}; the same command goes on from there"
                )
            raise

    def _answer(self, records: Sequence[Record], rest: Sequence[Record], results: Results, output: Output) -> None:
        prepared = self._setup(records).prepare(output)
        prompts = self._prompts(prepared, records, output)
        plan = _plan(prepared.request, records, prompts)
        plan = prepared.request.together(plan, self.num_sequences, most=len(rest))
        output.planned(plan)
        left = TimeLeft([1] * len(rest))
        num_tokens, by_number = 0, {record.number: record for record in rest}
        waiting = ((each.number, Answer(prompts[each.number], each.wanted, prepared.tokenizer)) for each in rest)
        with open_engine(prepared, plan, on_progress=output.progress) as engine, Answers[int](engine) as answers:
            left.next_step()
            ended = answers.each(waiting, on_progress=output.progress)
            for count, (number, answer, stats) in enumerate(ended, start=len(records) - len(rest) + 1):
                record = by_number[number]
                if answer.is_cut:
                    output.note(f"{record.name}: out of time; what had come is kept")
                result = self._result(record, answer, stats, output.note)
                num_tokens += len(result["tokens"])
                results.add(result)
                log.event(record.name, result["stats"])
                output.note(_progress(count, len(records), result, left.next_step()))
        if len(rest) > 1:
            output.note(_in_all(len(rest), num_tokens, left.elapsed))

    def _setup(self, records: Sequence[Record]) -> Setup:
        """The setup, with attention masses recorded if a line wants citations. Raises UsageError if a given plan does
        not record them."""
        if not any(record.wanted.cites for record in records):
            return self.setup
        from offload.plan.plan_file import options_beside

        options, given = replace(self.setup.options, masses=True), self.setup.given
        return replace(self.setup, options=options if given is None else options_beside(given, options))

    def _prompts(self, prepared: Prepared, records: Sequence[Record], output: Output) -> dict[int, Prompt]:
        """The prompts by the records' numbers. Raises UsageError for a line that this model cannot answer."""
        prompts = Prompts(prepared, self.layout)
        for record in records:
            with named(record.name):
                prompts.check(record)
        if first := next((record for record in records if record.messages is not None), None):
            output.note(prompts.notice(first.wanted))
        found: dict[int, Prompt] = {}
        for record in records:
            with named(record.name):
                found[record.number] = prompt = prompts.of(record)
            for note in (*record.notes, *prompt.notes):
                output.note(f"{record.name}: {note}")
        return found

    def _result(self, record: Record, answer: Answer, stats: Stats, note: Note) -> dict[str, Any]:
        found = answer.as_dict(note=lambda notice: note(f"{record.name}: {notice}" if notice else ""))
        return {
            "id": record.id,
            **({"prompt": record.prompt} if self.echo and record.messages is None else {}),
            **{name: found[name] for name in _ORDER if name in found},
            "stats": stats.as_dict(),
            **({"meta": record.meta} if record.meta else {}),
        }


def _tell_cut(records: Sequence[Record], finish_reasons: Mapping[Id, str], output: Output) -> None:
    """Note how many results were cut at max_tokens. Raises the errors of `check_ends`."""
    if num_cut := sum(finish_reasons[record.id] == LENGTH for record in records):
        output.note(f"{num_cut} of {len(records)} results were cut at max_tokens")
    constraints = {record.id: record.wanted.sampling.constraint for record in records}
    named = {id_: "" if constraint is None else constraint.name for id_, constraint in constraints.items()}
    check_ends(End(record.name, finish_reasons[record.id], named[record.id]) for record in records)


def _plan(request: Request, records: Sequence[Record], prompts: Mapping[int, Prompt]) -> Plan:
    """The plan for the longest of all records, including those already done: a resumed run has the same plan and, with
    a seed, the same texts. Raises DoesNotFit."""
    sizes = [(len(prompts[record.number].tokens), record.wanted.max_tokens, record) for record in records]
    num_prompt_tokens, max_tokens, longest = max(sizes, key=lambda size: size[0] + size[1])
    try:
        return request.plan(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
    except DoesNotFit as error:
        raise DoesNotFit(f"{longest.name}: {error}") from error


def _progress(number: int, total: int, result: Mapping[str, Any], left: float | None) -> str:
    """The note after a result, such as: 3 of 120: id 'x', 812 prompt tokens, 256 new; 9 min 20 s left."""
    sizes = f"{result['stats']['prompt_tokens']:,} prompt tokens, {len(result['tokens'])} new"
    line = f"{number} of {total}: id {result['id']!r}, {sizes}"
    return f"{line}; {duration(left)} left" if left and number < total else line


def _in_all(num_results: int, num_tokens: int, seconds: float) -> str:
    """The note at the end, such as: 120 results, 30,720 new tokens in 12 min 5 s: 42.4 a second."""
    rate = f"{num_tokens / seconds:.1f} a second"
    return f"{num_results} results, {num_tokens:,} new tokens in {duration(seconds)}: {rate}"
