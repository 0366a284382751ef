"""The GGUF files of a repository with their kinds and predicted speed, as text and as JSON. Pure functions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import shell_line
from offload.hub.offers import READING
from offload.units import size
from triforce_cli import __version__
from triforce_cli.ground.text import NOTHING, counted, indented, line_text, path_text, significant
from triforce_cli.render.kinds import documents, shares
from triforce_cli.render.start import machine, machine_document, typical_note

if TYPE_CHECKING:
    from offload.config.kinds import Kind
    from offload.hub.files import GgufModel
    from offload.hub.offers import Offer
    from offload.hub.remote import Listing
    from offload.speed.hardware import Hardware

_MOST_KEYS = 9
_GAP = "  "
_TITLES = ("size", "context", "ms/token")
_LEAST_NAME, _LEAST_KINDS = 12, 16  # columns


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A GGUF model of a repository. offer: its plan; None if it does not fit, or cannot run because of a problem."""

    gguf: GgufModel
    kinds: Sequence[Kind]
    offer: Offer | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        """The label, or the path where that is not enough."""
        (name,) = self.gguf.named.values()
        return line_text(name)

    @property
    def context_limit(self) -> int:
        """The model's own limit in tokens; 0 without a plan."""
        return 0 if self.offer is None else self.offer.candidate.config.context_limit

    @property
    def numbers(self) -> tuple[str, str, str]:
        """The values of _TITLES."""
        nbytes, offer = size(self.gguf.num_bytes), self.offer
        if offer is None:
            return nbytes, "none" if not self.problem else NOTHING, NOTHING
        longest = "all" if offer.longest == self.context_limit else f"{offer.longest:,}"
        return nbytes, longest, significant(1000 * offer.seconds_per_token)


@dataclass(frozen=True, kw_only=True)
class Repository:
    """The GGUF models of a repository on a machine: those that fit first, the best before others. context: tokens that
    are planned for."""

    listing: Listing
    hardware: Hardware
    folder: Path
    disk_free_bytes: int
    context: int
    models: Sequence[Shown]

    @property
    def fitting(self) -> list[Shown]:
        return [model for model in self.models if model.offer is not None]

    @property
    def keys(self) -> list[str]:
        """The keys that fetch the first ones that fit."""
        return [str(number) for number in range(1, min(len(self.fitting), _MOST_KEYS) + 1)]


def page(found: Repository, *, width: int) -> str:
    """The repository, the machine, a line for each model, numbered as its key, and notes."""
    listing = found.listing
    licence = f"licence {listing.license}" if listing.license else "no licence named"
    about = f"{listing.repository} at {listing.revision} ({listing.commit[:12]}), {licence}: "
    about += f"{counted(len(found.models), 'model')} in GGUF files"
    lines = textwrap.wrap(about, width, break_long_words=False, break_on_hyphens=False)
    lines += [*machine(found.hardware, found.folder, found.disk_free_bytes, width), "", *_table(found, width)]
    return "\n".join([*lines, "", *textwrap.wrap(_notes(found), width)]) + "\n"


def question(found: Repository) -> str:
    """The line before a key is pressed."""
    keys = "1" if len(found.keys) == 1 else f"1-{found.keys[-1]}"
    return f"{keys} fetch (or resume); Enter or q leaves:"


def next_command(found: Repository) -> str:
    """The note where there is nobody to press a key; "" if nothing fits."""
    return f"next: {shell_line('triforce', 'pull', *found.fitting[0].gguf.pull)}" if found.fitting else ""


def document(found: Repository) -> dict[str, Any]:
    """The page as JSON."""
    listing = found.listing
    return {
        "repository": listing.repository,
        "revision": listing.revision,
        "commit": listing.commit,
        "license": listing.license or None,
        "machine": machine_document(found.hardware),
        "folder": path_text(found.folder),
        "disk_free_bytes": found.disk_free_bytes,
        "context": found.context,
        "models": [_model(model) for model in found.models],
        "version": __version__,
    }


def _table(found: Repository, width: int) -> Iterator[str]:
    keys = [*found.keys, *[""] * (len(found.models) - len(found.keys))]
    every = [_TITLES, *(model.numbers for model in found.models)]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    taken = 2 + sum(len(_GAP) + wide for wide in widths) + 2 * len(_GAP)
    longest = max(len(model.name) for model in found.models)
    longest = min(longest, max(width - taken - _LEAST_KINDS, _LEAST_NAME))
    room = max(width - taken - longest, _LEAST_KINDS)

    def line(key: str, name: str, numbers: Sequence[str], kinds: str) -> str:
        cells = [number.rjust(wide) for number, wide in zip(numbers, widths, strict=True)]
        return _GAP.join([f"{key:>2}", name.ljust(longest), *cells, kinds]).rstrip()

    yield line("", "to fetch", _TITLES, "% of bytes in")
    for key, model in zip(keys, found.models, strict=True):
        yield line(key, _shortened(model.name, longest), model.numbers, shares(model.kinds, room))
        yield from indented(line_text(model.problem), width)


def _shortened(name: str, most: int) -> str:
    """The name, or its end: what tells files apart is there."""
    return name if len(name) <= most else f"...{name[3 - most :]}"


def _notes(found: Repository) -> str:
    if not found.fitting:
        return f"none of them fits here, with {size(found.hardware.device_free_bytes)} of memory free"
    context = min(found.context, max(model.context_limit for model in found.fitting))
    text = (
        f"ms/token: predicted here with {context:,} tokens of context; context: the longest that fits; first are "
        f"the largest that write {READING:.0f} tokens a second, plain numbers behind others"
    )
    if any(kind.unpacked for model in found.models for kind in model.kinds):
        text += "; *: unpacked to 16 bits here"
    return text + typical_note(found.hardware)


def _model(model: Shown) -> dict[str, Any]:
    offer = model.offer
    return {
        "name": model.name,
        "path": model.gguf.path,
        "label": model.gguf.label or None,
        "pull": list(model.gguf.pull),
        "model": model.gguf.model,
        "bytes": model.gguf.num_bytes,
        "kinds": documents(model.kinds),
        "fits": None if model.problem else offer is not None,
        "longest_context": offer and offer.longest,
        "seconds_per_token": offer and offer.seconds_per_token,
        "device_bytes": offer and offer.plan.placement.total_device_bytes,
        "host_bytes": offer and offer.plan.placement.total_host_bytes,
        "on_host": offer and list(offer.on_host),
        "problem": model.problem or None,
    }
