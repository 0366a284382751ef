"""The manifest: the tokens of a session and the files of its parts. One JSON object in `manifest.json`.

The first line holds a checksum of the rest, which is compared before anything is parsed, so damaged files never reach
the parser. A forged file may have a valid checksum, so the reader also checks every field, its type and its range.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import xxhash

from offload import strict_json
from offload.errors import SessionError
from offload.fields import LIST, OBJECT, Fields, Kind, fields_of, list_of, number, one_of, shown, whole
from offload.session.folder import Folder
from offload.session.identity import NO_NUMBERS, STATE_FIELDS, Identity
from offload.session.layout import ELEMENT_BYTES, PageFormat
from offload.session.names import damaged
from offload.units import size

if TYPE_CHECKING:  # a list of sessions does without torch
    from offload.kv.parts import Unit

MANIFEST_FILE = "manifest.json"
MAX_BYTES = 32 << 20  # a million tokens take 7 MB, and their text about as much
MAX_DEPTH = 16  # of `extra`
NO_CHECKSUM = "0" * 32  # of a file that is not written yet
# Formats. The second is written if a page is packed, the third if layers have a window, the fourth if windowed layers
# have heads of another shape, the fifth if layers have a state, the sixth with hidden rows, and the seventh with parts
# of other names. So older programs can read all sessions without these features.
_PACKED, _WITH_WINDOWS, _WITH_TWO_SHAPES, _WITH_STATES, _WITH_HIDDEN, _WITH_OTHERS = range(2, 8)
_WINDOW_HEADS = {"window_kv_heads": 2**14, "window_head_dim": 2**12}  # maxima
_STATES = dict(zip(STATE_FIELDS, (2**12, 2**14, 2**12, 2**12, 2**4, 2**26), strict=True))  # maxima
_HIDDEN_NUMBERS = "num_first", "start", "size"
_MOST_FIRST, _MOST_NUMBERS = 2**12, 8  # first hidden rows, and numbers of a unit
_SEAL = re.compile(rb'\{"checksum":"([0-9a-f]{32})",\n')
_STEMS = {"rows": "page-{:05d}", "windows": "window-{:05d}", "states": "state-{}", "hidden": "hidden"}
_OTHERS = re.compile(r"[a-z]+(_[a-z]+)*", re.ASCII)  # names of other parts
_FILE = re.compile(
    r"(page-[0-9]{5,}|window-[0-9]{5,}|state-[1-9][0-9]*|hidden|part-[a-z_]+(?:-[0-9]+)+)-[0-9a-f]{16}\.safetensors",
    re.ASCII,
)
_FLAGS = re.compile(r"[01]{0,16384}", re.ASCII)
_DIGITS = re.compile(r"[0-9a-f]{32}", re.ASCII)
_MOST_TEXT = 256  # characters
_TOKENS, _CAPACITY, _SECONDS = list_of(whole(0, 2**31 - 1)), whole(0, 2**40), number(0, 2**40)
_LINE = Kind(
    f"a line of at most {_MOST_TEXT} characters",
    lambda value: isinstance(value, str) and len(value) <= _MOST_TEXT and value.isprintable(),
)
_BLOCKS = Kind("1 or 0 for each block", lambda value: isinstance(value, str) and _FLAGS.fullmatch(value) is not None)
_CHECKSUM = Kind("32 digits from 0 to f", lambda value: isinstance(value, str) and _DIGITS.fullmatch(value) is not None)
_MOST = {
    "num_layers": 2**12, "num_window_layers": 2**12, "num_kv_heads": 2**14, "head_dim": 2**12, "page_tokens": 2**20,
    **_WINDOW_HEADS, **_STATES,
}  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """The file of a unit, its checksum, xxh3_128 over the whole file, and which blocks of a page are packed: see
    `PageFile`."""

    unit: Unit
    file: str
    checksum: str
    packed: str = ""


@dataclass(frozen=True)
class Manifest:
    """The manifest of a session. tokens: the tokens whose keys and values are in the pages. parts: the files of each
    part of what the sequence keeps, by its name, in the order of its units. capacity, extra: stored for the caller.
    created, updated: seconds since the epoch. writer: the program's version."""

    identity: Identity
    tokens: tuple[int, ...]
    parts: Mapping[str, tuple[Saved, ...]]
    capacity: int
    extra: Mapping[str, object]
    created: float
    updated: float
    writer: str = ""

    @property
    def num_pages(self) -> int:
        """Pages of all tokens."""
        return len(self.parts.get("rows", ()))

    @property
    def files(self) -> set[str]:
        """The names of the files of all parts."""
        return {saved.file for files in self.parts.values() for saved in files}


def file_name(part: str, unit: Unit, page_tokens: int, tag: str) -> str:
    """The name of a unit's file. page_tokens: of a page. tag: 16 hexadecimal digits, never used twice."""
    return f"{_stem(part, unit, page_tokens)}-{tag}.safetensors"


