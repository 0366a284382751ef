"""The page of `triforce start`: the machine, and models with their predicted speed, as text and as JSON. Pure
functions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import shell_line
from offload.units import significant, size
from triforce_cli import __version__
from triforce_cli.ground.text import line_text, path_text

if TYPE_CHECKING:
    from offload.hub.offers import Offer
    from offload.speed.hardware import Hardware

_LEAST_NAME = 12  # columns
_NUMBERS = ("weights", "size", "context", "tokens/s")
_PLACE = "runs on"
_GAP = "  "


@dataclass(frozen=True, kw_only=True)
class Found:
    """The machine and its offers. stored: those that are here already. disk_free_bytes: where models are kept."""

    hardware: Hardware
    folder: Path
    disk_free_bytes: int
    stored: Sequence[Offer]
    fetched: Sequence[Offer]

    @property
    def offers(self) -> Sequence[Offer]:
        return [*self.stored, *self.fetched]


def machine(hardware: Hardware, folder: Path, disk_free_bytes: int, width: int) -> list[str]:
    """The lines on the devices with their free memory, and on the disk. folder: of models."""
    memory, number = size(hardware.device_free_bytes), f"{hardware.num_devices} x " * (hardware.num_devices > 1)
    if hardware.is_cpu:
        devices = f"{hardware.device_name}, no GPU: {memory} of memory free"
    else:
        host = size(hardware.host_free_bytes)
        devices = f"{number}{hardware.device_name}: {memory} free; host memory: {host} free"
    disk = f"disk: {size(disk_free_bytes)} free in {line_text(path_text(folder))}"
    return [line for text in (devices, disk) for line in textwrap.wrap(text, width, break_long_words=False)]


def page(found: Found, *, context: int, width: int) -> str:
    """The machine, a line for each offer, numbered as its key, and notes. context: tokens that speeds are for. Where
    there is no room, the place that a model runs on is on a line of its own."""
    lines = machine(found.hardware, found.folder, found.disk_free_bytes, width)
    keys = iter(range(1, len(found.offers) + 1))
    for title, group in (("here already", found.stored), ("to fetch", found.fetched)):
        if group:
            rows = [_Row("", title, _NUMBERS, _PLACE), *(_Row.of(next(keys), offer) for offer in group)]
            lines += ["", *_table(rows, found, width)]
    return "\n".join([*lines, "", *textwrap.wrap(_notes(found, context), width)]) + "\n"


def document(found: Found, *, context: int) -> dict[str, Any]:
    """The page as JSON. context: the tokens that speeds are for."""
    return {
        "machine": machine_document(found.hardware),
        "folder": path_text(found.folder),
        "disk_free_bytes": found.disk_free_bytes,
        "context": context,
        "offers": [_offer(offer) for offer in found.offers],
        "version": __version__,
    }


def machine_document(hardware: Hardware) -> dict[str, Any]:
    """The machine as JSON."""
    return {
        "device": hardware.device,
        "name": hardware.device_name,
        "num_devices": hardware.num_devices,
        "device_free_bytes": hardware.device_free_bytes,
        "host_free_bytes": hardware.host_free_bytes,
        "rates": "measured" if hardware.rates.measured else "typical",
    }


def commands(offer: Offer) -> list[tuple[str, ...]]:
    """The words of the command lines that a key stands for: fetch the model, unless it is here, and chat."""
    pull, model = offer.candidate.pull, offer.candidate.model
    return [*([("pull", *pull)] if pull else []), ("chat", "--model", model)]


def question(found: Found) -> str:
    """The line before a key is pressed."""
    number = len(found.offers)
    keys = "1" if number == 1 else f"1-{number}"
    return f"{keys} {'fetch (or resume) and chat' if found.fetched else 'chat'}; Enter or q leaves:"


def next_commands(offer: Offer) -> str:
    """The note where there is nobody to press a key."""
    return f"next: {' && '.join(shell_line('triforce', *words) for words in commands(offer))}"


@dataclass(frozen=True)
class _Row:
    """A line of the page. place: of the model, "" on a CPU."""

    key: str
    name: str
    numbers: Sequence[str]
    place: str

    @classmethod
    def of(cls, key: int, offer: Offer) -> _Row:
        candidate = offer.candidate
        longest = "all" if offer.longest == candidate.config.context_limit else f"{offer.longest:,}"
        numbers = (candidate.form, size(candidate.num_bytes), longest, significant(offer.tokens_per_second))
        place = f"GPU, {' and '.join(offer.on_host)} on host" if offer.on_host else "GPU"
        return cls(str(key), line_text(candidate.name), numbers, place)


def _table(rows: Sequence[_Row], found: Found, width: int) -> Iterator[str]:
    every = [row for group in (found.stored, found.fetched) for row in (_Row.of(1, offer) for offer in group)]
    forms, *others = (max(map(len, column)) for column in zip(_NUMBERS, *(row.numbers for row in every), strict=True))
    taken = 2 * len(_GAP) + sum(len(_GAP) + each for each in (forms, *others))
    longest = max(len(row.name) for row in (*every, *rows))
    place = max(len(row.place) for row in (*every, *rows))
    beside = longest + taken + len(_GAP) + place <= width
    longest = min(longest, max(width - taken, _LEAST_NAME))
    for row in rows:
        name = row.name if len(row.name) <= longest else f"{row.name[: longest - 3]}..."
        form, *numbers = row.numbers
        cells = [f"{row.key:>2}", name.ljust(longest), form.ljust(forms)]
        cells += [cell.rjust(wide) for cell, wide in zip(numbers, others, strict=True)]
        if not found.hardware.is_cpu and beside:
            cells.append(row.place)
        yield _GAP.join(cells).rstrip()
        if not found.hardware.is_cpu and not beside and row.key:
            yield f"    {row.place}"


def _notes(found: Found, context: int) -> str:
    if not found.offers:
        free = size(found.hardware.device_free_bytes)
        return (
            f"no model of the table fits in {free}; end other programs, or try the demo model that comes with "
            "triforce: triforce generate --prompt 'Anne looked at the sea,'"
        )
    text = f"tokens/s: predicted here with {context:,} tokens of context; context: the longest that fits"
    return text + typical_note(found.hardware)


def typical_note(hardware: Hardware) -> str:
    """The end of a note on predicted times, where the machine was not measured."""
    if hardware.rates.measured:
        return ""
    return "; rates are typical ones: triforce doctor measures this machine's in some twenty seconds"


def _offer(offer: Offer) -> dict[str, Any]:
    candidate, placement = offer.candidate, offer.plan.placement
    return {
        "name": candidate.name,
        "model": candidate.model,
        "pull": list(candidate.pull) or None,
        "weights": candidate.form,
        "bytes": candidate.num_bytes,
        "longest_context": offer.longest,
        "tokens_per_second": offer.tokens_per_second,
        "device_bytes": placement.total_device_bytes,
        "host_bytes": placement.total_host_bytes,
        "on_host": list(offer.on_host),
    }
