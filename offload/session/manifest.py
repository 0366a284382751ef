"""The manifest: the tokens of a session and the files of its pages. One JSON object in `manifest.json`.

The first line holds a checksum of the rest, which is compared before anything is parsed, so damaged files never reach
the parser. A forged file may have a valid checksum, so the reader also checks every field, its type and its range.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import xxhash

from offload import strict_json
from offload.errors import SessionError
from offload.session.folder import Folder
from offload.session.identity import Identity
from offload.session.layout import ELEMENT_BYTES, PageFormat
from offload.session.names import damaged
from offload.units import size

MANIFEST_FILE = "manifest.json"
MAX_BYTES = 32 << 20  # a million tokens take 7 MB, and their text about as much
MAX_DEPTH = 16  # of `extra`
# By format. The second is written where a page is packed, so that programs which know the first refuse nothing else.
_PAGE_FIELDS = {1: ("file", "checksum"), 2: ("file", "checksum", "packed")}
_SEAL = re.compile(rb'\{"checksum":"([0-9a-f]{32})",\n')
_PAGE_FILE = re.compile(r"page-([0-9]{5,})-[0-9a-f]{16}\.safetensors", re.ASCII)
_CHECKSUM = re.compile(r"[0-9a-f]{32}", re.ASCII)
_MOST_TOKEN, _MOST_TEXT, _MOST_COUNT, _MOST_SECONDS = 2**31 - 1, 256, 2**40, 2**40
_MOST = {"num_layers": 2**12, "num_kv_heads": 2**14, "head_dim": 2**12, "page_tokens": 2**20}


@dataclass(frozen=True)
class Page:
    """The file of a page, its checksum, xxh3_128 over the whole file, and which of its blocks are packed: see
    `PageFile`."""

    file: str
    checksum: str
    packed: str = ""


@dataclass(frozen=True)
class Manifest:
    """tokens: those whose keys and values the pages hold. capacity, extra: stored for the caller. created, updated:
    seconds since the epoch. writer: the program's version."""

    identity: Identity
    tokens: tuple[int, ...]
    pages: tuple[Page, ...]
    capacity: int
    extra: Mapping[str, object]
    created: float
    updated: float
    writer: str = ""


def page_file(number: int, tag: str) -> str:
    """The file name of page `number`. tag: 16 hexadecimal digits, never used twice."""
    return f"page-{number:05d}-{tag}.safetensors"


def is_page_file(name: str) -> bool:
    return _PAGE_FILE.fullmatch(name) is not None


def checksum(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def read(folder: Folder) -> Manifest | None:
    """The manifest in `folder`, None if there is none. SessionError if it is damaged or cannot be read."""
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
    except (ValueError, RecursionError) as error:  # ValueError: also not ASCII, not JSON, too long a number
        raise damaged(path, str(error)) from error


def encode(manifest: Manifest) -> bytes:
    """The content of the manifest's file. Raises SessionError if it is over MAX_BYTES, ValueError if `decode` would
    not return an equal manifest: `extra` has to be plain JSON."""
    version = 2 if any(page.packed for page in manifest.pages) else 1
    pages = [{name: getattr(page, name) for name in _PAGE_FIELDS[version]} for page in manifest.pages]
    record = {"format": version} | {each.name: getattr(manifest, each.name) for each in fields(Manifest)}
    record |= {"identity": asdict(manifest.identity), "pages": pages}
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
    """The manifest in the content of its file. Raises ValueError that says what is wrong, or RecursionError."""
    seal = _SEAL.match(content)
    if seal is None:
        raise ValueError("it is not a session's manifest, or its beginning is damaged")
    body = content[seal.end() :]
    if checksum(body).encode("ascii") != seal[1]:
        raise ValueError("its checksum is wrong: it was cut off or changed")
    text = "{" + body.decode("ascii")
    return _manifest(strict_json.parse(text))


def _manifest(record: dict[str, object]) -> Manifest:
    version = record.pop("format", None)
    if type(version) is not int or version not in _PAGE_FIELDS:
        raise ValueError(
            f"its format is {reprlib.repr(version)}, this program reads {' and '.join(map(str, _PAGE_FIELDS))}"
        )
    _record(record, {each.name for each in fields(Manifest)}, "manifest")
    identity = _identity(record["identity"])
    tokens = _list(record["tokens"], "tokens")
    if not all(type(token) is int and 0 <= token <= _MOST_TOKEN for token in tokens):
        raise ValueError(f"tokens must be integers from 0 to {_MOST_TOKEN}")
    extra = record["extra"]
    if not isinstance(extra, dict):
        raise ValueError("extra is not an object")
    strict_json.check_depth(extra, MAX_DEPTH, "extra")
    return Manifest(
        identity=identity,
        tokens=tuple(tokens),  # type: ignore[arg-type]
        pages=_pages(_list(record["pages"], "pages"), identity.page_format, len(tokens), _PAGE_FIELDS[version]),
        capacity=_integer(record["capacity"], "capacity", 0, _MOST_COUNT),
        extra=extra,
        created=_seconds(record["created"], "created"),
        updated=_seconds(record["updated"], "updated"),
        writer=_text(record["writer"], "writer"),
    )


def _identity(value: object) -> Identity:
    record = _record(value, {each.name for each in fields(Identity)}, "identity")
    numbers = {name: _integer(record[name], name, 1, most) for name, most in _MOST.items()}
    texts = {name: _text(record[name], name) for name in record if name not in _MOST}
    if texts["dtype"] not in ELEMENT_BYTES:
        raise ValueError(f"dtype is {texts['dtype']!r}, not one of {', '.join(ELEMENT_BYTES)}")
    return Identity(**numbers, **texts)  # type: ignore[arg-type]


def _pages(values: list[object], form: PageFormat, num_tokens: int, names: Sequence[str]) -> tuple[Page, ...]:
    """As many pages as `num_tokens` need. The file name of page i contains i, so no file occurs twice."""
    if len(values) != (count := form.count(num_tokens)):
        raise ValueError(f"it names {len(values)} pages, its tokens need {count}")
    pages = []
    for number, value in enumerate(values):
        record = _record(value, names, f"page {number}")
        file, digest = _text(record["file"], "file"), _text(record["checksum"], "checksum")
        packed = record.get("packed", "")
        match = _PAGE_FILE.fullmatch(file)
        if match is None or match[1] != f"{number:05d}":
            raise ValueError(f"{file!r} cannot be the file of page {number}")
        if not _CHECKSUM.fullmatch(digest):
            raise ValueError(f"{digest!r} cannot be the checksum of page {number}")
        if not isinstance(packed, str) or not form.allows(packed):
            raise ValueError(f"{reprlib.repr(packed)} cannot say which blocks of page {number} are packed")
        pages.append(Page(file, digest, packed))
    return tuple(pages)


def _record(value: object, names: Iterable[str], what: str) -> dict[str, object]:
    """`value` as an object with exactly the fields `names`."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    if wrong := sorted(value.keys() ^ set(names)):
        raise ValueError(f"{what} has fields too many or too few: {reprlib.repr(wrong)}")
    return value


def _list(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
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