def is_content_file(name: str) -> bool:
    """Whether a file has the name of a unit's."""
    return _FILE.fullmatch(name) is not None


def _stem(part: str, unit: Unit, page_tokens: int) -> str:
    if part not in _STEMS:
        return "-".join(("part", part, *map(str, unit)))
    return _STEMS[part].format(unit[0] if part == "states" else (unit[0] - 1) // page_tokens)


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
    version, parts = _version(manifest), dict(manifest.parts)
    windows, num_tokens, has_packed = parts.pop("windows", ()), len(manifest.tokens), version >= _PACKED
    sections: dict[str, object] = {
        "identity": {name: getattr(manifest.identity, name) for name in _identity_fields(version)},
        "pages": [_record(saved, packed=has_packed) for saved in parts.pop("rows", ())],
        "window_pages": [_record(saved, packed=True) for saved in windows],
        "first_window_page": manifest.identity.window_format.count(num_tokens) - len(windows),
        "states": [{"place": saved.unit[0]} | _record(saved) for saved in parts.pop("states", ())],
    }
    for saved in parts.pop("hidden", ()):
        sections["hidden"] = dict(zip(_HIDDEN_NUMBERS, saved.unit[1:], strict=True)) | _record(saved)
    sections["parts"] = {
        name: [{"unit": saved.unit} | _record(saved, packed=True) for saved in files] for name, files in parts.items()
    }
    record = {name: sections.get(name, getattr(manifest, name, None)) for name in _fields(version)}
    body = json.dumps({"format": version, **record}, separators=(",", ":"), allow_nan=False).encode("ascii")[1:]
    content = b'{"checksum":"%s",\n%s' % (checksum(body).encode("ascii"), body)
    if len(content) > MAX_BYTES:
        raise SessionError(
            f"what a session keeps besides keys and values would take {size(len(content))}, {size(MAX_BYTES)} is the "
            "limit; start a new session"
        )
    if decode(content) != manifest:
        raise ValueError("extra is not plain JSON: it would come back as something else")
    return content


def _record(saved: Saved, *, packed: bool = False) -> dict[str, object]:
    return {name: getattr(saved, name) for name in ("file", "checksum", *(("packed",) if packed else ()))}


def _version(manifest: Manifest) -> int:
    """The oldest format that can represent the manifest."""
    identity, parts = manifest.identity, manifest.parts
    if parts.keys() - _STEMS.keys():
        return _WITH_OTHERS
    if "hidden" in parts:
        return _WITH_HIDDEN
    if identity.num_state_layers:
        return _WITH_STATES
    if identity.window_kv_heads:
        return _WITH_TWO_SHAPES
    return _WITH_WINDOWS if identity.num_window_layers else 1 + any(page.packed for page in parts.get("rows", ()))


def _fields(version: int) -> list[str]:
    """The names of the fields in a manifest of format `version`. In one with other parts the hidden rows may be
    null."""
    return [
        *("identity", "tokens", "pages", "capacity", "extra", "created", "updated", "writer"),
        *(("window_pages", "first_window_page") if version >= _WITH_WINDOWS else ()),
        *(("states",) if version >= _WITH_STATES else ()),
        *(("hidden",) if version >= _WITH_HIDDEN else ()),
        *(("parts",) if version >= _WITH_OTHERS else ()),
    ]


def _identity_fields(version: int) -> list[str]:
    """The names of the fields of the identity in a manifest of format `version`."""
    without = set() if version >= _WITH_WINDOWS else {"num_window_layers"}
    without |= set() if version >= _WITH_TWO_SHAPES else {*_WINDOW_HEADS}
    without |= set() if version >= _WITH_STATES else {*_STATES}
    return [each.name for each in fields(Identity) if each.name not in without]


def decode(content: bytes) -> Manifest:
    """The manifest in the content of its file. Raises ValueError, which names the fault, or RecursionError."""
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
    if type(version) is not int or not 1 <= version <= _WITH_OTHERS:
        raise ValueError(f"its format is {shown(version)}, this program reads 1 to {_WITH_OTHERS}")
    source = fields_of(record, "").only(_fields(version))
    identity = _identity(source.inner("identity"), version)
    tokens, extra = source.get("tokens", _TOKENS), source.get("extra", OBJECT)
    strict_json.check_depth(extra, MAX_DEPTH, "extra")
    count, has_packed = len(tokens), version >= _PACKED
    parts = {"rows": _pages(source.get("pages", LIST), "rows", identity.page_format, count, 0, packed=has_packed)}
    if version >= _WITH_WINDOWS:
        form = identity.window_format
        first = source.get("first_window_page", whole(0, form.count(count)))
        parts["windows"] = _pages(source.get("window_pages", LIST), "windows", form, count, first, packed=True)
    parts["states"] = _states(source.get("states", LIST), count) if version >= _WITH_STATES else ()
    if version == _WITH_HIDDEN or source.data.get("hidden") is not None:
        parts["hidden"] = (_hidden(source.inner("hidden"), count),)
    if version >= _WITH_OTHERS:
        parts |= {name: _others(name, values, count) for name, values in source.get("parts", OBJECT).items()}
    return Manifest(
        identity=identity,
        tokens=tuple(tokens),
        parts={name: files for name, files in parts.items() if files},
        capacity=source.get("capacity", _CAPACITY),
        extra=extra,
        created=float(source.get("created", _SECONDS)),
        updated=float(source.get("updated", _SECONDS)),
        writer=source.get("writer", _LINE),
    )


def _identity(source: Fields, version: int) -> Identity:
    source.only(_identity_fields(version))
    least = {"num_layers": 0 if version >= _WITH_WINDOWS else 1}
    least |= dict.fromkeys(("num_window_layers", *_WINDOW_HEADS, *NO_NUMBERS), 0) if version >= _WITH_STATES else {}
    least |= dict.fromkeys(_STATES, 0) if version >= _WITH_HIDDEN else {}
    kinds = {name: whole(least.get(name, 1), most) for name, most in _MOST.items()} | {"dtype": one_of(*ELEMENT_BYTES)}
    return Identity(**{name: source.get(name, kinds.get(name, _LINE)) for name in source.data})


def _saved(source: Fields, part: str, unit: Unit, what: str, page_tokens: int = 1) -> Saved:
    """A unit's file. Its name contains the unit's numbers, so no file occurs twice. what: the file must be."""
    stem = _stem(part, unit, page_tokens)

    def is_own(value: object) -> bool:
        match = _FILE.fullmatch(value) if isinstance(value, str) else None
        return match is not None and match[1] == stem

    return Saved(unit, source.get("file", Kind(what, is_own)), source.get("checksum", _CHECKSUM))


def _pages(
    values: list[object], part: str, form: PageFormat, num_tokens: int, first: int, *, packed: bool
) -> tuple[Saved, ...]:
    """The pages from `first` on that `num_tokens` need."""
    if len(values) != (count := form.count(num_tokens) - first):
        raise ValueError(f"it names {len(values)} pages, its tokens need {count}")
    flags = Kind("1 or 0 for each block, packed or not", lambda value: isinstance(value, str) and form.allows(value))
    names, pages = ("file", "checksum", *(("packed",) if packed else ())), []
    for index, value in enumerate(values, first):
        page = fields_of(value, f"page {index}").only(names)
        unit = (min((index + 1) * form.page_tokens, num_tokens),)
        saved = _saved(page, part, unit, f"the file of page {index}", form.page_tokens)
        pages.append(replace(saved, packed=page.get("packed", flags, "")))
    return tuple(pages)


def _states(values: list[object], num_tokens: int) -> tuple[Saved, ...]:
    """The states, at ascending places up to `num_tokens`."""
    found, before = list[Saved](), 0
    for index, value in enumerate(values):
        state = fields_of(value, f"state {index}").only(("place", "file", "checksum"))
        before = state.get("place", whole(before + 1, num_tokens))
        found.append(_saved(state, "states", (before,), f"the file of the states at {before}"))
    return tuple(found)


def _hidden(source: Fields, num_tokens: int) -> Saved:
    found, places, size = source.only((*_HIDDEN_NUMBERS, "file", "checksum")), whole(0, num_tokens), whole(1, 2**20)
    kinds = whole(0, min(num_tokens, _MOST_FIRST)), places, size
    numbers = (found.get(name, kind) for name, kind in zip(_HIDDEN_NUMBERS, kinds, strict=True))
    return _saved(found, "hidden", (num_tokens, *numbers), "a file of hidden rows")


def _others(part: str, values: object, num_tokens: int) -> tuple[Saved, ...]:
    """The files of a part that this module does not name, each unit once."""
    if part in _STEMS or not _OTHERS.fullmatch(part) or not isinstance(values, list):
        raise ValueError(f"parts has {shown(part)}, which is no part's name and list of files")
    found: dict[Unit, Saved] = {}
    numbers = list_of(whole(0, 2**40))
    for index, value in enumerate(values):
        source = fields_of(value, f"{part} {index}").only(("unit", "file", "checksum", "packed"))
        unit = tuple(source.get("unit", numbers))
        if not 1 <= len(unit) <= _MOST_NUMBERS or unit[0] > num_tokens or unit in found:
            raise ValueError(f"unit of {part} {index} is {shown([*unit])}, which is no further one of its tokens'")
        saved = _saved(source, part, unit, f"the file of {part} at {unit[0]}")
        found[unit] = replace(saved, packed=source.get("packed", _BLOCKS))
    return tuple(found.values())
