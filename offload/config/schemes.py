"""Quantisation schemes of a checkpoint's matrices, and the rules over module names that choose a scheme."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate
from functools import cached_property, lru_cache
from itertools import chain, groupby
from typing import Literal

from offload.formats.encodings import ENCODINGS, GROUPS

Packing = Literal["awq", "gptq", "packed", "bytes", "mxfp4", "fp4", "packed_fp4"]
Way = Literal["is", "matches", "names", "holds", "ends", "glob", "class"]

MAX_PATTERN = 200  # characters
_REPEATS = 6  # at most, of a pattern: the steps of a match grow as the name's length to this power
ACTIVATIONS = (
    "the checkpoint also asks for quantised activations; here they are not: the target is the model with these weights "
    "and plain activations"
)
KV_CACHE = "the checkpoint's scales for a quantised KV cache are not used: keys and values are exact here"
_NAME = re.compile(r"[\w.-]*[\w-]")  # the dots of a name are dots, in an expression, too
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


@dataclass(frozen=True)
class Scheme:
    """The quantisation scheme of one matrix. packing: the tensors that hold it, see weights/unpacking.py. bits: per
    number. outputs, inputs: the numbers of them that share a scale; 0 means all. scales: their dtype, F16, BF16 or F32,
    of e2m1 E8M0 or F8_E4M3. widens: scales of a narrower dtype are widened to it. is_float: numbers are e4m3, with 4
    bits e2m1. any_order: the checkpoint says which inputs share a scale. less_one: zero points are stored less 1.
    has_zeros: zero points are required."""

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

    @property
    def is_e2m1(self) -> bool:
        return self.is_float and self.bits == 4

    @property
    def numbers(self) -> str:
        """The dtype of plain numbers: that of scales, which e2m1's are computed in fp32."""
        return "F32" if self.is_e2m1 else self.scales

    def encoding(self, inputs: int) -> str:
        """The name of the encoding of a matrix with `inputs` inputs; "" if no encoding of this program holds it."""
        if self.packing == "mxfp4":
            return "MXFP4"
        if self.is_e2m1:
            found = "MXFP4" if self.scales == "E8M0" else "NVFP4_INV" if self.packing == "packed_fp4" else "NVFP4"
            return "" if inputs % ENCODINGS[found].numbers else found
        kind = f"FP8_{self.scales}" if self.is_float else f"INT{self.bits}_{self.scales}"
        shared = self.inputs or inputs
        names = [f"{kind}/{size}" for size in GROUPS if shared % size == inputs % size == 0]
        return names[-1] if names and names[-1] in ENCODINGS and not self.any_order else ""


@dataclass(frozen=True)
class Rule:
    """A rule that gives the modules matched by a pattern their scheme, or None for plain numbers. way: the kind of
    match.

    Kinds of match: is, the whole name; matches, a regular expression from the start of the name; names, as
    transformers' modules_to_not_convert; holds, a part of the name; ends, its last parts; glob, the name with * for
    anything; class, Linear or Embedding.
    """

    way: Way
    pattern: str
    scheme: Scheme | None = None

    def means(self, module: str, kind: str) -> bool:
        return _WAYS[self.way](self.pattern, kind if self.way == "class" else module)

    @property
    def lists(self) -> Way | None:
        """The way of a rule whose pattern is a plain name or a glob; None for others."""
        is_plain = self.way in ("is", "class", "glob") or (self.way == "names" and _NAME.fullmatch(self.pattern))
        return self.way if is_plain else None


@dataclass(frozen=True)
class _Listed:
    """Rules of one way and scheme, looked up at once: plain names, or globs. A list of a mixture's modules has a
    thousand names, and there are 75,000 modules."""

    way: Way
    names: frozenset[str]

    def means(self, module: str, kind: str) -> bool:
        if self.way == "glob":
            return self._globs.match(module) is not None
        if self.way != "names":
            return (kind if self.way == "class" else module) in self.names
        last = module.rpartition(".")[2]
        ends = (*self._ends.get(last, ()), *self._ends.get("", ()))
        return module.endswith(ends) or any(owner in self.names for owner in _with_owners(module))

    @cached_property
    def _globs(self) -> re.Pattern[str]:
        return re.compile("|".join(map(translate, self.names)))

    @cached_property
    def _ends(self) -> dict[str, tuple[str, ...]]:
        """The names by their last part; under "" those of one part, which a part may end with."""
        found = dict[str, list[str]]()
        for name in self.names:
            found.setdefault(name.rpartition(".")[2] if "." in name else "", []).append(name)
        return {last: tuple(names) for last, names in found.items()}


@dataclass(frozen=True)
class Quantisation:
    """The quantisation of a checkpoint. rules: the first rule that matches a module applies; without one its numbers
    are plain. named: schemes of modules, and of all within one, which go before the rules. remarks: notes for the user.
    by_tensors: the checkpoint's tensors say which modules are quantised, where they are there."""

    rules: tuple[Rule, ...]
    remarks: tuple[str, ...] = field(default=())
    named: Mapping[str, Scheme | None] = field(default_factory=dict)
    by_tensors: bool = False

    def scheme(self, names: Iterable[str], kind: str) -> Scheme | None:
        """The scheme of a module with several names, any of which may match."""
        names = tuple(names)
        for module in chain.from_iterable(map(_with_owners, names)):
            if module in self.named:
                return self.named[module]
        for rules, scheme in self._steps:
            if any(rules.means(name, kind) for name in names):
                return scheme
        return None

    @cached_property
    def _steps(self) -> list[tuple[_Listed | Rule, Scheme | None]]:
        """The rules with their schemes, in order; lists of names beside each other are one."""
        found = list[tuple[_Listed | Rule, Scheme | None]]()
        for (way, scheme), beside in groupby(self.rules, key=lambda rule: (rule.lists, rule.scheme)):
            rules = [*beside]
            listed = _Listed(way, frozenset(rule.pattern for rule in rules)) if way else None
            found += [(each, scheme) for each in ([listed] if listed else rules)]
        return found


def _with_owners(module: str) -> Iterator[str]:
    """A module's name and those of the modules that it is in, the innermost first."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def is_pattern(text: object) -> bool:
    """Whether `text` is a regular expression whose matching time is bounded."""
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
    """Whether a pattern matches a name as in transformers 5: `should_convert_module` in
    quantizers/quantizers_utils.py."""
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
