"""The manifest: the tokens of a session and the files of its pages. One JSON object in `manifest.json`.

The first line holds a checksum of the rest, which is compared before anything is parsed, so damaged files never reach
the parser. A forged file may have a valid checksum, so the reader also checks every field, its type and its range.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import xxhash

from offload import strict_json
from offload.errors import SessionError
from offload.fields import LIST, OBJECT, Fields, Kind, fields_of, list_of, number, one_of, shown, whole
from offload.session.folder import Folder
from offload.session.identity import STATE_FIELDS, Identity
from offload.session.layout import ELEMENT_BYTES, PageFormat
from offload.session.names import damaged
from offload.units import size

MANIFEST_FILE = "manifest.json"
MAX_BYTES = 32 << 20  # a million tokens take 7 MB, and their text about as much
MAX_DEPTH = 16  # of `extra`
NO_CHECKSUM = "0" * 32  # of a file that is not written yet
# Fields by format. The second is written if a page is packed, the third if layers have a window, the fourth if windowed
# layers have heads of another shape, the fifth if layers have a state, and the sixth with hidden rows. So older
# programs can read all sessions without these features.
_PACKED = ("file", "checksum", "packed")
_PAGE_FIELDS = {1: ("file", "checksum"), 2: _PACKED, 3: _PACKED, 4: _PACKED, 5: _PACKED, 6: _PACKED}
_WITH_WINDOWS, _WITH_TWO_SHAPES, _WITH_STATES, _WITH_HIDDEN = 3, 4, 5, 6
_WINDOW_FIELDS, _WINDOW_LAYERS = frozenset(("window_pages", "first_window_page")), "num_window_layers"
_WINDOW_HEADS = {"window_kv_heads": 2**14, "window_head_dim": 2**12}  # maxima
_STATES = dict(zip(STATE_FIELDS, (2**12, 2**14, 2**12, 2**12, 2**4, 2**26), strict=True))  # maxima
_MOST_HIDDEN, _MOST_FIRST = 2**20, 2**12  # numbers of a hidden row, and first rows
_STATE_FIELDS = ("place", "file", "checksum")
_HIDDEN_FIELDS = ("num_first", "start", "size", "file", "checksum")
_SEAL = re.compile(rb'\{"checksum":"([0-9a-f]{32})",\n')
_STATE_FILE = re.compile(r"state-([1-9][0-9]*)-[0-9a-f]{16}\.safetensors", re.ASCII)
_HIDDEN_FILE = re.compile(r"hidden-[0-9a-f]{16}\.safetensors", re.ASCII)
_PAGE_FILE = re.compile(r"(page|window)-([0-9]{5,})-[0-9a-f]{16}\.safetensors", re.ASCII)
_DIGITS = re.compile(r"[0-9a-f]{32}", re.ASCII)
_MOST_TEXT = 256  # characters
_TOKENS, _CAPACITY, _SECONDS = list_of(whole(0, 2**31 - 1)), whole(0, 2**40), number(0, 2**40)
_LINE = Kind(
    f"a line of at most {_MOST_TEXT} characters",
    lambda value: isinstance(value, str) and len(value) <= _MOST_TEXT and value.isprintable(),
)
_CHECKSUM = Kind("32 digits from 0 to f", lambda value: isinstance(value, str) and _DIGITS.fullmatch(value) is not None)
_MOST = {
    "num_layers": 2**12, _WINDOW_LAYERS: 2**12, "num_kv_heads": 2**14, "head_dim": 2**12, "page_tokens": 2**20,
    **_WINDOW_HEADS, **_STATES,
}  # fmt: skip


@dataclass(frozen=True)
class Page:
    """The file of a page, its checksum, xxh3_128 over the whole file, and which of its blocks are packed: see
    `PageFile`."""

    file: str
    checksum: str
    packed: str = ""


@dataclass(frozen=True)
class State:
    """The file of the states after the first `place` tokens, and its checksum as of a page."""

    place: int
    file: str
    checksum: str


@dataclass(frozen=True)
class Hidden:
    """The file of the hidden rows that a next-token head reads, `size` numbers each, of the first `num_first` tokens
    and of those from `start` on, and its checksum as of a page."""

    num_first: int
    start: int
    size: int
    file: str
    checksum: str

    def num_rows(self, num_tokens: int) -> int:
        """Rows in the file of a session of `num_tokens` tokens."""
        return self.num_first + num_tokens - self.start


@dataclass(frozen=True)
class Manifest:
    """The manifest of a session. tokens: the tokens whose keys and values are in the pages. window_pages: pages of
    layers with a window, from page `first_window_page` on. states: by ascending place. hidden: None if no next-token
    head drafted. capacity, extra: stored for the caller. created, updated: seconds since the epoch. writer: the
    program's version."""

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
    states: tuple[State, ...] = ()
    hidden: Hidden | None = None

    @property
    def files(self) -> set[str]:
        """The names of all files of pages, of states and of hidden rows."""
        hidden = {self.hidden.file} if self.hidden else set()
        pages = {page.file for page in (*self.pages, *self.window_pages)}
        return pages | {state.file for state in self.states} | hidden

    @property
    def windows_by_number(self) -> dict[int, Page]:
        """The pages of layers with a window, by number."""
        return dict(enumerate(self.window_pages, self.first_window_page))


