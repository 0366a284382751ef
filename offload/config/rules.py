"""Rules over module names from the lists of a checkpoint's description."""

from __future__ import annotations

from offload.config.schemes import MAX_PATTERN, Rule, Scheme, Way, is_pattern
from offload.fields import TEXT, Fields, list_of

MAX_RULES = 1 << 12  # of a list


def rules_of(source: Fields, key: str, way: Way) -> list[Rule]:
    """The rules for modules that a list leaves as plain numbers."""
    value = source.data.get(key)
    return [] if value is None else as_rules(source, key, value, way, None)


def as_rules(source: Fields, key: str, value: object, way: Way, scheme: Scheme | None) -> list[Rule]:
    if not isinstance(value, list) or len(value) > MAX_RULES or not list_of(TEXT).fits(value):
        source.refuse(key, f"a list of at most {MAX_RULES} names")
    if not all(is_pattern(_expression(each, way)) for each in value):
        source.refuse(
            key, f"of names, or regular expressions of at most {MAX_PATTERN} characters without nested repeats"
        )
    return [target_rule(each, scheme, way) for each in value]


def _expression(text: str, way: Way) -> str:
    """The regular expression whose cost bounds that of matching `text`; "" if it needs no bound."""
    if text.startswith("re:"):
        return text.removeprefix("re:")
    if way == "glob":
        return ".*" * text.count("*")
    return f"(?:{text})" if way == "names" else ""


def target_rule(text: str, scheme: Scheme | None, way: Way) -> Rule:
    return Rule("matches", text.removeprefix("re:"), scheme) if text.startswith("re:") else Rule(way, text, scheme)
