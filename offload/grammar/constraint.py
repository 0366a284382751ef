"""Constraints on the generated text, and their translation into llguidance's grammars or into errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

from offload import strict_json
from offload.errors import UsageError
from offload.grammar.json_refs import token

T = TypeVar("T")
Kind = Literal["json-schema", "regex", "choice", "grammar"]
# White space between the tokens of JSON: none, one space, or a new line and its indentation. Models indent and put
# spaces after colons, and forcing a text that they would not write costs quality. But where any number of spaces is
# allowed, small models write spaces until the last token. llama.cpp's bound for the same reason is 20.
WHITESPACE = r"(?: |\n[ \t]{0,20})"
# Keywords whose value is not a schema, though it may look like one.
_NO_SCHEMAS = ("const", "enum", "default", "examples", "x-guidance")
MOST_LETTERS = 1 << 20  # of a constraint: the library takes the square of some lengths
# Bytes of stack to compile on. The library follows rules and references that name each other one inside the other, and
# one that exceeds its stack ends the process: 1,000 of them take 8 MB, and no stack bounds how many a text has.
_STACK, _STACK_OF_LETTER = 1 << 24, 1 << 10
_MAX_LOOKS = 500  # subschemas that are compiled by themselves to locate a refusal
_CAUGHT = r"regex parse error:\n    [^\n]*\n(?P<before>    *)\^+\nerror: (?P<words>[^\n]*)"
_PLACE = re.compile(r"(?:at )?(?P<line>\d+)\((?P<column>\d+)\): (?P<words>.*?)(?:\n +\d+ \| .*)?", re.DOTALL)
_IN_REGEX = re.compile(r'invalid regex ".*" \(in regex\): (?P<words>.*)', re.DOTALL)
_REMEDIES = (
    ("Unimplemented keys", "say the same with other keywords, or take these out"),
    ("oneOf constraints", "write anyOf"),
    ("Unsatisfiable|NoExtension", "change it so that some text fits"),
    ("retriev", "copy what it refers to into $defs"),
    ("look-?around", "say it without (?=...), (?!...), (?<=...), \\b, and ^ or $ inside"),
    ("too (large|complex|many|big)|limit|fuel|exceed|^panic", "make it smaller: fewer alternatives and smaller bounds"),
)  # fmt: skip
_REMEDY = {
    "json-schema": "correct it there",
    "regex": "the syntax is that of Rust's regex crate",
    "choice": "take fewer of them",
    "grammar": "the syntax is llguidance's variant of Lark",
}


@dataclass(frozen=True)
class Constraint:
    """A constraint on the generated text. text: a JSON schema, a regex that the whole text must match, a JSON list of
    the allowed strings, or a grammar in Lark's syntax whose rule `start` is the text. calls: rules in Lark's syntax, of
    which the text may be `calls` instead; "" for none."""

    kind: Kind
    text: str
    calls: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UsageError(f"a constraint is one of {', '.join(get_args(Kind))}, not {self.kind!r}")

    @property
    def name(self) -> str:
        return {"json-schema": "JSON schema", "choice": "list of choices"}.get(self.kind, self.kind)


def library_grammar(constraint: Constraint) -> str:
    """The constraint in llguidance's format. Raises UsageError where the text should be JSON and is not."""
    answer = _answer_grammar(constraint)
    if not constraint.calls:
        return answer
    either = {"name": "either", "lark_grammar": f"start: @answer | calls\n{constraint.calls}"}
    return json.dumps({"grammars": [either, {**json.loads(answer)["grammars"][0], "name": "answer"}]})


def rule_of(schema: Mapping[str, Any]) -> str:
    """A JSON schema as a rule of a grammar in Lark's syntax. Raises UsageError where it cannot be followed."""
    constraint = Constraint("json-schema", json.dumps(schema))
    return on_stack_of(constraint, lambda: _embedded(constraint))


def on_stack_of(constraint: Constraint, compiled: Callable[[], T]) -> T:
    """The result of a function that compiles a constraint. Raises UsageError for one over MOST_LETTERS."""
    from offload.transfer.background import on_stack

    if (count := len(constraint.text) + len(constraint.calls)) > MOST_LETTERS:
        raise UsageError(
            f"the {constraint.name} has {count} characters, over the limit of {MOST_LETTERS}; make it smaller"
        )
    return on_stack(_STACK + count * _STACK_OF_LETTER, compiled)


