"""Chat templates in transformers' sandbox, with a bound on the memory of their results: templates are untrusted.

The sandbox isolates a template, but does not keep it from filling the memory, with one multiplication or with texts
that double. So every step whose result can be larger than its inputs is charged to an allowance before it runs:
operators, filters, methods, slices, and output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from offload.errors import ModelError
from offload.text import template_sizes as sizes

MOST_BYTES = 1 << 28
TIMES_GIVEN = 64  # allowance in bytes for each byte of input: some templates build a conversation message by message
_CACHED = 16  # compiled templates
# Functions that no chat template needs, and that could make large texts from small ones.
_LEFT_OUT = ("lipsum", "pprint", "urlize")
# Filters that return no text. Their results are charged.
_OF_ITEMS = {
    *(
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
        "map",
    ),
    *("max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "unique"),
}
_SLICE = "[:]"


class TooMuchText(ModelError):
    """A template exceeded its allowance, which the message names."""


class _Allowance:
    def __init__(self, num_bytes: int) -> None:
        self.most = self.left = num_bytes

    def charge(self, num_bytes: int) -> None:
        self.left -= num_bytes
        if self.left < 0:
            raise TooMuchText(f"makes more than {self.most >> 20:,} MiB of text")


_allowance: ContextVar[_Allowance] = ContextVar("allowance")


def charge(num_bytes: int) -> None:
    """Charge bytes to the running template. Raises TooMuchText."""
    _allowance.get().charge(num_bytes)


def render(template: str, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]) -> str:
    """The text of transformers' `apply_chat_template`, up to where the next reply begins. Raises TooMuchText, and any
    error of the template."""
    from transformers.utils import chat_template_utils as theirs

    given = {"tools": None, "documents": None, "add_generation_prompt": True} | dict(variables)
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    given |= {"messages": theirs._alias_reasoning_fields(theirs._plain_template_data(plain))}
    weigher = _Allowance(1 << 62)
    num_bytes = sizes.written(list(given.values()), weigher.charge)
    token = _allowance.set(_Allowance(MOST_BYTES + TIMES_GIVEN * num_bytes))
    try:
        return _compiled(template).render(theirs._plain_template_data(given))
    finally:
        _allowance.reset(token)


@lru_cache(maxsize=_CACHED)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    """The environment, with transformers' filters, functions and tags."""
    from transformers.utils import chat_template_utils as theirs

    usual = theirs._compile_jinja_template("").environment
    made = _Environment(
        trim_blocks=usual.trim_blocks,
        lstrip_blocks=usual.lstrip_blocks,
        extensions=[type(extension) for extension in usual.extensions.values()],
        finalize=_written,
    )
    made.filters = {name: _charged(name, each) for name, each in usual.filters.items() if name not in _LEFT_OUT}
    made.filters[_SLICE] = _charged(_SLICE, lambda value, *ends: value[slice(*ends)])
    made.globals = {name: each for name, each in usual.globals.items() if name not in _LEFT_OUT}
    return made


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes.operation(operator, left, right, charge)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        subject = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        name = getattr(__obj, "__name__", "")
        if isinstance(subject, str | bytes):
            if name == "join":
                args = (_listed(args[0]), *args[1:]) if args else args
                given = list(args)
            sizes.call(name, subject, given, charge, is_method=True)
        elif not isinstance(__obj, Macro) and __obj is not __self.globals["range"]:  # the sandbox limits ranges
            charge(sizes.ITEM * (sum(sizes.numbers(given)) + len(given)) + sum(map(sizes.size, given)))
        return _counted(super().call(__context, __obj, *args, **kwargs))

    def concat(self, parts: Iterable[str]) -> str:
        return "".join(_each_charged(parts))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_AsFilters().visit(source).set_environment(self), *args, **kwargs)


class _AsFilters(NodeTransformer):
    """A transformer that turns two kinds of expressions, for which the sandbox has no hook, into filters."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "join", [])

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(
            node.node, _SLICE, [nodes.Const(None, lineno=node.lineno) if end is None else end for end in ends]
        )


def _filter(value: nodes.Expr, name: str, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(value, name, args, [], None, None, lineno=value.lineno)


def _charged(name: str, applied: Any) -> Any:
    """A filter with its charge."""
    num_passed = int(hasattr(applied, "jinja_pass_arg"))  # the environment or a context, as its first argument

    @wraps(applied)
    def charged(*args: Any, **kwargs: Any) -> Any:
        passed, (value, *rest) = args[:num_passed], args[num_passed:]
        given = [*rest, *kwargs.values()]
        if name in _OF_ITEMS or name == _SLICE:
            charge(sizes.ITEM * (1 if name == _SLICE else sum(sizes.numbers(given))))
        else:
            value = _listed(value) if name in ("join", "sum") else value
            sizes.call(name, value, given, charge, is_method=False)
        return _counted(applied(*passed, value, *rest, **kwargs))

    return charged


def _listed(value: Any) -> Any:
    """An iterator as a list; other values unchanged."""
    return list(_each_counted(value)) if isinstance(value, Iterator) else value


def _each_counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        charge(sizes.ITEM)
        yield value


def _each_charged(parts: Iterable[str]) -> Iterator[str]:
    for part in parts:
        charge(sizes.size(part))
        yield part


def _counted(value: Any) -> Any:
    """A step's result, after charging for it."""
    charge(sizes.size(value))
    return value


def _written(value: Any) -> Any:
    """The output of a value that is not a text yet."""
    if not isinstance(value, str):
        sizes.written(value, charge)
    return value
