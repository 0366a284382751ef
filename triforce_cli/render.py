"""Numbers to text: pure functions from stats, plan and progress to what is shown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload import units
from offload.metrics import LevelStats, LinkStats, Stats
from offload.units import size

if TYPE_CHECKING:
    from offload.plan.planner import Plan

NOTHING = "-"  # a number that does not exist in this run


def duration(seconds: float) -> str:
    """0.05 s, 4.2 s, 41 s, 3 min 07 s, 1 h 02 min."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def amount(count: float, unit: str) -> str:
    """A count of "bytes" or of "tokens"."""
    return size(count) if unit == "bytes" else f"{count:,.0f} {unit}"


def rate(count: float, unit: str, seconds: float) -> str:
    """812 tokens/s, 0.31 tokens/s, 1.2 GB/s. `seconds` is above 0."""
    if unit == "bytes":
        return f"{size(count / seconds)}/s"
    return f"{significant(count / seconds)} {unit}/s"


def latency(seconds: float) -> str:
    """Of a pass or a token: 19.0 ms, 1.78 s."""
    return f"{significant(1000 * seconds)} ms" if seconds < 1 else f"{significant(seconds)} s"


def gigabytes(count: float) -> str:
    """25.1 GB, of 10^9 bytes: what divided by a link's GB/s gives seconds."""
    return f"{significant(count / 1e9)} GB"


def significant(value: float | None) -> str:
    """Of units.py; None: there is no such number."""
    return NOTHING if value is None else units.significant(value)


def percent(done: float, total: float) -> int:
    """Rounded down, so that 100 means done."""
    return int(100 * done / total) if total else 100


def pace(done: float, total: float, unit: str, seconds: float, *, first: float = 0) -> str:
    """How a stage is going, `seconds` after `first` of it was done: "of 32,768 tokens, 812 tokens/s, 23 s left"."""
    parts = [f"of {amount(total, unit)}"]
    if done > first and seconds > 0:
        parts += [rate(done - first, unit, seconds), f"{duration((total - done) * seconds / (done - first))} left"]
    return ", ".join(parts)


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def path_text(path: Path) -> str:
    """As it can be written: bytes in it that are not UTF-8 become question marks."""
    return str(path).encode("utf-8", "replace").decode("utf-8")