def page_file(number: int, tag: str, kind: str = "page") -> str:
    """The file name of page `number`. tag: 16 hexadecimal digits, never used twice. kind: "page", or "window" for
    layers with a window."""
    return f"{kind}-{number:05d}-{tag}.safetensors"


def state_file(place: int, tag: str) -> str:
    """The file name of the states at `place`; `tag` as for a page."""
    return f"state-{place}-{tag}.safetensors"


def hidden_file(tag: str) -> str:
    """The file name of hidden rows; `tag` as for a page."""
    return f"hidden-{tag}.safetensors"


def is_content_file(name: str) -> bool:
    """Whether a file has the name of a page's, of states' or of hidden rows'."""
    return any(each.fullmatch(name) is not None for each in (_PAGE_FILE, _STATE_FILE, _HIDDEN_FILE))


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
    if "states" in record:
        record["states"] = [asdict(state) for state in manifest.states]
    if "hidden" in record and manifest.hidden is not None:
        record["hidden"] = asdict(manifest.hidden)
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
    """The oldest format that can represent the manifest."""
    identity = manifest.identity
    if manifest.hidden is not None:
        return _WITH_HIDDEN
    if identity.num_state_layers:
        return _WITH_STATES
    if identity.window_kv_heads:
        return _WITH_TWO_SHAPES
    return _WITH_WINDOWS if identity.num_window_layers else 1 + any(page.packed for page in manifest.pages)


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
    if type(version) is not int or version not in _PAGE_FIELDS:
        raise ValueError(
            f"its format is {shown(version)}, this program reads {min(_PAGE_FIELDS)} to {max(_PAGE_FIELDS)}"
        )
    source = fields_of(record, "").only(_fields_of(Manifest, version))
    identity, names = _identity(source.inner("identity"), version), _PAGE_FIELDS[version]
    tokens, extra = source.get("tokens", _TOKENS), source.get("extra", OBJECT)
    strict_json.check_depth(extra, MAX_DEPTH, "extra")
    return Manifest(
        identity=identity,
        tokens=tuple(tokens),
        pages=_pages(source, "pages", identity.page_format, len(tokens), names, "page"),
        capacity=source.get("capacity", _CAPACITY),
        extra=extra,
        created=float(source.get("created", _SECONDS)),
        updated=float(source.get("updated", _SECONDS)),
        writer=source.get("writer", _LINE),
        **_windows(source, identity, len(tokens), names),
        states=_states(source, len(tokens)) if version >= _WITH_STATES else (),
        hidden=_hidden(source.inner("hidden"), len(tokens)) if version >= _WITH_HIDDEN else None,
    )


