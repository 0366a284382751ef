"""The prompt: documents or standard input, then `--prompt`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from offload.errors import UsageError
from triforce_cli.documents import Document
from triforce_cli.documents.reading import OnRead, joined, read_documents
from triforce_cli.documents.selection import Named
from triforce_cli.ground.inputs import Note
from triforce_cli.screen.utf8 import PIPED, STDIN, decode_argument, read_input, stdin_is_terminal, taken

TEXT_MODULES = ("argparse", "typing", "inspect", "doctest", "tarfile", "pathlib", "subprocess", "ast", "configparser")
LIBRARY = "sources of Python's standard library"


@dataclass(frozen=True)
class PromptText:
    """A prompt as text, and the documents in it."""

    text: str
    documents: tuple[Document, ...] = ()


def read_prompt(named: Named, text: str | None, *, note: Note, on_read: OnRead) -> PromptText:
    """The prompt: the named documents, or without any standard input unless it is a terminal; then `text` on a new
    line."""
    sources = _sources(named, text)
    if not sources:
        raise UsageError(
            "there is no prompt; name a file (triforce generate --prompt-file book.txt), pipe one in "
            "(cat book.txt | triforce generate) or give --prompt TEXT"
        )
    if named:
        readings = read_documents(named, "the prompt", note=note, on_read=on_read)
        before, documents = joined(readings), tuple(reading.document for reading in readings)
    else:
        before = read_input(STDIN, "the prompt", note=note) if sources[0] != "--prompt" else ""
        documents = (Document(PIPED, before),) if before else ()
        if before and text:
            note(taken(before, "the beginning of the prompt"))
    prompt = _join(before, decode_argument("--prompt", text or ""))
    if not prompt:
        raise UsageError(f"the prompt is empty ({' and '.join(sources)}); it needs at least one character")
    return PromptText(prompt, documents)


def _sources(named: Named, text: str | None) -> list[str]:
    """The names of the prompt's parts, in order."""
    read = [str(named) if named else PIPED] if named or not stdin_is_terminal() else []
    return read + (["--prompt"] if text is not None else [])


def _join(before: str, after: str) -> str:
    separator = "\n" if before and after and not before.endswith("\n") else ""
    return before + separator + after


def library_text() -> str:
    """A long real text available on every machine: about 700,000 characters of Python's standard library, the same for
    one version of Python. Raises UsageError if Python has no sources."""
    return "\n\n".join(_source(name) for name in TEXT_MODULES)


def _source(module: str) -> str:
    found = find_spec(module)
    file = Path(found.origin) if found is not None and found.origin else None
    if file is None or file.suffix != ".py" or not file.is_file():
        raise UsageError(f"this Python has no source of its module {module} to make a prompt of; give --prompt-file")
    return file.read_text(encoding="utf-8")
