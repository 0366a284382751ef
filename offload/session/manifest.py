"""The manifest: what a session holds and which files its pages are in. One JSON object in `manifest.json`.

Its first line seals the rest with a checksum, which is compared before anything is parsed: a flipped bit or a missing
end never reaches the parser. What a checksum cannot see, content that somebody made up, meets a reader that demands
every field, its type and its range.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import NoReturn

import xxhash

from offload.errors import SessionError
from offload.session.folder import Folder
from offload.session.identity import ELEMENT_BYTES, Identity
from offload.session.names import damaged
from offload.units import size

FORMAT = 1
MANIFEST_FILE = "manifest.json"
MAX_BYTES = 32 << 20  # a million tokens take 7 MB, and their text about as much
MAX_DEPTH = 16  # of `extra`
_SEAL = re.compile(rb'\{"checksum":"([0-9a-f]{32})",\n')
_PAGE_FILE = re.compile(r"page-([0-9]{5,})-[0-9a-f]{16}\.safetensors", re.ASCII)
_CHECKSUM = re.compile(r"[0-9a-f]{32}", re.ASCII)
_MOST_TOKEN, _MOST_TEXT, _MOST_COUNT, _MOST_SECONDS = 2**31 - 1, 256, 2**40, 2**40
_MOST = {"num_layers": 2**12, "num_kv_heads": 2**14, "head_dim": 2**12, "page_tokens": 2**20}


@dataclass(frozen=True)
class Page:
    """One page's file and its checksum, xxh3_128 over all of it."""

    file: str
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """tokens: whose keys and values the pages hold. capacity, extra: the caller's. created, updated: seconds since
    the epoch. writer: the program's version."""

    identity: Identity
    tokens: tuple[int, ...]
    pages: tuple[Page, ...]
    capacity: int
    extra: Mapping[str, object]
    created: float
    updated: float
    writer: str = ""


def page_file(number: int, tag: str) -> str:
    """The file of page `number`; `tag`, 16 hex digits, is never used twice."""
    return f"page-{number:05d}-{tag}.safetensors"


def is_page_file(name: str) -> bool:
    return _PAGE_FILE.fullmatch(name) is not None


