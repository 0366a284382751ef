"""How a quantised checkpoint stores the matrices of its modules: schemes, and rules over names that choose one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from offload.formats.layout import GROUP_KINDS, GROUPS

Packing = Literal["awq", "gptq", "packed", "bytes"]
Way = Literal["is", "matches", "names", "holds", "ends", "glob", "class"]

MAX_PATTERN = 200  # characters
_REPEATS = 6  # of a pattern, at most: a name is compared with it in steps that grow as its length to this power
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


@dataclass(frozen=True)
class Scheme:
    """Of one matrix. packing: the tensors that it lies in, see weights/unpacking.py. bits: of a number. outputs,
    inputs: how many share a scale; 0 are all. scales: their dtype, F16, BF16 or F32. widens: a narrower one is read as
    that. is_float: numbers are e4m3. any_order: which inputs share one is told by the checkpoint. less_one: zeros are
    stored less 1. has_zeros: they must be there."""

    packing: Packing
    bits: int
    inputs: int = 0
    outputs: int = 1
    scales: str = "F16"
    widens: bool = False
    is_float: bool = False
    any_order: bool = False
    less_one: bool = False
    has_zeros: bool = False

    def encoding(self, inputs: int) -> str:
        """The name of the encoding of a matrix with so many inputs; "" where our blocks cannot hold it."""
        kind = f"FP8_{self.scales}" if self.is_float else f"INT{self.bits}_{self.scales}"
        shared = self.inputs or inputs
        fitting = [size for size in GROUPS if shared % size == inputs % size == 0]
        return f"{kind}/{max(fitting)}" if fitting and kind in GROUP_KINDS and not self.any_order else ""


@dataclass(frozen=True)
class Rule:
    """What holds of the modules that a pattern means: scheme, or None for plain numbers. way: how it means them.

    is: by their whole name. matches: as a regular expression from the start of the name. names: as transformers'
    modules_to_not_convert does. holds, ends: a part of the name, the last parts of it. glob: by it with * for anything.
    class: Linear, Embedding.
    """

    way: Way
    pattern: str
    scheme: Scheme | None = None

    def means(self, module: str, kind: str) -> bool:
        return _WAYS[self.way](self.pattern, kind if self.way == "class" else module)


@dataclass(frozen=True)
class Quantisation:
    """Of a checkpoint. rules: the first that means a module holds; without one its numbers are plain. remarks: what a
    user should know."""

    rules: tuple[Rule, ...]
    remarks: tuple[str, ...] = field(default=())

    def scheme(self, names: Iterable[str], kind: str) -> Scheme | None:
        """Of a module with those names, of which any may be meant."""
        names = tuple(names)
        for rule in self.rules:
            for name in names:
                if rule.means(name, kind):
                    return rule.scheme
        return None


def is_pattern(text: object) -> bool:
    """Whether `text` is a regular expression that a name is compared with in a bounded time."""
    if not isinstance(text, str) or len(text) > MAX_PATTERN or re.search(r"\)[*+{]", text):
        return False
    try:
        _compiled(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return len(re.findall(r"(?<!\()(?:[*+?]|\{[^}]*\})\??", text)) <= _REPEATS


@lru_cache(1 << 12)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _matches(pattern: str, name: str) -> bool:
    return _compiled(pattern).match(name) is not None


def _names(pattern: str, name: str) -> bool:
    """As transformers 5 has it: `should_convert_module` in quantizers/quantizers_utils.py."""
    return name.endswith(pattern) or _up_to_a_module(pattern).match(name) is not None


@lru_cache(1 << 12)
def _up_to_a_module(pattern: str) -> re.Pattern[str]:
    return re.compile(f"(?:{pattern}){_BOUNDARY}")


_WAYS: Mapping[Way, Callable[[str, str], bool]] = {
    "is": lambda pattern, name: name == pattern,
    "matches": _matches,
    "names": _names,
    "holds": lambda pattern, name: pattern in name,
    "ends": lambda pattern, name: f".{name}".endswith(f".{pattern}"),
    "glob": lambda pattern, name: fnmatchcase(name, pattern),
    "class": lambda pattern, name: name == pattern,
}
