"""The definition of every number that is printed.

Seconds are wall-clock seconds on the host. A *pass* is one forward of a level; a *round* is propose, verify, truncate
at one level; *acceptance* is accepted / drafted tokens; *tokens per round* is the mean of (accepted + 1) over rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Median and range of a number that was measured several times."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """values: at least one."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass
class LevelStats:
    """Counters of one level (draft, retrieval, target) over the decode phase of one request."""

    name: str
    passes: int = 0
    rows: int = 0  # without padding
    seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    link_bytes: int = 0  # copied to the device during its passes
    first_passes: int = 0  # passes that compiled kernels or recorded a graph on a GPU: `seconds` includes that time
    drafted_by: dict[str, int] = field(default_factory=dict)  # drafted, by proposer
    accepted_by: dict[str, int] = field(default_factory=dict)

    def count_round(self, proposers: Sequence[str], num_accepted: int) -> None:
        """Count one round. proposers: of each drafted token; the first `num_accepted` were accepted."""
        self.rounds += 1
        self.drafted += len(proposers)
        self.accepted += num_accepted
        for place, name in enumerate(proposers):
            self.drafted_by[name] = self.drafted_by.get(name, 0) + 1
            self.accepted_by[name] = self.accepted_by.get(name, 0) + (place < num_accepted)

    @property
    def acceptance(self) -> float | None:
        """accepted / drafted, None if nothing was drafted for this level."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens per verification at this level: accepted ones plus the correction or bonus. None before a round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else None

    @property
    def seconds_per_pass(self) -> float | None:
        return self.seconds / self.passes if self.passes else None

    @contextmanager
    def measure(self, rows: int) -> Iterator[None]:
        """Count one pass of `rows` rows (without padding) and the seconds that the body takes."""
        start = time.perf_counter()
        yield
        self.count_pass(rows, time.perf_counter() - start)

    def count_pass(self, rows: int, seconds: float) -> None:
        """Count one pass of `rows` rows. seconds: of the pass, or its share of a pass of several sequences."""
        self.passes += 1
        self.rows += rows
        self.seconds += seconds

    def as_dict(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("acceptance", "tokens_per_round", "seconds_per_pass")}
        return asdict(self) | derived


@dataclass(frozen=True)
class ExpertStats:
    """Counters of experts on the host that layers wanted: those that were on the device already or on their way, and
    those that were not, of which the CPU ran some. An expert counts once in a pass over a layer, or in each block of a
    prefill. fetched_bytes: over the link, those of experts that followed the CPU's work, or came ahead, among them."""

    hits: int = 0
    misses: int = 0
    fetched_bytes: int = 0
    by_cpu: int = 0

    def __add__(self, other: ExpertStats) -> ExpertStats:
        return ExpertStats(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def hit_rate(self) -> float | None:
        """hits / wanted experts; None if none was wanted."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None

    def __sub__(self, earlier: ExpertStats) -> ExpertStats:
        """The counts since `earlier`."""
        return ExpertStats(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


@dataclass(frozen=True)
class DiskStats:
    """Experts that were read from their file: how many, and their bytes. seconds: time with at least one being read."""

    reads: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: DiskStats) -> DiskStats:
        return DiskStats(self.reads + other.reads, self.num_bytes + other.num_bytes, self.seconds + other.seconds)

    def __sub__(self, earlier: DiskStats) -> DiskStats:
        """The counts since `earlier`."""
        return DiskStats(self.reads - earlier.reads, self.num_bytes - earlier.num_bytes, self.seconds - earlier.seconds)


@dataclass(frozen=True)
class TableStats:
    """Counters of the rows of a table in files that passes chose: those that were in host memory, and those that were
    read. A row counts once in a pass."""

    hits: int = 0
    misses: int = 0

    def __add__(self, other: TableStats) -> TableStats:
        return TableStats(self.hits + other.hits, self.misses + other.misses)

    def __sub__(self, earlier: TableStats) -> TableStats:
        """The counts since `earlier`."""
        return TableStats(self.hits - earlier.hits, self.misses - earlier.misses)


@dataclass
class LinkStats:
    """Traffic over the link, and from the disk. busy_seconds: time with at least one copy from host to device in
    flight. ngram_rows: of tables in files."""

    bytes_to_device: int = 0
    bytes_to_host: int = 0
    busy_seconds: float = 0.0
    bytes_per_second: float | None = None  # the set bandwidth; None without a link or if the link is not paced
    experts: ExpertStats = field(default_factory=ExpertStats)
    disk: DiskStats = field(default_factory=DiskStats)
    ngram_rows: TableStats = field(default_factory=TableStats)

    def __sub__(self, earlier: LinkStats) -> LinkStats:
        """The traffic since `earlier`."""
        return LinkStats(
            self.bytes_to_device - earlier.bytes_to_device,
            self.bytes_to_host - earlier.bytes_to_host,
            self.busy_seconds - earlier.busy_seconds,
            self.bytes_per_second,
            self.experts - earlier.experts,
            self.disk - earlier.disk,
            self.ngram_rows - earlier.ngram_rows,
        )


@dataclass(frozen=True)
class RankStats:
    """The statistics of one of several ranks. sum_seconds: time in sums over the ranks, including the wait for slower
    ranks. device_bytes, host_bytes: allocated."""

    rank: int
    device: str
    bytes_to_device: int
    bytes_to_host: int
    link_seconds: float
    sum_seconds: float
    device_bytes: int
    host_bytes: int

    def since(self, earlier: RankStats) -> RankStats:
        """The statistics since `earlier`."""
        return replace(
            self,
            bytes_to_device=self.bytes_to_device - earlier.bytes_to_device,
            bytes_to_host=self.bytes_to_host - earlier.bytes_to_host,
            link_seconds=self.link_seconds - earlier.link_seconds,
            sum_seconds=self.sum_seconds - earlier.sum_seconds,
        )


_DERIVED = (
    "prompt_tokens_per_second",
    "decode_tokens_per_second",
    "milliseconds_per_token",
    "link_utilisation",
    "link_idle",
)


@dataclass
class Stats:
    """The statistics of one request, as `--stats` and `--json` print them."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # tokens of the prompt that were already in the cache, or in the prefix store
    stored_tokens: int = 0  # part of reused_tokens: read from the prefix store
    output_tokens: int = 0
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0  # from the start of prefill to the first token
    decode_seconds: float = 0.0  # after the first token
    refresh_seconds: float = 0.0  # part of decode_seconds: choosing and fetching retrieved chunks
    levels: list[LevelStats] = field(default_factory=list)
    prefill_link: LinkStats = field(default_factory=LinkStats)
    decode_link: LinkStats = field(default_factory=LinkStats)
    ranks: list[RankStats] = field(default_factory=list)  # while decoding, if there are several
    wider_layers: int = 0  # layers that cross the link in 12 bits, as fewer bits would lose some

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """New prompt tokens over the seconds to the first token, whose pass also runs the prompt's last rows."""
        new = self.prompt_tokens - self.reused_tokens
        return new / self.first_token_seconds if self.first_token_seconds else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first, over the time after the first."""
        return (
            (self.output_tokens - 1) / self.decode_seconds if self.output_tokens > 1 and self.decode_seconds else None
        )

    @property
    def milliseconds_per_token(self) -> float | None:
        rate = self.decode_tokens_per_second
        return 1000.0 / rate if rate else None

    @property
    def link_utilisation(self) -> float | None:
        """Bytes copied during the target's passes over the bytes that the link could copy in that time."""
        target = next((level for level in self.levels if level.name == "target"), None)
        if target is None or not self.decode_link.bytes_per_second or not target.seconds:
            return None
        return target.link_bytes / (self.decode_link.bytes_per_second * target.seconds)

    @property
    def link_idle(self) -> float | None:
        """The share of decode_seconds in which nothing crossed the link to the device; None if nothing ever did."""
        if not self.decode_link.bytes_to_device or not self.decode_seconds:
            return None
        return max(1 - self.decode_link.busy_seconds / self.decode_seconds, 0.0)

    def as_dict(self) -> dict[str, Any]:
        data = asdict(self) | {name: getattr(self, name) for name in _DERIVED}
        data["levels"] = [level.as_dict() for level in self.levels]
        return data
