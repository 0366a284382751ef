"""Models as a table and as JSON objects, and the messages of a pull. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import shell_line
from offload.units import size
from triforce_cli import __version__
from triforce_cli.ground.text import NOTHING, counted, indented, line_text, path_text, significant

if TYPE_CHECKING:
    from offload.config.families import Family, Wrapper
    from offload.hub.library import Entry
    from offload.hub.names import Alias
    from offload.hub.pull import PullPlan
    from offload.hub.removal import Stored
    from offload.speed.hardware import Hardware


@dataclass(frozen=True)
class Line:
    """A model, and how many tokens of its context fit this machine."""

    entry: Entry
    longest: int


@dataclass(frozen=True)
class Absent:
    """A model that can be pulled. has_room: whether there is memory for its weights, None if that is not known."""

    alias: Alias
    has_room: bool | None


@dataclass(frozen=True)
class Named:
    """A person's own name of a model. problem: why it cannot be used, "" if it can."""

    name: str
    model: str
    problem: str = ""


def table(lines: Sequence[Line], named: Sequence[Named], absent: Sequence[Absent], *, width: int) -> str:
    """One line per model; below it the reason if it cannot be used, and its draft if there is no room beside it. Then
    the person's own names, and the names of models that can be pulled."""
    rows = [("name", "on disk", "params", "context", "KV/token", "fits here", "draft"), *map(_cells, lines)]
    columns = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    has_room = sum(columns) + 2 * (len(columns) - 1) <= width
    text = []
    for row, line in zip(rows, [None, *lines], strict=True):
        cells = [row[0].ljust(columns[0]), *(c.rjust(n) for c, n in zip(row[1:6], columns[1:6], strict=True))]
        text.append("  ".join([*cells, row[6]] if has_room else cells).rstrip())
        if line is not None and line.entry.draft and not line.entry.problem and not has_room:
            text += indented(f"draft: {line.entry.draft}", width)
        text += indented(line.entry.problem if line else "", width)
    if named:
        longest = max(len(alias.name) for alias in named)
        text += ["", "aliases:"]
        for each in named:
            text += [f"  {each.name.ljust(longest)}  {line_text(each.model)}", *indented(each.problem, width)]
    if absent:
        text += ["", "not here yet (triforce pull NAME):", *_absent_lines(absent, width)]
    return "\n".join(text) + "\n"


def _absent_lines(absent: Sequence[Absent], width: int) -> Iterator[str]:
    """A line per model, with its owner on the hub where there is room."""
    room = {None: NOTHING, True: "yes", False: "no"}
    rows = [("name", "download", "fits here", "owner")]
    for each in absent:
        nbytes = NOTHING if each.alias.num_bytes is None else size(each.alias.num_bytes)
        rows.append((each.alias.name, nbytes, room[each.has_room], each.alias.repository.split("/")[0]))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    has_room = sum(widths) + 8 + max(len(row[3]) for row in rows) <= width
    for name, nbytes, fits, owner in rows:
        cells = (name.ljust(widths[0]), nbytes.rjust(widths[1]), fits.rjust(widths[2]), *([owner] if has_room else []))
        yield "  " + "  ".join(cells)


def stored(models: Sequence[Stored]) -> str:
    """A line per model that is to be removed: its name, its size and its folder or file."""
    rows = [(each.name, size(each.num_bytes), line_text(path_text(each.file or each.folder))) for each in models]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "".join(f"{name.ljust(widths[0])}  {nbytes.rjust(widths[1])}  {place}\n" for name, nbytes, place in rows)


def families(known: Sequence[Family | Wrapper]) -> str:
    """One line per family: the model_type of its config.json, its models, and which of them are refused."""
    longest = max(len(each.name) for each in known)
    return "".join(
        f"{each.name.ljust(longest)}  {each.about}{f'; not: {each.refuses}' if each.refuses else ''}\n"
        for each in known
    )


def families_document(known: Sequence[Family | Wrapper]) -> dict[str, Any]:
    """The JSON of `models --families`."""
    return {
        "families": [
            {"model_type": each.name, "models": each.about, "refused": each.refuses or None} for each in known
        ],
        "version": __version__,
    }


