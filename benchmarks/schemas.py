"""The share of a JSON Schema test suite that constrained output supports, and whether it accepts the right texts.

The suite is a folder of files as in github.com/json-schema-org/JSON-Schema-Test-Suite, tests/draft2020-12. Each
instance is written without spaces, its fields in the schema's order, as that is the only order of constrained output. A
schema is refused as a user's would be, or compiled. A compiled schema must accept no instance that the suite calls
invalid; valid instances that it does not accept are counted.

usage: python benchmarks/schemas.py FOLDER [--optional] [--list]
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import about, emit, say

from offload.errors import UsageError
from offload.grammar.grammar import Constraint, Grammar
from offload.text.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[1] / "triforce_cli" / "models" / "demo-target"


@dataclass
class Counts:
    """Numbers of schemas and, for those that compile, of instances."""

    compiled: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    valid: int = 0
    valid_not_accepted: list[str] = field(default_factory=list)
    invalid: int = 0
    invalid_accepted: list[str] = field(default_factory=list)


def groups(folder: Path, *, optional: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and description, schema with its tests)."""
    for path in sorted(folder.rglob("*.json") if optional else folder.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            yield f"{path.stem}: {group['description']}", group


def reason(error: UsageError) -> str:
    """The reason in a refusal, without its place and the schema's own names."""
    said = str(error).partition("cannot be followed: ")[2] or str(error)
    said = re.sub(r"^at \S+: ", "", said).rpartition("; ")[0]
    return re.sub(r"Pointer '.*'|Resource '.*?'|\(-?[\d.]+\)|'[^']*'", "...", said)[:90]


def ordered(instance: object, schema: object) -> object:
    """The instance with fields in the order of `properties`, then of `required`, if the schema has them directly."""
    if isinstance(instance, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [ordered(item, items) for item in instance]
    if not isinstance(instance, dict):
        return instance
    named = schema.get("properties", {}) if isinstance(schema, dict) else {}
    needed = schema.get("required", []) if isinstance(schema, dict) else []
    names = [name for name in dict.fromkeys([*named, *needed, *instance]) if name in instance]
    return {name: ordered(instance[name], named.get(name)) for name in names}


def accepts(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    state, tokens = grammar.state(), tokenizer.encode_piece(text, first=True)
    return state.advance(tokens) == len(tokens) and state.is_complete


def count(folder: Path, tokenizer: Tokenizer, *, optional: bool) -> Counts:
    counts, end = Counts(), tokenizer.eos_token_id
    assert end is not None
    for name, group in groups(folder, optional=optional):
        constraint = Constraint("json-schema", json.dumps(group["schema"]))
        try:
            grammar = Grammar.compiled(constraint, tokenizer, len(tokenizer), [end])
        except UsageError as error:
            counts.refused[reason(error)] += 1
            continue
        counts.compiled += 1
        for test in group["tests"]:
            instance = ordered(test["data"], group["schema"])
            text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
            accepted, label = accepts(grammar, tokenizer, text), f"{name}: {test['description']}"
            if test["valid"]:
                counts.valid += 1
                counts.valid_not_accepted += [] if accepted else [label]
            else:
                counts.invalid += 1
                counts.invalid_accepted += [label] if accepted else []
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--optional", action="store_true", help="with the folders inside")
    parser.add_argument("--list", action="store_true", help="name the instances that were judged otherwise")
    args = parser.parse_args()
    counts = count(args.folder, Tokenizer.from_folder(DEMO), optional=args.optional)
    if args.list:
        for name in counts.valid_not_accepted:
            say(f"valid, not accepted: {name}")
        for name in counts.invalid_accepted:
            say(f"invalid, accepted: {name}")
    for said, number in counts.refused.most_common():
        say(f"{number} refused: {said}")
    numbers = {
        "schemas that compile": counts.compiled,
        "schemas refused": counts.refused.total(),
        "valid instances": counts.valid,
        "of them not accepted": len(counts.valid_not_accepted),
        "invalid instances": counts.invalid,
        "of them accepted": len(counts.invalid_accepted),
    }
    emit(["what", "number"], [[name, str(number)] for name, number in numbers.items()], about("schemas", 0), [numbers])


if __name__ == "__main__":
    main()
