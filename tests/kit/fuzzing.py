"""Damaged and malicious files, the same in every run, and the outcomes of reading them. No tests in here."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from triforce_cli.ground.errors import describe

MODEL_REFUSED = 4  # the exit code
# What stands for text that no JSON encoder writes.
_RAW = {
    "@deep": "[" * 20_000,
    "@nested": '{"a":' * 400 + "1" + "}" * 400,
    "@digits": "9" * 5_000,
    "@many": "[" + ",".join(["0"] * 20_000) + "]",
}
_WILD: tuple[object, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, -1.5, 1e308, 1e-308, float("nan"), float("inf"), -float("inf")),
    *(2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63, 2**64, 10**400, -(2**63)),
    *("", " ", "a", "\0", "\x1b[2J", "\ud800", "é", "👍", "x" * 3_000, "Ġ", "<s>", "(", "[", "(?="),
    *("..", "../a", "/etc/passwd", "../model.safetensors", "C:\\a", "https://example.com/a.safetensors"),
    *([], {}, [[]], [0], [0, 0], [2**63, 2**63], [-4, 4], {"a": 1}, {"": None}, *_RAW),
    *("F32", "F16", "BF16", "F64", "F4", "F8_E4M3", "I64", "BOOL", "C64", "float16", "float32"),
    *("BPE", "Unigram", "WordLevel", "WordPiece", "ByteLevel", "Precompiled", "Metaspace", "Sequence", "Replace"),
)


def put(path: Path, data: bytes) -> None:
    """Replace a file; some file systems wait for the disk when a file is truncated instead."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def damaged_json(document: Any, random: Random) -> bytes:
    """A JSON document with a few changed values, keys, types or bytes."""
    changed = json.loads(json.dumps(document))
    for _ in range(random.randint(0, 3)):
        _change(changed, random)
    text = json.dumps(changed)
    for mark, raw in _RAW.items():
        text = text.replace(f'"{mark}"', raw)
    if random.random() < 0.1 and isinstance(changed, dict) and changed:  # the same key twice
        key = random.choice(sorted(changed))
        text = text.replace("{", "{" + f"{json.dumps(key)}: {json.dumps(random.choice(_WILD))},", 1)
    data = text.encode()
    return damaged_bytes(data, random) if random.random() < 0.2 else data


def damaged_bytes(data: bytes, random: Random) -> bytes:
    """Bytes with flipped bits, missing or inserted parts, or a missing end."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(changed) + 1)
        match random.randrange(5):
            case 0 | 1 if place < len(changed):
                changed[place] ^= 1 << random.randrange(8)
            case 2:
                del changed[place : place + random.choice((1, 2, 8, 100))]
            case 3:
                changed[place:place] = random.randbytes(random.choice((1, 2, 8, 100)))
            case 4 if random.random() < 0.3:
                del changed[place:]
    return bytes(changed)


def damaged_safetensors(data: bytes, random: Random) -> bytes:
    """A safetensors file with a changed header, header length or bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    header, tensors = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = random.random()
    if kind < 0.15:
        return damaged_bytes(data, random)
    if kind < 0.6 and len(header) > 2:
        _lie(header, random)
        encoded = json.dumps(header).encode()
    else:
        encoded = damaged_json(header, random)
    length = len(encoded)
    if random.random() < 0.1:
        length = random.choice((0, 1, length - 1, length + 1, length + 8, 2**24 + 1, 2**40, 2**60, 2**63, 2**64 - 1))
    if random.random() < 0.1:
        tensors = tensors[: random.randrange(len(tensors) + 1)]
    return struct.pack("<Q", length) + encoded + tensors


def _lie(header: dict[str, Any], random: Random) -> None:
    """Change the header's entry of a tensor to another plausible one."""
    name, other = random.sample(sorted(header.keys() - {"__metadata__"}), 2)
    entry, further = header[name], header[other]
    start, end = entry["data_offsets"]
    match random.randrange(9):
        case 0:
            entry["data_offsets"], further["data_offsets"] = further["data_offsets"], entry["data_offsets"]
        case 1:
            entry["data_offsets"] = further["data_offsets"]
        case 2:
            entry["data_offsets"] = random.choice(([end, start], [-4, end], [start, end + 4], [start, 2**63], [0, 0]))
        case 3:
            entry["shape"] = random.choice(([2**32, 2**32], [2**63, 2], [-1], [0], [], entry["shape"][::-1]))
        case 4:
            entry["shape"] = [size * 2 for size in entry["shape"]]
        case 5:
            entry["dtype"] = random.choice(("F16", "BF16", "I32", "U32", "F64", "I8", "F8_E5M2", "F4"))
        case 6:
            header[random.choice(("../" + name, "/" + name, name + "\x1b[2J", "", name.upper()))] = header.pop(name)
        case 7:
            header[name], header[other] = further, entry
        case 8:
            del header[name]


def _change(document: Any, random: Random) -> None:
    holder, key = random.choice(list(_places(document)) or [(None, None)])
    if holder is None:
        return
    match random.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[str(random.choice(_WILD))] = json.loads(json.dumps(random.choice(_WILD)))
        case 2:
            other, further = random.choice(list(_places(document)))
            holder[key] = json.loads(json.dumps(other[further]))
        case _:
            holder[key] = json.loads(json.dumps(random.choice(_WILD)))


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key) in a document, up to 40 of one holder."""
    if isinstance(document, (dict, list)):
        for key in list(document)[:40] if isinstance(document, dict) else range(min(len(document), 40)):
            yield document, key
            yield from _places(document[key])


def outcomes(num_cases: int, prepare: Callable[[Random], object], read: Callable[[], object]) -> Counter[str]:
    """Count the cases that `prepare` writes by outcome: "works", or "refused" with a ModelError's exit code.

    Any other outcome fails with the case's number: Random(number) reproduces it.
    """
    counts: Counter[str] = Counter()
    for number in range(num_cases):
        prepare(Random(number))
        try:
            read()
            counts["works"] += 1
        except BaseException as error:  # a panic of a library is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            failure = describe(error, debug=False)  # type: ignore[arg-type]
            assert failure.exit_code == MODEL_REFUSED, f"case {number}: {failure.message}"
            counts["refused"] += 1
    assert sum(counts.values()) == num_cases
    return counts


@contextmanager
def growth_under(limit_bytes: int) -> Iterator[None]:
    """Fails if the peak memory of the process grows by `limit_bytes` or more in the body."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _highest_bytes()
    yield
    growth = _highest_bytes() - before
    assert growth < limit_bytes, f"{growth / 1e6:.1f} MB, the limit is {limit_bytes / 1e6:.1f} MB"


def _highest_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10
