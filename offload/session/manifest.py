"""The manifest: the tokens of a session and the files of its pages. One JSON object in `manifest.json`.

The first line holds a checksum of the rest, which is compared before anything is parsed, so damaged files never reach
the parser. A forged file may have a valid checksum, so the reader also checks every field, its type and its range.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

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
# By format. The second is written where a page is packed, the third where layers have a window, and the fourth where
# these have heads of another shape, so that programs which know the first refuse nothing else.
_PACKED = ("file", "checksum", "packed")
_PAGE_FIELDS = {1: ("file", "checksum"), 2: _PACKED, 3: _PACKED, 4: _PACKED}
_WITH_WINDOWS, _WITH_TWO_SHAPES = 3, 4
_WINDOW_FIELDS, _WINDOW_LAYERS = frozenset(("window_pages", "first_window_page")), "num_window_layers"
_WINDOW_HEADS = {"window_kv_heads": 2**14, "window_head_dim": 2**12}  # the most of each
_SEAL = re.compile(rb'\{"checksum":"([0-9a-f]{32})",\n')
_PAGE_FILE = re.compile(r"(page|window)-([0-9]{5,})-[0-9a-f]{16}\.safetensors", re.ASCII)
_CHECKSUM = re.compile(r"[0-9a-f]{32}", re.ASCII)
_MOST_TOKEN, _MOST_TEXT, _MOST_COUNT, _MOST_SECONDS = 2**31 - 1, 256, 2**40, 2**40
_MOST = {
    "num_layers": 2**12, _WINDOW_LAYERS: 2**12, "num_kv_heads": 2**14, "head_dim": 2**12, "page_tokens": 2**20,
    **_WINDOW_HEADS,
}  # fmt: skip


@dataclass(frozen=True)
class Page:
    """The file of a page, its checksum, xxh3_128 over the whole file, and which of its blocks are packed: see
    `PageFile`."""

    file: str
    checksum: str
    packed: str = ""


@dataclass(frozen=True)
class Manifest:
    """tokens: those whose keys and values the pages hold; window_pages: those of layers with a window, from page
    `first_window_page` on. capacity, extra: stored for the caller. created, updated: seconds since the epoch. writer:
    the program's version."""

    identity: Identity
    tokens: tuple[int, ...]
    pages: tuple[Page, ...]
    capacity: int
    extra: Mapping[str, object]
    created: float
    updated: float
    writer: str = ""
    window_pages: tuple[Page, ...] = ()
    first_window_page: int = 0

    @property
    def files(self) -> set[str]:
        """Names of all files of pages."""
        return {page.file for page in (*self.pages, *self.window_pages)}

    @property
    def windows_by_number(self) -> dict[int, Page]:
        """Those of layers with a window, by number."""
        return dict(enumerate(self.window_pages, self.first_window_page))


def page_file(number: int, tag: str, kind: str = "page") -> str:
    """The file name of page `number`. tag: 16 hexadecimal digits, never used twice. kind: "page", or "window" of layers
    that have one."""
    return f"{kind}-{number:05d}-{tag}.safetensors"


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
    version = _version(manifest)
    record: dict[str, object] = {"format": version}
    record |= {name: getattr(manifest, name) for name in _fields_of(Manifest, version)}
    record["identity"] = {name: getattr(manifest.identity, name) for name in _fields_of(Identity, version)}
    for name in {"pages", "window_pages"} & record.keys():
        record[name] = [{own: getattr(page, own) for own in _PAGE_FIELDS[version]} for page in getattr(manifest, name)]
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


def _version(manifest: Manifest) -> int:
    """The first format that can say it."""
    identity = manifest.identity
    if identity.window_kv_heads:
        return _WITH_TWO_SHAPES
    return _WITH_WINDOWS if identity.num_window_layers else 1 + any(page.packed for page in manifest.pages)


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
            f"its format is {reprlib.repr(version)}, this program reads {min(_PAGE_FIELDS)} to {max(_PAGE_FIELDS)}"
        )
    _record(record, _fields_of(Manifest, version), "manifest")
    identity, names = _identity(record["identity"], version), _PAGE_FIELDS[version]
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
        pages=_pages(record["pages"], identity.page_format, len(tokens), names, "page"),
        capacity=_integer(record["capacity"], "capacity", 0, _MOST_COUNT),
        extra=extra,
        created=_seconds(record["created"], "created"),
        updated=_seconds(record["updated"], "updated"),
        writer=_text(record["writer"], "writer"),
        **_windows(record, identity, len(tokens), names),
    )


def _fields_of(kind: type[Manifest | Identity], version: int) -> list[str]:
    """Names of the fields that a manifest of this format has."""
    without = set() if version >= _WITH_WINDOWS else {*_WINDOW_FIELDS, _WINDOW_LAYERS}
    without |= set() if version >= _WITH_TWO_SHAPES else {*_WINDOW_HEADS}
    return [each.name for each in fields(kind) if each.name not in without]


def _windows(record: Mapping[str, object], identity: Identity, num_tokens: int, names: Sequence[str]) -> dict[str, Any]:
    if not identity.num_window_layers:
        return {}
    form = identity.window_format
    first = _integer(record["first_window_page"], "first_window_page", 0, form.count(num_tokens))
    pages = _pages(record["window_pages"], form, num_tokens, names, "window", first)
    return {"window_pages": pages, "first_window_page": first}


def _identity(value: object, version: int) -> Identity:
    record = _record(value, _fields_of(Identity, version), "identity")
    with_windows = version >= _WITH_WINDOWS
    least = {name: 0 if name == "num_layers" and with_windows else 1 for name in _MOST}
    numbers = {name: _integer(record[name], name, least[name], most) for name, most in _MOST.items() if name in record}
    texts = {name: _text(record[name], name) for name in record if name not in _MOST}
    if texts["dtype"] not in ELEMENT_BYTES:
        raise ValueError(f"dtype is {texts['dtype']!r}, not one of {', '.join(ELEMENT_BYTES)}")
    return Identity(**numbers, **texts)  # type: ignore[arg-type]


def _pages(
    found: object, form: PageFormat, num_tokens: int, names: Sequence[str], kind: str, first: int = 0
) -> tuple[Page, ...]:
    """The pages from `first` on that `num_tokens` need. The file name of page i contains i, so no file occurs twice."""
    values = _list(found, "pages")
    if len(values) != (count := form.count(num_tokens) - first):
        raise ValueError(f"it names {len(values)} pages, its tokens need {count}")
    pages = []
    for number, value in enumerate(values, first):
        record = _record(value, names, f"page {number}")
        file, digest = _text(record["file"], "file"), _text(record["checksum"], "checksum")
        packed = record.get("packed", "")
        match = _PAGE_FILE.fullmatch(file)
        if match is None or match.groups() != (kind, f"{number:05d}"):
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
