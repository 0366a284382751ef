"""Conversations in many chat templates: whether their tokens are those of transformers' own rendering.

Each template of the folder (*.jinja, as in llama.cpp's models/templates) is tried with one tokenizer, on a question, on
a conversation of two turns, and with a system message. This program encodes piece by piece, so that replies keep the
model's tokens; transformers renders and encodes the whole. Refusals by either program are listed.

usage: python benchmarks/templates.py --templates DIR --model FILE_OR_DIR
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report import about, emit, say

from offload.engine.engine import load_tokenizer
from offload.errors import TriforceError
from triforce_cli.prompts.conversation import Conversation
from triforce_cli.prompts.formats import ChatFormat

Messages = Sequence[Mapping[str, str]]
QUESTION, REPLY, NEXT = "Where is the key?", "It lies under the mat.", "And who put it there?"
DATE = "26 Jul 2024"
CASES: dict[str, tuple[Conversation, Messages]] = {
    "question": (Conversation(date=DATE).asked(QUESTION), [{"role": "user", "content": QUESTION}]),
    "two turns": (
        Conversation(date=DATE).asked(QUESTION).answered(REPLY, (), complete=True).asked(NEXT),
        [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": REPLY},
            {"role": "user", "content": NEXT},
        ],
    ),
    "system": (
        Conversation(date=DATE).with_system("Be brief.").asked(QUESTION),
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
    ),
}


def theirs(tokenizer: Any, messages: Messages) -> list[int] | str:
    """transformers' tokens, or its error."""
    inner = tokenizer._inner
    try:
        text = inner.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, date_string=DATE
        )
    except Exception as error:  # a template may raise any error
        return f"{type(error).__name__}: {error}"
    tokens: list[int] = tokenizer._pipeline.encode(text, add_special_tokens=False).ids
    return tokens


def ours(tokenizer: Any, conversation: Conversation) -> list[int] | str:
    try:
        return ChatFormat(tokenizer).prompt(conversation).tokens
    except TriforceError as error:
        return str(error)


def compared(tokenizer: Any, conversation: Conversation, messages: Messages) -> tuple[str, str]:
    """(verdict, details)."""
    reference, found = theirs(tokenizer, messages), ours(tokenizer, conversation)
    if isinstance(reference, str):
        return ("refused by both" if isinstance(found, str) else "refused by transformers alone"), reference
    if isinstance(found, str):
        return "refused by us alone", found
    if found == reference:
        return "same", f"{len(found)} tokens"
    pairs = zip(found, reference, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(reference)))
    part = slice(max(at - 3, 0), at + 5)
    return "differs", f"at {at}: {tokenizer.decode(found[part])!r} for {tokenizer.decode(reference[part])!r}"


def main() -> None:
    parser = argparse.ArgumentParser(usage=(__doc__ or "").splitlines()[-1].removeprefix("usage: "))
    parser.add_argument("--templates", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for path in sorted(arguments.templates.glob("*.jinja")):
        tokenizer: Any = load_tokenizer(arguments.model, None)
        tokenizer._inner.chat_template = path.read_text(encoding="utf-8")
        for name, (conversation, messages) in CASES.items():
            verdict, why = compared(tokenizer, conversation, messages)
            say(f"{path.stem}, {name}: {verdict}, {why}")
            runs.append({"template": path.stem, "case": name, "verdict": verdict, "why": why[:160]})
    counts = Counter((run["case"], run["verdict"]) for run in runs)
    rows = [[case, verdict, str(count)] for (case, verdict), count in sorted(counts.items())]
    emit(["case", "verdict", "templates"], rows, about("conversations by chat templates", 0), runs)


if __name__ == "__main__":
    main()
