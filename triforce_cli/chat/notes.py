"""The text that a chat shows besides the replies. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offload.units import size
from triforce_cli.answering.ending import ends_here, may_not_match
from triforce_cli.ground import text
from triforce_cli.ground.text import line_text

if TYPE_CHECKING:
    from offload.grammar.constraint import Constraint
    from offload.metrics import Stats
    from triforce_cli.chat.background import BackgroundWork
    from triforce_cli.prompts.conversation import Conversation
    from triforce_cli.prompts.formats import Part

NUM_OFFERED = 4  # documents named in one note
_SHOWN_REPLY = 600  # characters


@dataclass(frozen=True)
class Drop:
    """A choice for /drop: a document's name, or a number of oldest turns; num_turns: 0 for a document. num_tokens: of
    context that it frees."""

    argument: str
    num_turns: int
    num_tokens: int

    def __str__(self) -> str:
        which = "the oldest turn" if self.num_turns == 1 else f"the {self.num_turns} oldest turns"
        return f"/drop {line_text(self.argument)}{f' ({which})' if self.num_turns else ''} frees {self.num_tokens:,}"


def room(used: int, limit: int) -> str:
    """The use of the context: "1,234 of 8,192 tokens of context used, 6,958 left"."""
    if used > limit:
        return f"all {limit:,} tokens of context used, {used - limit:,} more are needed"
    return f"{used:,} of {limit:,} tokens of context used, {limit - used:,} left"


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
    filled = f"{used:,} of {limit:,}" if used <= limit else f"{limit:,} of {limit:,}, {used - limit:,} too many"
    parts, progress, left = [f"context {filled}"], ahead.progress, ahead.seconds_left
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
    """Yield a line for each of a few documents: ((name, kind), tokens). The last line has the room that is left."""
    names = [line_text(f"{name}, {kind}" if kind else name) for (name, kind), _ in rows]
    lines = [f"{name}: {count:,} tokens" for name, (_, count) in zip(names, rows, strict=True)]
    if len(lines) > NUM_OFFERED:
        lines = [*lines[:NUM_OFFERED], f"{len(lines):,} documents: {sum(count for _, count in rows):,} tokens"]
    yield from lines[:-1]
    yield f"{lines[-1]}; {room(used, limit)}"


def too_long(needed: int, limit: int, drops: Sequence[Drop]) -> str:
    return f"{needed:,} tokens are needed and the context ends at {limit:,}; {_offer(drops)}"


def nearly_full(used: int, limit: int, drops: Sequence[Drop]) -> str:
    degree = "full" if used >= limit else "nearly full"
    return f"the context is {degree}: {room(used, limit)}; {_offer(drops)}"


def compacted(num_turns: int, freed: int, used: int, limit: int) -> str:
    """The note after a summary took the place of the oldest turns. freed: tokens of context."""
    return (
        f"the summary is {freed:,} tokens shorter than {_oldest(num_turns)}, which /compact undo brings back; "
        f"{room(used, limit)}"
    )


def nothing_freed(num_turns: int, more: int) -> str:
    """The message if a summary would not be shorter than the turns. more: tokens that it has more."""
    return f"the summary would be {more:,} tokens longer than {_oldest(num_turns)}; the conversation stays as it is"


def _oldest(num_turns: int) -> str:
    return "the oldest turn" if num_turns == 1 else f"the {num_turns} oldest turns"


def no_room_for_a_summary(drops: Sequence[Drop]) -> str:
    return f"there is no room for a summary, even of the oldest turn; {_offer(drops)}"


def cut_short(max_tokens: int | None, constraint: Constraint | None) -> str:
    """The note on a reply that was cut short. max_tokens: its limit; None: the context is full. constraint: one that
    the reply has to follow."""
    limit = None if max_tokens is None else f"max-tokens {max_tokens}"
    remedy = "/drop makes room" if max_tokens is None else f"/set max-tokens {2 * max_tokens} and /regen"
    if constraint is not None:
        return may_not_match("the reply", limit, constraint.name, remedy)
    return ends_here("the reply", limit, remedy if max_tokens is None else f"ask to go on, or {remedy}")


def parts_table(parts: Sequence[Part], used: int, limit: int) -> str:
    """A table of the tokens of each part, and of the tokens left."""
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
        ("@PATH", "in a message: this document before it; @@PATH is text"),
    ]
    width = max(len(name) for name, _ in (*rows, *keys))
    return "\n".join(f"{name.ljust(width)}  {about}" for name, about in (*rows, *keys))


def _offer(drops: Sequence[Drop]) -> str:
    """The line on what can be dropped to make room."""
    if not drops:
        return "begin anew with /clear, or with a larger --context where the model has one"
    compact = "; /compact replaces the oldest turns by a summary" if any(drop.num_turns for drop in drops) else ""
    return f"{', '.join(map(str, drops))}{compact}; /tokens shows all of it, /clear begins anew"


def _name(part: Part) -> str:
    if part.kind == "document":
        return f"document {line_text(part.name)}"
    return f"turn {part.number}" if part.kind == "turn" else part.kind