def footnote(folder: Path, hardware: Hardware) -> str:
    """The folder of models, and the machine that "fits here" refers to."""
    place = f"{hardware.device_name}, {size(hardware.device_free_bytes)} free"
    return f"in {line_text(path_text(folder))}; what fits here: on {place}"


def table_document(
    folder: Path, lines: Sequence[Line], named: Sequence[Named], absent: Sequence[Absent], hardware: Hardware
) -> dict[str, Any]:
    """The JSON of `models`. kv_bytes_per_token: in the dtype that config.json names."""
    return {
        "folder": path_text(folder),
        "device": hardware.device,
        "models": [_document(line) for line in lines],
        "aliases": [{"name": each.name, "model": each.model, "problem": each.problem or None} for each in named],
        "absent": [
            {
                "name": each.alias.name,
                "repository": each.alias.repository,
                "draft": each.alias.draft or None,
                "bytes": each.alias.num_bytes,
                "fits": each.has_room,
            }
            for each in absent
        ],
        "version": __version__,
    }


def pull_plan(plan: PullPlan) -> Iterator[str]:
    """The lines that a pull prints before the weights are fetched."""
    listing = plan.listing
    licence = f"licence {listing.license}" if listing.license else "no licence named"
    yield f"{listing.repository} at {listing.revision} ({listing.commit[:12]}), {licence}"
    files = f"{counted(len(plan.files), 'file')}, {size(plan.num_bytes)}, into {line_text(path_text(plan.folder))}"
    yield f"{files}: {size(plan.missing_bytes) + ' to fetch' if plan.missing_bytes else 'all is here'}"
    if plan.converts and plan.missing_bytes:
        yield "its weights are pickled: each file is converted to safetensors when it has come, and verified"


def next_command(name: str, *, config_only: bool) -> str:
    """The command to run after a pull. name: of the model."""
    return f"next: {shell_line('triforce', 'plan' if config_only else 'chat', '--model', name)}"


def pulled_document(plan: PullPlan) -> dict[str, Any]:
    """The JSON of `pull --json`. bytes: of all files on the hub; fetched_bytes: of the files that were missing here."""
    listing = plan.listing
    return {
        "repository": listing.repository,
        "revision": listing.revision,
        "commit": listing.commit,
        "license": listing.license or None,
        "folder": path_text(plan.folder),
        "bytes": plan.num_bytes,
        "fetched_bytes": plan.missing_bytes,
        "converted": plan.converts,
        "version": __version__,
    }


def _document(line: Line) -> dict[str, Any]:
    entry, config = line.entry, line.entry.config
    return {
        "name": entry.name,
        "folder": path_text(entry.folder),
        "state": entry.state,
        "source": entry.origin.source if entry.origin else None,
        "commit": (entry.origin.commit or None) if entry.origin else None,
        "license": (entry.origin.license or None) if entry.origin else None,
        "bytes": entry.num_bytes,
        "num_parameters": config.num_parameters() if config else None,
        "context": config.context_limit if config else None,
        "kv_bytes_per_token": entry.kv_bytes_per_token,
        "longest_context": line.longest if config and not entry.problem else None,
        "draft": entry.draft or None,
        "problem": entry.problem or None,
    }


def _cells(line: Line) -> tuple[str, ...]:
    entry, config = line.entry, line.entry.config
    if config is None or entry.problem:
        return (line_text(entry.name), size(entry.num_bytes), *[NOTHING] * 4, "")
    return (
        line_text(entry.name),
        size(entry.num_bytes) if entry.state == "whole" else "config",
        _parameters(config.num_parameters()),
        f"{config.context_limit:,}",
        size(entry.kv_bytes_per_token or 0),
        "all" if line.longest == config.context_limit else f"{line.longest:,}" if line.longest else "nothing",
        entry.draft or NOTHING,
    )


def _parameters(count: int) -> str:
    """A number of parameters: 13.0 B, 135 M, 960 k."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{significant(count / unit)} {name}"
    return f"{count}"
