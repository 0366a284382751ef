"""Forms in which models write tool calls: the table, each form with its marks and the function that parses it."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from offload import strict_json
from triforce_cli.tools.arguments import Tools, listed, parameters_of, typed

Call = dict[str, Any]  # {"name", "arguments"}
Parse = Callable[[str, Tools], Iterator[Call]]  # the calls in a reply; {} for a call that cannot be parsed

_BEFORE_JSON = re.compile(r"\s*(?:```(?:json)?\s*)?")
_BEFORE_NAME = r'\{\s*(?:"(?:tool_call_id|id)"\s*:\s*"\w*"\s*,\s*)?"(?:name|tool_name)"\s*:\s*"'
_CALL = rf'{_BEFORE_NAME}([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
_BEHIND_ARGUMENTS = re.compile(rf'\s*(?:,\s*"id"\s*:\s*"\w*"\s*)?\}}[\s;,`]*{_CALL}')
_KEY = re.compile(r"(?<=[{,])\s*([A-Za-z_][\w.-]*)\s*:")
_TITLE = re.compile(r"\s*([\w.-]+)[ \t]*\n(?=\s*\{)")
_FIRST = re.compile(r'"(?:[^"\\]|\\.)*"')
_SEPARATORS = re.compile(r"[\s;,`]*")
_LONGEST_EXPRESSION = 1 << 16  # characters of calls in Python's syntax
_JSON_LITERALS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class Written:
    """The calls of a reply that is nothing else, in Lark's syntax, with the parts of call_grammar.py: `opening`, calls
    with `between` between two of them, `closing`. It begins with a mark, or with a call in JSON.

    argument: one of `arguments`, whose `value` ends with the mark `close`. wraps: as in `_tags`.
    """

    call: str
    opening: str = ""
    between: str = ""
    closing: str = ""
    argument: str = ""
    close: str = ""
    wraps: bool = False

    @property
    def mark(self) -> str:
        """The mark that it begins with; "" for none."""
        found = _FIRST.match(self.opening or self.call)
        return json.loads(found[0]) if found else ""

    @classmethod
    def of_list(cls, mark: str, closing: str = "") -> Written:
        """A list of calls in JSON behind a mark."""
        return cls("json", f'"{mark}" space "[" space', 'space "," space', f'space "]" space {closing}')


@dataclass(frozen=True)
class Read:
    """The reading of a form. grows: a call from its mark up to its arguments, which are JSON, with its name as the
    group. goes_on: from the end of arguments up to those of another call without a mark. None: see growing.py."""

    parse: Parse
    grows: re.Pattern[str] | None = None
    goes_on: re.Pattern[str] | None = None


@dataclass(frozen=True)
class Form:
    """A form of calls. marks: a template with one of them uses this form; calls begin with the first mark. bare: a
    whole reply may be calls without the first mark, and each has "{" of JSON, "(" of Python or a line end behind its
    name; "" for none. around: marks that may stand before all calls. written: how a grammar describes calls, in any
    of these ways; () if none can."""

    marks: tuple[str, ...]
    read: Read
    bare: str = ""
    around: tuple[str, ...] = ()
    written: tuple[Written, ...] = ()

    def is_asked_for(self, template: str) -> bool:
        return any(mark in template for mark in self.marks)


def _calls(found: Any) -> list[Call]:
    """The calls in a JSON object with a name and arguments under any of the known keys, or in a list of such
    objects."""
    return [_call(each) for each in (found if isinstance(found, list) else [found])]


def _call(found: Any) -> Call:
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]
    if not isinstance(found, dict):
        return {}
    name = found.get("name", found.get("tool_name"))
    arguments = found.get("arguments", found.get("parameters")) or {}  # a tool without parameters
    if isinstance(arguments, str):
        arguments = _json(arguments)[0]
    return {"name": name, "arguments": arguments} if isinstance(arguments, dict) else {}


def _json(text: str, start: int = 0) -> tuple[Any, int]:
    """(value, end) of the JSON value at `start`, after white space and a code fence; (None, start of the value) if
    there is no JSON."""
    before = _BEFORE_JSON.match(text, start)
    start = before.end() if before else start
    with suppress(ValueError, RecursionError):
        return strict_json.DECODER.raw_decode(text, start)
    return None, start


def _behind(mark: str) -> Read:
    """The parser of JSON after each mark, one value or several. JSON itself shows where it ends, so the closing mark
    may be missing, or occur in a string."""

    def read(reply: str, tools: Tools) -> Iterator[Call]:
        at = reply.find(mark)
        while at >= 0:
            found, end = _json(reply, at + len(mark))
            yield from _calls(found)
            while found is not None and reply.startswith("{", following := _skipped(reply, end)):
                found, end = _json(reply, following)
                yield from _calls(found)
            at = reply.find(mark, end)

    grows = rf"{re.escape(mark)}{_BEFORE_JSON.pattern}\[?\s*{_CALL}"
    return Read(read, re.compile(grows), _BEHIND_ARGUMENTS)


def _named(pattern: str) -> Read:
    """The parser of a name followed by its arguments as JSON. pattern: up to the arguments, with the name as a
    group."""
    begin = re.compile(pattern)

    def read(reply: str, tools: Tools) -> Iterator[Call]:
        end = 0
        while match := begin.search(reply, end):
            arguments, end = _json(reply, match.end())
            yield {"name": match[1], "arguments": arguments}

    return Read(read, re.compile(rf"{pattern}{_BEFORE_JSON.pattern}(?=\{{)"))


def _plain(reply: str, tools: Tools) -> Iterator[Call]:
    """The calls in a reply that is nothing but JSON: one call, a list of calls, or several with separators."""
    text = _behind_python_tag(reply)
    calls, at = list[Call](), 0
    while at < len(text):
        found, end = _json(text, at)
        if not all(_has_arguments(each) for each in listed(found)):
            return
        calls += _calls(found)
        at = _skipped(text, end)
    yield from calls


def _titled(reply: str, tools: Tools) -> Iterator[Call]:
    """The calls in a reply that is nothing but names, each on a line before its arguments as JSON."""
    calls, at = list[Call](), 0
    while match := _TITLE.match(reply, at):
        arguments, end = _json(reply, match.end())
        calls.append({"name": match[1], "arguments": arguments})
        at = _skipped(reply, end)
    yield from calls if at == len(reply) else ()


def _has_arguments(found: Any) -> bool:
    """True if the object has arguments: a plain JSON answer may have a name, too."""
    return isinstance(found, dict) and bool({"arguments", "parameters", "function"} & found.keys())


def _skipped(text: str, at: int) -> int:
    """The index after separators between calls."""
    separator = _SEPARATORS.match(text, at)
    return separator.end() if separator else at


def _behind_python_tag(reply: str) -> str:
    before, tag, after = reply.partition("<|python_tag|>")
    return (after if tag else before).strip()


def _pythonic(begin: str, end: str) -> Read:
    """The parser of calls in Python's syntax, between two marks or as the whole reply: [get_weather(city="Paris")], or
    one a line."""

    def read(reply: str, tools: Tools) -> Iterator[Call]:
        before, mark, after = _behind_python_tag(reply).partition(begin)
        text = (after.partition(end)[0] if mark else before).strip()
        if len(text) > _LONGEST_EXPRESSION:
            return
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            yield from [_expression(call) for call in _expressions(text)]

    return Read(read)


def _expressions(text: str) -> Iterator[ast.expr]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on escapes that Python does not know
        found = ast.parse(text).body
    for each in found:
        value = each.value if isinstance(each, ast.Expr) else None
        yield from value.elts if isinstance(value, ast.List) else [value or ast.Constant(None)]


def _expression(call: ast.expr) -> Call:
    """The call in an expression. Raises ValueError if it is no call with named arguments."""
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("no call")
    arguments = {str(keyword.arg): ast.literal_eval(_Literals().visit(keyword.value)) for keyword in call.keywords}
    return {"name": ast.unparse(call.func), "arguments": arguments}


class _Literals(ast.NodeTransformer):
    """Replaces JSON's names true, false and null by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_LITERALS[node.id]) if node.id in _JSON_LITERALS else node


