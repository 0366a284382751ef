"""The text that a chat shows besides the replies: pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offload.units import size
from triforce_cli.render import text
from triforce_cli.render.text import line_text

if TYPE_CHECKING:
    from offload.metrics import Stats
    from triforce_cli.chat.background import BackgroundWork
    from triforce_cli.chat.conversation import Conversation
    from triforce_cli.chat.formats import Part
    from triforce_cli.citations import Citation

_NUM_OFFERED = 4
_SHOWN_REPLY = 600  # characters


def room(used: int, limit: int) -> str:
    """ "1,234 of 8,192 tokens of context used, 6,958 left"."""
    return f"{used:,} of {limit:,} tokens of context used, {max(limit - used, 0):,} left"


def session(num_turns: int, num_tokens: int, num_bytes: int) -> str:
    turns = "1 turn" if num_turns == 1 else f"{num_turns} turns"
    return f"going on after {turns}: {num_tokens:,} tokens kept, {size(num_bytes)} on the disk"


def last_turn(conversation: Conversation) -> str:
    """The last question and the end of its reply, as a reminder."""
    if not conversation.turns:
        return ""
    turn = conversation.turns[-1]
    shown = turn.reply if len(turn.reply) <= _SHOWN_REPLY else f"... {turn.reply[-_SHOWN_REPLY:]}"
    return f"> {turn.user}\n{shown}"


def kept(folder: Path | None, num_tokens: int, num_bytes: int) -> str:
    return f"kept in {line_text(str(folder))}: {num_tokens:,} tokens, {size(num_bytes)}"


def status(used: int, limit: int, stats: Stats | None, ahead: BackgroundWork, width: int) -> str:
    """The line below the prompt, cut to `width` columns."""
    parts, progress, left = [f"context {used:,} of {limit:,}"], ahead.progress, ahead.seconds_left
    if progress is not None and progress.done < progress.total:
        seconds = "" if left is None else f", {text.duration(left)} left"
        parts.append(f"{progress.stage} {text.percent(progress.done, progress.total)}%{seconds}")
    if stats is not None and stats.milliseconds_per_token is not None:
        parts.append(f"{text.significant(stats.milliseconds_per_token)} ms/token")
        target = next(level for level in stats.levels if level.name == "target")
        if target.acceptance is not None:
            parts.append(f"{text.percent(target.acceptance, 1)}% accepted")
    line = " | ".join(parts)
    return line if len(line) < width else line[: max(width - 2, 0)] + "\u2026"


def documents_added(rows: Sequence[tuple[tuple[str, str], int]], used: int, limit: int) -> Iterator[str]:
    """A line for each of a few documents: ((name, kind), tokens); in the last one the room that is left."""
    names = [line_text(f"{name}, {kind}" if kind else name) for (name, kind), _ in rows]
    lines = [f"{name}: {count:,} tokens" for name, (_, count) in zip(names, rows, strict=True)]
    if len(lines) > _NUM_OFFERED:
        lines = [*lines[:_NUM_OFFERED], f"{len(lines):,} documents: {sum(count for _, count in rows):,} tokens"]
    yield from lines[:-1]
    yield f"{lines[-1]}; {room(used, limit)}"


def too_long(needed: int, limit: int, droppable: Sequence[Part]) -> str:
    return f"{needed:,} tokens are needed and the context ends at {limit:,}; {_offer(droppable)}"


def nearly_full(used: int, limit: int, droppable: Sequence[Part]) -> str:
    if used >= limit:
        return f"the context is full: {used:,} of {limit:,} tokens; {_offer(droppable)}"
    return f"the context is nearly full: {room(used, limit)}; {_offer(droppable)}"


def cited(citations: Sequence[Citation]) -> str:
    """The passages that a reply attended to most, a line each."""
    return "\n".join(f"[{number}] {citation}" for number, citation in enumerate(citations, start=1))


def cut_short(max_tokens: int | None) -> str:
    """The note on a reply that was cut short. None: the context is full."""
    if max_tokens is None:
        return "the reply ends here, where the context does; /drop makes room"
    return (
        f"the reply ends here, at max-tokens {max_tokens}; ask to go on, or /set max-tokens {2 * max_tokens} and /regen"
    )


def parts_table(parts: Sequence[Part], used: int, limit: int) -> str:
    """A table of the tokens of each part, and of those left."""
    rows = [(_name(part), f"{part.num_tokens:,}") for part in parts]
    rest = ("left", f"{limit - used:,}") if used <= limit else ("too many", f"{used - limit:,}")
    rows += [("", ""), ("all of it", f"{used:,}"), rest]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {count:>9}".rstrip() for name, count in rows)


def commands(rows: Sequence[tuple[str, str]]) -> str:
    keys = [
        ("Enter", "send"),
        ("Alt-Enter", 'a new line; so is Enter after a line that begins with """'),
        ("Ctrl-C", "stop the reply, keep what came"),
        ("//...", "a message that begins with a slash"),
    ]
    width = max(len(name) for name, _ in (*rows, *keys))
    return "\n".join(f"{name.ljust(width)}  {about}" for name, about in (*rows, *keys))


def _offer(droppable: Sequence[Part]) -> str:
    """A line that says what can be dropped to make room."""
    if not droppable:
        return "begin anew with /clear, or with a larger --context where the model has one"
    documents = sorted((part for part in droppable if part.kind == "document"), key=lambda part: -part.num_tokens)
    named = [f"/drop {line_text(part.name)} frees {part.num_tokens:,}" for part in documents[:_NUM_OFFERED]]
    num_turns = max((part.number for part in droppable if part.kind == "turn"), default=0)
    for count in sorted({min(1, num_turns), num_turns // 2} - {0}):
        freed = sum(part.num_tokens for part in droppable if part.number <= count)
        which = "the oldest turn" if count == 1 else f"the {count} oldest turns"
        named.append(f"/drop {count} ({which}) frees {freed:,}")
    return f"{', '.join(named)}; /tokens shows all of it, /clear begins anew"


def _name(part: Part) -> str:
    if part.kind == "document":
        return f"document {line_text(part.name)}"
    return f"turn {part.number}" if part.kind == "turn" else part.kind