def _embedded(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    grammar = _of_schema(schema_of(constraint))
    if error := LLMatcher.validate_grammar(grammar):
        raise refusal(constraint, error)
    return f"%json {json.dumps(json.loads(grammar)['grammars'][0]['json_schema'])}"


def _answer_grammar(constraint: Constraint) -> str:
    """The constraint without calls in llguidance's format."""
    from llguidance import LLMatcher

    if constraint.kind == "json-schema":
        return _of_schema(schema_of(constraint))
    if constraint.kind == "grammar":
        return json.dumps({"grammars": [{"lark_grammar": constraint.text}]})
    return LLMatcher.grammar_from_regex(_of_choices(constraint) if constraint.kind == "choice" else constraint.text)


def schema_of(constraint: Constraint) -> dict[str, Any] | bool:
    """The constraint's JSON schema. Raises UsageError."""
    schema = _json_of(constraint)
    if not isinstance(schema, dict | bool):
        raise UsageError(f"a JSON schema is an object, true or false, and this one is {_short(schema)}")
    return schema


def refusal(constraint: Constraint, error: str) -> UsageError:
    """The error for a constraint that llguidance refuses. error: llguidance's message."""
    error = error.removesuffix("\n<non-verbose/>").partition("<backtrace>")[0].strip()
    place, words = _place_and_words(constraint, error)
    remedy = next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, error)), _REMEDY[constraint.kind])
    words = "no text fits it" if words.startswith("NoExtension") else words
    return UsageError(f"the {constraint.name} cannot be followed: {place}{words}; {remedy}")


def _json_of(constraint: Constraint) -> Any:
    try:
        return strict_json.parse(constraint.text)
    except json.JSONDecodeError as error:
        said = f"{error.msg} (line {error.lineno}, column {error.colno})"
    except ValueError as error:
        said = str(error)
    except RecursionError:
        said = "it is nested too deep"
    raise UsageError(f"the {constraint.name} is not JSON: {said}; correct it there")


def _of_schema(schema: dict[str, Any] | bool) -> str:
    """The grammar of a JSON schema. Raises UsageError."""
    from offload.grammar.json_schema import Refused

    if schema is False:
        raise UsageError("the JSON schema cannot be followed: it is false, no text fits it; write true, or a schema")
    try:
        return _compiled({} if schema is True else schema)
    except Refused as error:
        place = f"at {error.pointer}: " if error.pointer else ""
        said = f"{place}{error}; take another value"
    except RecursionError:
        said = "it is nested too deep; make it flatter"
    except ValueError as error:
        said = f"{error}; {_REMEDY['json-schema']}"
    raise UsageError(f"the JSON schema cannot be followed: {said}")


def _compiled(schema: dict[str, Any]) -> str:
    """The library's grammar of a schema. The schema's own `x-guidance` may set other white space. Raises ValueError."""
    from llguidance import LLMatcher

    from offload.grammar.json_schema import followed

    guidance = schema.get("x-guidance", {})
    if not isinstance(guidance, dict):
        raise ValueError(f"x-guidance is {_short(guidance)}, it must be an object")
    if guidance.get("lenient"):
        raise ValueError("x-guidance has lenient, which would ignore keywords")
    whitespace: Any = {} if "whitespace_flexible" in guidance else {"whitespace_pattern": WHITESPACE}
    return LLMatcher.grammar_from_json_schema(
        json.dumps(followed(schema)), defaults=whitespace, overrides={"lenient": False}
    )


def _of_choices(constraint: Constraint) -> str:
    """The grammar of a list of strings, as one regex: the parser sees one terminal instead of one for each choice."""
    choices = _json_of(constraint)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise UsageError(f'the choices are a JSON list of strings, as ["yes", "no"], and this is {_short(choices)}')
    try:
        "".join(choices).encode()
    except UnicodeEncodeError as error:
        raise UsageError("the choices have half of a surrogate pair, which is no character; take it out") from error
    return "|".join("".join(map(escaped, choice)) for choice in dict.fromkeys(choices))


def escaped(letter: str) -> str:
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):x}}}"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _place_and_words(constraint: Constraint, error: str) -> tuple[str, str]:
    """(place of a library's error, as "line 1, column 2: " or "", its message in one line)."""
    words, line, column = error, "", ""
    if found := _PLACE.fullmatch(error):
        words, line, column = found["words"], f"line {found['line']}, ", found["column"]
    if inner := _IN_REGEX.fullmatch(words):
        words = inner["words"]
    if caught := re.search(_CAUGHT, words):
        words, in_regex = caught["words"], len(caught["before"]) - 3
        if constraint.kind == "regex":
            return f"column {in_regex}: ", words
        words += f" (column {in_regex} of the regex)"
    words = " ".join(words.split())
    if constraint.kind == "json-schema":
        pointer = _pointer(schema_of(constraint), error)
        return (f"at {pointer}: " if pointer else ""), words
    return (f"{line}column {column}: " if line and constraint.kind == "grammar" else ""), words


def _pointer(schema: dict[str, Any] | bool, error: str) -> str:
    """The JSON pointer of the innermost part of a schema that is refused with the same message; "" for the whole."""
    from llguidance import LLMatcher

    for count, (pointer, part) in enumerate(_parts(schema, "")):
        if count == _MAX_LOOKS:
            break
        with suppress(ValueError):
            if LLMatcher.validate_grammar(_compiled(part)).strip() == error:
                return pointer
    return ""


def _parts(value: object, pointer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in `value` that may be schemas, the innermost first."""
    named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in cast(Any, named):
        if name not in _NO_SCHEMAS:
            yield from _parts(child, f"{pointer}/{token(str(name))}")
    if isinstance(value, dict):
        yield pointer, value