def indented(text: str, width: int) -> Iterator[str]:
    """Wrapped; a path is not broken."""
    indent = "    "
    yield from textwrap.wrap(
        text,
        max(width, 40),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def stage_done(stage: str, total: float, unit: str, seconds: float, *, first: float = 0) -> str:
    """The line that a stage leaves which began after `first`: "prefill: 32,768 tokens in 40 s, 812 tokens/s"."""
    speed = f", {rate(total - first, unit, seconds)}" if seconds > 0 else ""
    return f"{stage}: {amount(total, unit)} in {duration(seconds)}{speed}"


def stats_table(stats: Stats, plan: Plan) -> str:
    """What `--stats` prints: at most 80 columns, the same at a terminal and in a file."""
    lines = [*_summary(stats), "", *_levels(stats.levels), "", *_links(stats), *_plan(plan)]
    return "\n".join(lines)


def answer_document(
    *,
    text: str,
    tokens: Sequence[int],
    finish_reason: str,
    stats: Stats | None,
    plan: Plan | None,
    model: Mapping[str, str | None],
    version: str,
) -> dict[str, Any]:
    """What `--json` prints. `stats` and `plan` are null when the run was interrupted before they existed."""
    return {
        "text": text,
        "tokens": list(tokens),
        "finish_reason": finish_reason,
        "stats": stats.as_dict() if stats else None,
        "plan": plan.as_dict() if plan else None,
        "model": dict(model),
        "version": version,
    }


def _summary(stats: Stats) -> list[str]:
    rows = [
        ("load", duration(stats.load_seconds), "", ""),
        (
            "prompt",
            duration(stats.prefill_seconds),
            _prompt_tokens(stats),
            f"{significant(stats.prompt_tokens_per_second)} tokens/s",
        ),
        ("first token", duration(stats.first_token_seconds), "after the start of prefill", ""),
        (
            "decode",
            duration(stats.decode_seconds),
            f"{stats.output_tokens:,} tokens",
            f"{significant(stats.decode_tokens_per_second)} tokens/s, "
            f"{significant(stats.milliseconds_per_token)} ms/token",
        ),
        ("refresh", duration(stats.refresh_seconds), "of decode: choosing and fetching chunks", ""),
    ]
    return [f"{name:<12}{time:>12}   {count:<15} {speed}".rstrip() for name, time, count, speed in rows]


def _prompt_tokens(stats: Stats) -> str:
    if not stats.reused_tokens:
        return f"{stats.prompt_tokens:,} tokens"
    return f"{stats.prompt_tokens - stats.reused_tokens:,} of {stats.prompt_tokens:,} new"


def _levels(levels: Sequence[LevelStats]) -> list[str]:
    header = ("level", "passes", "rows", "seconds", "ms/pass", "drafted", "acceptance", "tokens/round")
    rows: list[tuple[str, ...]] = [header]
    for level in levels:
        rows += [_level_cells(level), *_proposer_cells(level)]
    return [f"{r[0]:<11}{r[1]:>8}{r[2]:>8}{r[3]:>9}{r[4]:>9}{r[5]:>9}{r[6]:>12}{r[7]:>14}".rstrip() for r in rows]


def _proposer_cells(level: LevelStats) -> Iterator[tuple[str, ...]]:
    """Whose drafts they were, where there was a choice."""
    if len(level.drafted_by) < 2:
        return
    for name, drafted in sorted(level.drafted_by.items()):
        yield (f"  {name}", "", "", "", "", f"{drafted:,}", significant(level.accepted_by[name] / drafted), "")


def _level_cells(level: LevelStats) -> tuple[str, ...]:
    milliseconds = None if level.seconds_per_pass is None else 1000 * level.seconds_per_pass
    return (
        level.name,
        f"{level.passes:,}",
        f"{level.rows:,}",
        f"{level.seconds:,.2f}",
        significant(milliseconds),
        f"{level.drafted:,}",
        significant(level.acceptance),
        significant(level.tokens_per_round),
    )


def _links(stats: Stats) -> list[str]:
    if not any((link.bytes_to_device or link.bytes_to_host) for link in (stats.prefill_link, stats.decode_link)):
        return ["link        nothing moved"]
    return [
        f"link        prefill {_moved(stats.prefill_link)}",
        f"            decode  {_moved(stats.decode_link)}",
        f"            utilisation of full passes {significant(stats.link_utilisation)}",
    ]


def _moved(link: LinkStats) -> str:
    return f"{size(link.bytes_to_device)} to device, {size(link.bytes_to_host)} to host"


def levels_of(plan: Plan) -> str:
    """ "draft -> retrieval -> target, and lookups"."""
    return " -> ".join(plan.levels) + (", and lookups" if plan.lookup else "")


def lengths_of(plan: Plan) -> str:
    """How far is drafted, and over how much of the cache."""
    if not plan.gamma:
        return "nothing drafted"
    parts = [f"gamma {_most(plan, 'target', plan.gamma)}"]
    if plan.draft_gamma:
        parts.append(f"draft_gamma {_most(plan, 'retrieval', plan.draft_gamma)}")
    if plan.budget:
        parts.append(f"budget {plan.budget:,}, chunk {plan.chunk}")
    return ", ".join(parts)


def _most(plan: Plan, level: str, number: int) -> str:
    return f"up to {number}" if level in plan.adaptive else f"{number}"


def _plan(plan: Plan) -> list[str]:
    return [
        f"plan        {levels_of(plan)}",
        f"            {lengths_of(plan)}",
        f"            {plan.dtype} on {plan.device}, offload {','.join(plan.offload) or 'none'}",
        f"predicted   first token {duration(plan.predicted.first_token_seconds)}, "
        f"{significant(1000 * plan.predicted.seconds_per_token)} ms/token, "
        f"plain {significant(1000 * plan.predicted.plain_seconds_per_token)}",
    ]