def checksum(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def read(folder: Folder) -> Manifest | None:
    """The manifest in `folder`, None where there is none. Raises SessionError for any other than a whole one."""
    path = folder.path / MANIFEST_FILE
    try:
        content = folder.read(MANIFEST_FILE, MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error
    if len(content) > MAX_BYTES:
        raise damaged(path, f"it is over the limit of {size(MAX_BYTES)}")
    try:
        return decode(content)
    except (ValueError, RecursionError) as error:  # ValueError: also not ASCII, not JSON, a number without end
        raise damaged(path, str(error)) from error


def encode(manifest: Manifest) -> bytes:
    """The file's content. Raises SessionError where it is over MAX_BYTES, ValueError for what `decode` would not give
    back as it is: `extra` has to be plain JSON."""
    record = {"format": FORMAT} | {each.name: getattr(manifest, each.name) for each in fields(Manifest)}
    record |= {"identity": asdict(manifest.identity), "pages": [asdict(page) for page in manifest.pages]}
    body = json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii")[1:]
    content = b'{"checksum":"%s",\n%s' % (checksum(body).encode("ascii"), body)
    if len(content) > MAX_BYTES:
        raise SessionError(
            f"what a session keeps besides keys and values would take {size(len(content))}, {size(MAX_BYTES)} is the "
            "limit; start a new session"
        )
    if decode(content) != manifest:
        raise ValueError("extra is not plain JSON: it would come back as something else")
    return content


def decode(content: bytes) -> Manifest:
    """Raises ValueError, or RecursionError, with what is wrong."""
    seal = _SEAL.match(content)
    if seal is None:
        raise ValueError("it is no session's manifest, or its beginning is damaged")
    body = content[seal.end() :]
    if checksum(body).encode("ascii") != seal[1]:
        raise ValueError("its checksum is wrong: it was cut off or changed")
    text = "{" + body.decode("ascii")
    record = json.loads(text, parse_float=_float, parse_constant=_refuse, object_pairs_hook=_object)
    return _manifest(record)


def _manifest(record: dict[str, object]) -> Manifest:
    version = record.pop("format", None)
    if version != FORMAT or type(version) is not int:
        raise ValueError(f"its format is {reprlib.repr(version)}, this program reads {FORMAT}")
    _demand(record, {each.name for each in fields(Manifest)}, "manifest")
    identity = _identity(record["identity"])
    tokens = _list(record["tokens"], "tokens")
    if not all(type(token) is int and 0 <= token <= _MOST_TOKEN for token in tokens):
        raise ValueError(f"tokens holds what is no integer from 0 to {_MOST_TOKEN}")
    extra = record["extra"]
    if not isinstance(extra, dict):
        raise ValueError("extra is no object")
    _check_depth(extra)
    return Manifest(
        identity=identity,
        tokens=tuple(tokens),  # type: ignore[arg-type]
        pages=_pages(_list(record["pages"], "pages"), identity.page_format.count(len(tokens))),
        capacity=_integer(record["capacity"], "capacity", 0, _MOST_COUNT),
        extra=extra,
        created=_seconds(record["created"], "created"),
        updated=_seconds(record["updated"], "updated"),
        writer=_text(record["writer"], "writer"),
    )


def _identity(value: object) -> Identity:
    record = _demand(value, {each.name for each in fields(Identity)}, "identity")
    numbers = {name: _integer(record[name], name, 1, most) for name, most in _MOST.items()}
    texts = {name: _text(record[name], name) for name in record if name not in _MOST}
    if texts["dtype"] not in ELEMENT_BYTES:
        raise ValueError(f"dtype is {texts['dtype']!r}, not one of {', '.join(ELEMENT_BYTES)}")
    return Identity(**numbers, **texts)  # type: ignore[arg-type]


def _pages(values: list[object], count: int) -> tuple[Page, ...]:
    """Exactly `count` pages, page i in a file that is called after i, and so none twice."""
    if len(values) != count:
        raise ValueError(f"it names {len(values)} pages, its tokens need {count}")
    pages = []
    for number, value in enumerate(values):
        record = _demand(value, {"file", "checksum"}, f"page {number}")
        file, digest = _text(record["file"], "file"), _text(record["checksum"], "checksum")
        match = _PAGE_FILE.fullmatch(file)
        if match is None or match[1] != f"{number:05d}":
            raise ValueError(f"{file!r} cannot be the file of page {number}")
        if not _CHECKSUM.fullmatch(digest):
            raise ValueError(f"{digest!r} cannot be the checksum of page {number}")
        pages.append(Page(file, digest))
    return tuple(pages)


def _demand(value: object, names: set[str], what: str) -> dict[str, object]:
    """An object with exactly these fields."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no object")
    if wrong := sorted(value.keys() ^ names):
        raise ValueError(f"{what} has fields too many or too few: {reprlib.repr(wrong)}")
    return value


def _list(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is no list")
    return value


def _integer(value: object, name: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {reprlib.repr(value)}, not an integer from {least} to {most}")
    return value


def _seconds(value: object, name: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST_SECONDS:  # type: ignore[operator]
        raise ValueError(f"{name} is {reprlib.repr(value)}, not a time")
    return float(value)  # type: ignore[arg-type]


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or len(value) > _MOST_TEXT or not value.isprintable():
        raise ValueError(f"{name} is {reprlib.repr(value)}, not a line of at most {_MOST_TEXT} characters")
    return value


def _check_depth(extra: object) -> None:
    """No deeper than a caller can walk."""
    level = [extra]
    for _ in range(MAX_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [child for children in inner for child in children]
        if not level:
            return
    raise ValueError(f"extra is nested deeper than {MAX_DEPTH}")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a field is there twice")
    return record


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
