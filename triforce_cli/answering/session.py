"""KV rows that a session or the prefix store keeps from one prompt to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import UsageError
from offload.interrupts import Terminated
from triforce_cli.ground.deadline import TimedOut
from triforce_cli.screen.output import Output
from triforce_cli.setup.engine import Prepared, open_session

if TYPE_CHECKING:
    from offload.engine.engine import Engine
    from offload.plan.planner import Plan
    from offload.session.store import Store
    from triforce_cli.answering.answer import Answer


def open_for_text(prepared: Prepared, plan: Plan, folder: Path, *, read_only: bool) -> Store:
    """The session in `folder`, for a prompt and its text. Raises UsageError if a chat owns it."""
    store = open_session(prepared, plan, folder, read_only=read_only)
    if store.extra and not read_only and store.extra.get("kind") != "text":
        store.close()
        raise UsageError(f"{folder} is kept by a chat; name another session, or add --read-only")
    return store


@contextmanager
def kept(store: Store, engine: Engine, answer: Answer, output: Output) -> Iterator[None]:
    """Restore the session's rows for the answer's prompt. At the end, also after an interrupt, save the rows if there
    are more than were restored, and where the answer stopped."""
    from offload.engine.prefix import num_common

    tokens = answer.prompt.tokens
    common, began = engine.restore(store, tokens, on_progress=output.progress), num_common(store.tokens, tokens)
    replaced = len(store.tokens) - began
    try:
        yield
    finally:
        output.end_shown_line()
        if not store.read_only and engine.num_cached > common:
            engine.save(store, _extra(answer, engine.prefix.tokens), on_progress=output.progress)
            if replaced > began:
                output.note(f"session: {replaced:,} tokens of what was kept did not begin this prompt and are replaced")
        elif not store.read_only and answer.parts:
            store.keep(_extra(answer, store.tokens))
        lost = f"; {began:,} begin what was kept, and {engine.worker.kept.limit}"
        output.note(f"session: {common:,} of {len(tokens):,} prompt tokens were there{lost if common < began else ''}")


def _extra(answer: Answer, rows: Sequence[int]) -> dict[str, object]:
    """The session's data beside its rows."""
    from triforce_cli.answering.resumable import Resumable

    return {"kind": "text", "answer": Resumable.of(answer, rows).as_dict()}


@contextmanager
def rows_kept(engine: Engine, documents: Sequence[str], output: Output) -> Iterator[None]:
    """At the end, also after an interrupt, keep the rows of the prompt's prefill in the prefix store, if there is one.
    After an error nothing is kept: the engine may have caused it. The first use of the store is said. documents: their
    names."""
    from offload.session.store_files import nbytes, store_folder

    is_new = not nbytes(folder := store_folder())
    try:
        yield
    except (KeyboardInterrupt, Terminated, TimedOut, BrokenPipeError):
        engine.keep(documents=documents)  # in silence: the line of text is still open
        raise
    else:
        output.end_shown_line()
        if engine.keep(on_progress=output.progress, documents=documents) and is_new:
            output.note(
                f"what the model has read is kept in {folder}, so that it is not read again; --no-store leaves it out"
            )