def _braced(begin: str, quote: str) -> Read:
    """The parser of call:get_weather{city:<quote>Paris<quote>,days:3}, which is JSON with bare keys and marks as
    quotes."""
    call = re.compile(rf"{re.escape(begin)}\s*call:([\w.-]+)(?=\{{)")

    def read(reply: str, tools: Tools) -> Iterator[Call]:
        for match in call.finditer(reply):
            *parts, rest = reply[match.end() :].split(quote)
            quoted = "".join(json.dumps(part) if i % 2 else _KEY.sub(r'"\1":', part) for i, part in enumerate(parts))
            arguments = _json(quoted + (_KEY.sub(r'"\1":', rest) if len(parts) % 2 == 0 else json.dumps(rest)))[0]
            yield {"name": match[1], "arguments": arguments}

    return Read(read)


def _tags(call: str, ends: Sequence[str], argument: str, close: str, *, wraps: bool = True) -> Read:
    """The parser of arguments as texts between tags, or as JSON. call: the pattern of a call's beginning, with its
    name; ends: closing marks of a call. argument: the pattern of an argument's beginning, with its name; close: its
    closing mark. wraps: a line end may stand between the marks and a value."""
    call_begin, argument_begin = re.compile(call), re.compile(argument)

    def read(reply: str, tools: Tools) -> Iterator[Call]:
        for name, body in _parts(call_begin, reply):
            arguments = _json(body)[0]
            if not isinstance(arguments, dict):
                texts = list(_parts(argument_begin, body))
                if not _is_closed(texts[-1][1] if texts else body, (close, *ends)):
                    yield {}
                    continue
                values = {key.strip(): _before(text, (close, *ends)) for key, text in texts}
                values = {key: _unwrapped(value) for key, value in values.items()} if wraps else values
                arguments = {key: typed(value, key, parameters_of(tools, name)) for key, value in values.items()}
            yield {"name": name, "arguments": arguments}

    return Read(read)


