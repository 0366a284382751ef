"""Mentions in a chat's message: @PATH names a document that is added before the message."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from offload.errors import UsageError
from triforce_cli.screen.utf8 import user_path

MARK = "@"
_MENTION = re.compile(r'(?<![^\s(\[])@(?P<escape>@?)(?:"(?P<quoted>[^"\n]+)"|(?P<plain>[^\s"@]\S*))')
_PUNCTUATION = ".,;:!?)]}>'\"…"  # behind a path, if no such path has it
OPEN_MENTION = re.compile(r'(?<![^\s(\[])@(?:"(?P<quoted>[^"\n]*)|(?P<plain>[^\s"@]*))$')  # one that is being typed


@dataclass(frozen=True)
class Mentions:
    """A message and the documents that it mentions. text: with each path instead of its mention; "" if there is nothing
    else in it."""

    text: str
    paths: tuple[Path, ...] = ()


def mentions_in(message: str) -> Mentions:
    """The mentions of a message as it was typed. An @ before anything but an existing file or folder is text, and so is
    one that is written twice."""
    parts, paths, rest, end = list[str](), list[Path](), "", 0
    for match, name, path in _found(message):
        between = message[end : match.start()]
        end = match.end() if match["quoted"] else match.start("plain") + len(name)
        if match["escape"]:
            parts += [between, message[match.start() + 1 : end]]
            rest += between + name
        else:
            parts += [between, name]
            rest += between
            paths.append(path)
    parts.append(message[end:])
    rest += message[end:]
    has_text = not paths or rest.strip(f"{_PUNCTUATION} \t\r\n")
    return Mentions("".join(parts) if has_text else "", tuple(paths))


def typed(message: str) -> str:
    """A message as it has to be typed, so that it mentions nothing."""
    places = [match.start() for match, _, _ in _found(message) if not match["escape"]]
    bounds = [0, *places, len(message)]
    return MARK.join(message[start:end] for start, end in pairwise(bounds))


def _found(message: str) -> Iterator[tuple[re.Match[str], str, Path]]:
    """Yield (match, path as typed, path) of each @ before an existing path, escaped or not."""
    for match in _MENTION.finditer(message):
        plain = match["plain"] or ""
        for name in [match["quoted"]] if match["quoted"] else dict.fromkeys((plain, plain.rstrip(_PUNCTUATION))):
            if (path := _existing(name)) is not None:
                yield match, name, path
                break


def _existing(name: str) -> Path | None:
    """The path of this name, if it exists. A name without any letter or digit is none: "@." means no folder."""
    if not any(map(str.isalnum, name)):
        return None
    try:
        path = user_path(name)
    except UsageError:  # an address, or "~" of nobody
        return None
    return path if os.path.exists(path) else None
