"""Saved sessions as tables and as JSON objects. Pure functions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.units import size
from triforce_cli import __version__
from triforce_cli.ground.text import NOTHING, counted, indented, line_text, path_text

if TYPE_CHECKING:
    from offload.session.catalogue import Summary
    from offload.session.manifest import Manifest

NUM_NAMED = 8  # sessions named in one line
_MIN_MODEL = 12  # least columns of a model's name


@dataclass(frozen=True)
class Contents:
    """A session's contents, as described by its writer. kind: "chat", "text", or "" if unknown; num_turns: of a
    chat."""

    kind: str
    num_turns: int | None = None

    @classmethod
    def of(cls, extra: Mapping[str, object]) -> Contents:
        """The contents in a manifest's `extra`, which may hold anything."""
        kind, conversation = extra.get("kind"), extra.get("conversation")
        turns = conversation.get("turns") if isinstance(conversation, dict) else None
        if kind == "chat":
            return cls("chat", len(turns) if isinstance(turns, list) else None)
        return cls("text" if kind == "text" else "")

    def __str__(self) -> str:
        turns = "" if self.num_turns is None else f", {counted(self.num_turns, 'turn')}"
        return f"{self.kind or 'unknown'}{turns}"


def table(sessions: Sequence[Summary], *, width: int) -> str:
    """One line per session; below it the reason if it cannot be used. Long names of models are cut to fit `width`
    columns, nothing else."""
    column = max(len("name"), *(len(line_text(session.name)) for session in sessions))
    rows = [("name", "tokens", "size", "updated", "model", ""), *map(_cells, sessions)]
    lines = []
    for name, tokens, nbytes, updated, model, problem in rows:
        start = f"{name:<{column}}  {tokens:>9}  {nbytes:>7}  {updated:<16}  "
        lines += [start + _cut(model, max(width - len(start), _MIN_MODEL)), *indented(problem, width)]
    return "\n".join(lines) + "\n"


def table_document(folder: Path, sessions: Sequence[Summary]) -> dict[str, Any]:
    """The JSON of `sessions ls`. bytes: of all files; problem: why a session cannot be used, or null."""
    return {
        "folder": path_text(folder),
        "sessions": [
            {
                "name": session.name,
                "num_tokens": session.num_tokens,
                "bytes": session.nbytes,
                "model": session.model_name,
                "updated": timestamp(session.updated),
                "problem": session.problem or None,
            }
            for session in sessions
        ],
        "version": __version__,
    }


def description(path: Path, manifest: Manifest, nbytes: int) -> str:
    """The lines of `sessions info`. nbytes: of all files."""
    identity = manifest.identity
    rows = [
        ("kind", str(Contents.of(manifest.extra))),
        ("model", f"{identity.model_name or NOTHING}, {identity.dtype}"),
        ("tokens", f"{len(manifest.tokens):,}, in a context of {manifest.capacity:,}"),
        ("size", f"{size(nbytes)}, {counted(manifest.num_pages, 'page')} of {identity.page_tokens:,} tokens"),
        ("created", moment(manifest.created)),
        ("updated", moment(manifest.updated)),
        ("written by", f"triforce {manifest.writer}" if manifest.writer else NOTHING),
        ("folder", line_text(path_text(path))),
    ]
    return "".join(f"{label:<12}{value}\n" for label, value in rows)


def description_document(path: Path, manifest: Manifest, nbytes: int) -> dict[str, Any]:
    """The JSON of `sessions info`. digests: of the model, the tokenizer and RoPE, which the keys and values depend
    on."""
    identity, contents = manifest.identity, Contents.of(manifest.extra)
    return {
        "name": path_text(Path(path.name)),
        "folder": path_text(path),
        "kind": contents.kind or None,
        "num_turns": contents.num_turns,
        "model": identity.model_name,
        "dtype": identity.dtype,
        "num_tokens": len(manifest.tokens),
        "capacity": manifest.capacity,
        "num_pages": manifest.num_pages,
        "page_tokens": identity.page_tokens,
        "bytes": nbytes,
        "created": timestamp(manifest.created),
        "updated": timestamp(manifest.updated),
        "writer": manifest.writer,
        "digests": {"model": identity.model, "tokenizer": identity.tokenizer, "rope": identity.rope},
        "version": __version__,
    }


def total(sessions: Sequence[Summary]) -> str:
    """The number and size of the sessions: 3 sessions, 1.24 GB."""
    return f"{counted(len(sessions), 'session')}, {size(sum(session.nbytes for session in sessions))}"


def named(names: Sequence[str]) -> str:
    """The first few names: "a, b and 3 more"; "none"."""
    more = len(names) - NUM_NAMED
    return (", ".join(names[:NUM_NAMED]) or "none") + (f" and {more:,} more" if more > 0 else "")


def moment(seconds: float) -> str:
    """Local time to the minute, from seconds since the epoch; any year that a file can claim."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def timestamp(seconds: float) -> str:
    """UTC as in ISO 8601, for programs."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _cells(session: Summary) -> tuple[str, ...]:
    start = (line_text(session.name), f"{session.num_tokens:,}", size(session.nbytes), moment(session.updated))
    if not session.problem:
        return (*start, line_text(session.model_name) or NOTHING, "")
    return (start[0], NOTHING, *start[2:], NOTHING, f"cannot be used: {session.problem}")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
