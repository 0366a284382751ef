"""An edit of the configuration file's text: one key set or removed, every other byte as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from offload.errors import UsageError

if TYPE_CHECKING:
    from tomlkit import TOMLDocument
    from tomlkit.items import Item

    Body = list[tuple[Any, Item]]

Parts = tuple[str, ...]  # of a key: ("chat", "temperature")


def with_value(text: str, parts: Parts, value: Any) -> str:
    """`text` with the key set. Raises UsageError if it cannot be without changing something else."""

    def change(document: Any) -> None:
        node = _made(document, parts[:-1])
        if len(parts) > 1 and parts[-1] not in node:
            _append(node, parts[-1], value)
        else:
            node[parts[-1]] = value

    def change_values(values: dict[str, Any]) -> None:
        for part in parts[:-1]:
            values = values.setdefault(part, {})
        values[parts[-1]] = value

    from tomlkit import document, dumps, parse

    found = parse(text)
    if isinstance(value_at(found, parts), Mapping):
        raise UsageError(f"{'.'.join(parts)} is a section of the file, and a section and a value cannot share a name")
    if len(parts) == 1 and parts[0] not in found and _comment_is_before_a_table(found):
        line = document()
        line.add(parts[0], value)
        return _checked(text, f"{dumps(line)}\n{text}", change_values)
    return _edited(text, change, change_values)


def without(text: str, parts: Parts) -> str:
    """`text` without the key, which is in it. Raises UsageError if something else would change."""

    def change(node: Any) -> None:
        for part in parts[:-1]:
            node = node[part]
        removed = node[parts[-1]]
        if isinstance(removed, Table) and any(isinstance(item, Comment) for _, item in removed.value.body):
            # one at its end may be about the next section
            raise UsageError(f"{'.'.join(parts)} has comments, which would go with it; remove it by hand")
        del node[parts[-1]]

    from tomlkit.items import Comment, Table

    return _edited(text, change, change)


def value_at(values: Mapping[str, Any], parts: Parts) -> Any:
    """The value of a key in parsed values, None if there is none."""
    node: Any = values
    for part in parts:
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _edited(text: str, change: Callable[[Any], None], change_values: Callable[[dict[str, Any]], None]) -> str:
    from tomlkit import dumps, parse
    from tomlkit.exceptions import TOMLKitError

    document = parse(text)
    try:
        change(document)
        return _checked(text, dumps(document), change_values)
    except (TOMLKitError, TypeError, KeyError, AttributeError) as error:  # a value where a section is wanted
        raise _refusal() from error


def _checked(before: str, after: str, change_values: Callable[[dict[str, Any]], None]) -> str:
    """`after`, if its values are those of `before` with the change. Raises UsageError if not."""
    from tomlkit import parse

    wanted = deepcopy(parse(before).unwrap())
    change_values(wanted)
    if parse(after).unwrap() != wanted:
        raise _refusal()
    return after


def _refusal() -> UsageError:
    return UsageError("the file is written in a way in which this key cannot be changed alone; edit it by hand")


def _made(document: Any, sections: Parts) -> Any:
    """The section, made if missing. Of several that are missing only the last gets a header."""
    from tomlkit import table

    node = document
    for number, section in enumerate(sections):
        if section not in node:
            node[section] = table(is_super_table=number < len(sections) - 1)
        node = node[section]
    return node


def _append(section: Any, name: str, value: Any) -> None:
    """Add a key to a section, above the comments at its end: they are about the next one."""
    body: Body = section.value.body if hasattr(section.value, "body") else []
    end: Body = []
    while body and body[-1][0] is None:
        end.insert(0, body.pop())
    section[name] = value
    body.extend(end)


def _comment_is_before_a_table(document: TOMLDocument) -> bool:
    """Tell whether a key that is added above the first section would come between it and its comment."""
    from tomlkit.items import Comment, Table

    before = None
    for _, item in document.body:
        if isinstance(item, Table):
            return isinstance(before, Comment)
        before = item
    return False