def _fields_of(kind: type[Manifest | Identity], version: int) -> list[str]:
    """The names of the fields in a manifest of format `version`."""
    without = set() if version >= _WITH_WINDOWS else {*_WINDOW_FIELDS, _WINDOW_LAYERS}
    without |= set() if version >= _WITH_TWO_SHAPES else {*_WINDOW_HEADS}
    without |= set() if version >= _WITH_STATES else {*_STATES, "states"}
    without |= set() if version >= _WITH_HIDDEN else {"hidden"}
    return [each.name for each in fields(kind) if each.name not in without]


def _windows(source: Fields, identity: Identity, num_tokens: int, names: Sequence[str]) -> dict[str, Any]:
    if "window_pages" not in source.data:
        return {}
    form = identity.window_format
    first = source.get("first_window_page", whole(0, form.count(num_tokens)))
    pages = _pages(source, "window_pages", form, num_tokens, names, "window", first)
    return {"window_pages": pages, "first_window_page": first}


def _identity(source: Fields, version: int) -> Identity:
    source.only(_fields_of(Identity, version))
    least = {"num_layers": 0 if version >= _WITH_WINDOWS else 1}
    least |= dict.fromkeys((_WINDOW_LAYERS, *_WINDOW_HEADS), 0) if version >= _WITH_STATES else {}
    least |= dict.fromkeys(_STATES, 0) if version >= _WITH_HIDDEN else {}
    kinds = {name: whole(least.get(name, 1), most) for name, most in _MOST.items()} | {"dtype": one_of(*ELEMENT_BYTES)}
    return Identity(**{name: source.get(name, kinds.get(name, _LINE)) for name in source.data})


def _pages(
    source: Fields, key: str, form: PageFormat, num_tokens: int, names: Sequence[str], kind: str, first: int = 0
) -> tuple[Page, ...]:
    """The pages from `first` on that `num_tokens` need. The file name of page i contains i, so no file occurs twice."""
    values = source.get(key, LIST)
    if len(values) != (count := form.count(num_tokens) - first):
        raise ValueError(f"it names {len(values)} pages, its tokens need {count}")
    packed = Kind("1 or 0 for each block, packed or not", lambda value: isinstance(value, str) and form.allows(value))
    pages = []
    for place, value in enumerate(values, first):
        page = fields_of(value, f"page {place}").only(names)
        file = page.get("file", Kind(f"the file of page {place}", partial(_is_file_of, kind, place)))
        pages.append(Page(file, page.get("checksum", _CHECKSUM), page.get("packed", packed, "")))
    return tuple(pages)


def _is_file_of(kind: str, place: int, value: object) -> bool:
    match = _PAGE_FILE.fullmatch(value) if isinstance(value, str) else None
    return match is not None and match.groups() == (kind, f"{place:05d}")


def _states(source: Fields, num_tokens: int) -> tuple[State, ...]:
    """The states, at ascending places up to `num_tokens`."""
    found, before = list[State](), 0
    for index, value in enumerate(source.get("states", LIST)):
        state = fields_of(value, f"state {index}").only(_STATE_FIELDS)
        place = state.get("place", whole(before + 1, num_tokens))
        file = state.get("file", Kind(f"the file of the states at {place}", partial(_is_state_file_of, place)))
        found.append(State(place, file, state.get("checksum", _CHECKSUM)))
        before = place
    return tuple(found)


def _hidden(source: Fields, num_tokens: int) -> Hidden:
    name = Kind("a file of hidden rows", lambda value: isinstance(value, str) and bool(_HIDDEN_FILE.fullmatch(value)))
    found, places = source.only(_HIDDEN_FIELDS), whole(0, num_tokens)
    num_first, size = found.get("num_first", whole(0, min(num_tokens, _MOST_FIRST))), whole(1, _MOST_HIDDEN)
    counts = num_first, found.get("start", places), found.get("size", size)
    return Hidden(*counts, found.get("file", name), found.get("checksum", _CHECKSUM))


def _is_state_file_of(place: int, value: object) -> bool:
    match = _STATE_FILE.fullmatch(value) if isinstance(value, str) else None
    return match is not None and match[1] == str(place)
