"""Prompts for different kinds of text, on which the proposers' acceptance depends.

continue: continue a novel. quote: repeat a passage from the first half word for word. edit: rewrite a function from the
first half of a long source file with one name changed. summary: summarise chapter by chapter. The novel is
examples/persuasion.txt, the source files are the standard library of the Python that runs this.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from offload.text.tokenizer import Tokenizer
from triforce_cli.documents.prompt import library_text

NOVEL = Path(__file__).parents[1] / "examples" / "persuasion.txt"


def prompt(task: str, tokenizer: Tokenizer, num_tokens: int, start: float = 0.0) -> list[int]:
    """The prompt of `task`: at most `num_tokens` tokens, and at least 90 % of them. start: the share of the source text
    to skip; after its end the text continues at its beginning."""
    make, text = _TASKS[task], library_text() if task == "edit" else NOVEL.read_text(encoding="utf-8")
    cut = text.index("\n\n", int(start * len(text))) + 2 if start else 0
    text = f"{text[cut:]}\n\n{text[:cut]}" if start else text
    size = num_tokens * len(text) // len(tokenizer.encode(text))
    tokens = tokenizer.encode(make(text[:size]))
    while len(tokens) > num_tokens:
        size -= max((len(tokens) - num_tokens) * 3, 1)
        tokens = tokenizer.encode(make(text[:size]))
    if len(tokens) < 0.9 * num_tokens:
        raise SystemExit(f"the text for {task} has {len(tokens)} tokens, {num_tokens} are asked for")
    return tokens


def _quote(text: str) -> str:
    start = text.index("\n\n", len(text) // 3) + 2
    opening = " ".join(text[start:].split()[:12])
    return (
        f"{text}\n\n[Here the excerpt ends.]\n\nQuestion: Repeat, word for word, the passage of the text above that "
        f'begins with "{opening}", and what follows it.\n\nAnswer: {opening}'
    )


def _edit(text: str) -> str:
    names = [match for match in re.finditer(r"^    def (\w{6,})\(self, ", text, re.M) if match.start() > len(text) // 4]
    if not names:
        raise SystemExit("this part of the source files has no method to write again; take another start or length")
    function = max(names[:12], key=lambda match: _body(text, match.start()))
    return (
        f"{text}\n\n# ---- end of the files ----\n\n# The method `{function[1]}` from above once more, complete and "
        f"unchanged except that `self` is called `this`:\n\n    def {function[1]}(this, "
    )


def _body(text: str, start: int) -> int:
    """The number of characters from `start` to the next definition."""
    end = re.compile(r"^(    def|class|def) ", re.M).search(text, start + 8)
    return (end.start() if end else len(text)) - start


def _summary(text: str) -> str:
    return f"{text}\n\n[Here the excerpt ends.]\n\nA summary of the excerpt above, chapter by chapter.\n\nChapter 1:"


_TASKS: dict[str, Callable[[str], str]] = {
    "continue": lambda text: text,
    "quote": _quote,
    "edit": _edit,
    "summary": _summary,
}
TASKS = tuple(_TASKS)