def _is_closed(text: str, ends: Sequence[str]) -> bool:
    """True if the text has a closing mark; without one the reply was cut within a value."""
    return any(end in text for end in ends)


def _before(text: str, ends: Sequence[str]) -> str:
    """`text` up to the last occurrence of the first of `ends` in it: a value may contain the mark itself."""
    return next((text.rpartition(end)[0] for end in ends if end in text), text)


def _parts(begin: re.Pattern[str], text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text up to the next tag) of each tag."""
    begins = list(begin.finditer(text))
    ends = [*(each.start() for each in begins[1:]), len(text)]
    for match, following in zip(begins, ends, strict=False):
        yield match[1], text[match.end() : following]


def _unwrapped(text: str) -> str:
    """`text` without one line end at either side, if it begins with one: they belong to the tags."""
    return text[1:].removesuffix("\n") if text.startswith("\n") else text


def _function(before: str = "", after: str = "") -> Written:
    """A call of Qwen3-Coder's. before, after: marks around it."""
    return Written(
        f'{before} "<function=" name ">" space (object space | arguments) "</function>" space {after}'.lstrip(),
        argument='"<parameter=" key ">" value space', close="</parameter>", wraps=True,
    )  # fmt: skip


FORMS = (
    Form(
        ("<function=", "<parameter="),  # Qwen3-Coder, Seed-OSS; with JSON in place of parameters Llama 3.1, Functionary
        _tags(r"<function=([\w.-]+)>", ("</function>", "</tool_call>"), r"<parameter=([^>\n]+)>", "</parameter>"),
        around=("<seed:tool_call>",),
        written=(
            *(
                _function(f'"<{tag}>" space', f'("</{tag}>" space)?')
                for tag in ("tool_call", "seed:tool_call")
            ),
            _function(),
        ),
    ),
    Form(
        ("<arg_key>", "<arg_value>"),  # GLM-4.5
        _tags(
            r"<tool_call>\s*([\w.-]+)\s*(?=<arg_key>|</tool_call>|$)", ("</tool_call>",),
            r"<arg_key>([^<]+)</arg_key>\s*<arg_value>", "</arg_value>", wraps=False,
        ),
        written=(
            Written(
                '"<tool_call>" name space arguments "</tool_call>" space',
                argument='"<arg_key>" key "</arg_key>" space "<arg_value>" value space', close="</arg_value>",
            ),
        ),
    ),
    Form(
        ("<invoke name=",),  # MiniMax
        _tags(r'<invoke name="([\w.-]+)">', ("</invoke>",), r'<parameter name="([^">\n]+)">', "</parameter>"),
        around=("<minimax:tool_call>",),
        written=(
            Written(
                '"<invoke name=" "\\"" name "\\">" space arguments "</invoke>" space', '"<minimax:tool_call>" space',
                closing='"</minimax:tool_call>" space', argument='"<parameter name=\\"" key "\\">" value space',
                close="</parameter>", wraps=True,
            ),
        ),
    ),
    Form(  # Hermes, Qwen
        ("<tool_call>", "</tool_call>"), _behind("<tool_call>"),
        written=(Written('"<tool_call>" space json space "</tool_call>" space'),),
    ),
    Form(("[TOOL_CALLS]",), _behind("[TOOL_CALLS]"), written=(Written.of_list("[TOOL_CALLS]"),)),  # Mistral, a list
    Form(  # Mistral, from 2025 on
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        _named(r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\]|(?=\s*\{))"),
        written=(Written('"[TOOL_CALLS]" name "[ARGS]"? space object space'),),
    ),
    Form(
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),  # DeepSeek V3
        _named(r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>([\w.-]+)"), around=("<｜tool▁calls▁begin｜>",),
        written=(
            Written(
                '"<｜tool▁call▁begin｜>" "function" "<｜tool▁sep｜>" name space "```json"? space object space "```"?'
                ' "<｜tool▁call▁end｜>" space', '"<｜tool▁calls▁begin｜>"',
            ),
        ),
    ),
    Form(
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),  # DeepSeek V3.1
        _named(r"<｜tool▁call▁begin｜>([\w.-]+)<｜tool▁sep｜>"), around=("<｜tool▁calls▁begin｜>",),
        written=(
            Written(
                '"<｜tool▁call▁begin｜>" name "<｜tool▁sep｜>" object "<｜tool▁call▁end｜>" space',
                '"<｜tool▁calls▁begin｜>"',
            ),
        ),
    ),
    Form(  # Granite, Phi-4-mini
        ("<|tool_call|>", "<|/tool_call|>"), _behind("<|tool_call|>"),
        written=(Written.of_list("<|tool_call|>", '"<|/tool_call|>"? space'),),
    ),
    Form(  # Nemotron
        ("<TOOLCALL>", "</TOOLCALL>"), _behind("<TOOLCALL>"),
        written=(Written.of_list("<TOOLCALL>", '"</TOOLCALL>" space'),),
    ),
    Form(  # Hunyuan
        ("<tool_calls>", "</tool_calls>"), _behind("<tool_calls>"),
        written=(Written.of_list("<tool_calls>", '"</tool_calls>" space'),),
    ),
    Form(("<|tool_call>", "<tool_call|>", '<|"|>'), _braced("<|tool_call>", '<|"|>')),  # Gemma 4
    Form(  # FunctionGemma
        ("<start_function_call>", "<end_function_call>", "<escape>"), _braced("<start_function_call>", "<escape>")
    ),
    Form(("<|START_ACTION|>", "<|END_ACTION|>"), _behind("<|START_ACTION|>")),  # Command R7B, Command A
    Form(  # Llama 3; also xLAM's list
        ("<|python_tag|>", "<|python_start|>"), Read(_plain), bare="{",
        written=(Written("llama_json", between='space ";"? space'),),
    ),
    Form(
        ("<|python_start|>", "<|python_end|>", "<|python_tag|>"), _pythonic("<|python_start|>", "<|python_end|>"),
        bare="(",
    ),
    Form(  # OLMo 3
        ("<function_calls>", "</function_calls>"), _pythonic("<function_calls>", "</function_calls>"), bare="("
    ),
    Form((), Read(_titled), bare="\n"),  # GLM-4-0414, whose template has no mark
)  # fmt: skip
# gpt-oss: messages to tools, in the text that `Channels` makes of them for templates with these marks, and no others.
OF_CHANNELS = Form(("to=functions.", "<|channel|>commentary"), _named(r"(?m)^to=functions\.([\w.-]+)"))
# Small models forget the marks (Qwen2.5-Coder 1.5B): a reply that is nothing but JSON with an offered tool's name is a
# call.
WITHOUT_MARKS = Form((), Read(_plain), bare="{")
