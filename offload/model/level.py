"""A level: a model with a cache, and how many rows it runs at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.interrupts import poll
from offload.kernels.cpu import FEW_ROWS, wanted
from offload.kernels.rows import MAX_ROWS, power_of_two
from offload.kv import Cache
from offload.kv.streaming import StreamingCache
from offload.metrics import LevelStats
from offload.model.decoder import PADDING, Decoder, Segment
from offload.model.graphs import VARIABLE, GraphPool, Graphs, Tensors
from offload.model.passes import Pass, the_logits
from offload.transfer.link import Link
from offload.transfer.memory import sent
from offload.transfer.timing import Timing, measured_together


class Hidden(Protocol):
    """The last hidden rows of a level's tokens, which the level writes for a next-token head."""

    def write(self, start: int, rows: Tensor) -> None:
        """Rows [n, hidden] of the tokens at `start` and on."""
        ...

    def truncate(self, length: int) -> None:
        """Only the first `length` tokens are left."""
        ...


class Level:
    """A model with its cache: implements `offload.model.passes.Level`.

    vocab_size: logits are cut to this width; models may pad their vocabulary.
    block: torch's products run in blocks of so many rows, the last one padded, so that a token's bits do not depend on
    how many tokens are verified with it. None: as many rows as there are tokens.
    link: where the level's weights or cache cross it, for the statistics. pool: of the model's graphs; None: passes are
    launched kernel by kernel. hidden: takes the last hidden rows of each pass.
    """

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        cache: Cache,
        *,
        vocab_size: int,
        block: int | None = None,
        link: Link | None = None,
        pool: GraphPool | None = None,
        hidden: Hidden | None = None,
    ) -> None:
        self.stats = LevelStats(name)
        self._decoder, self._cache = decoder, cache
        self._vocab_size, self._block, self._link = vocab_size, block, link
        self._timing = Timing(decoder.device)
        records = decoder.stays_in_place and wanted(VARIABLE)
        self._graphs = Graphs(pool) if records and pool is not None else None
        self._hidden = hidden
        self._left: Tensor | None = None  # hidden rows, where graphs leave them
        self._launched: set[int] = set()  # numbers of rows for which a GPU's kernels are compiled

    @property
    def length(self) -> int:
        return self._cache.length

    @property
    def block(self) -> int | None:
        """Rows for which the weights are read once; None: all."""
        return FEW_ROWS if self._decoder.takes_any_rows else self._block

    def shares(self, num_rows: int) -> bool:
        """Whether a pass of `num_rows` rows may run together with passes of other sequences, with the same bits as
        alone."""
        if self._block is not None:
            return True
        return self._graphs is None and (not self._decoder.takes_any_rows or num_rows <= FEW_ROWS)

    @torch.inference_mode()
    def run(self, passes: Sequence[Pass]) -> None:
        """See `offload.model.passes.Level`. Each pass has the same bits as alone, and counts an equal part of the
        seconds and of the bytes that cross the link."""
        poll()
        levels = [_level(each) for each in passes]
        crossed = self._link.stats.bytes_to_device if self._link else 0
        first_passes = self.stats.first_passes
        counted = [(level.stats, len(each.tokens)) for level, each in zip(levels, passes, strict=True)]
        with measured_together([level._timing for level in levels], counted):
            made = self._forward([level._caught_up(each) for level, each in zip(levels, passes, strict=True)])
        for each, found in zip(passes, made, strict=True):
            each.made, each.is_first = found, self.stats.first_passes > first_passes
        if self._link:
            crossed = self._link.stats.bytes_to_device - crossed
            for level in levels:
                level.stats.link_bytes += crossed // len(levels)

    def truncate(self, length: int) -> None:
        self._cache.truncate(length)
        if self._hidden is not None:
            self._hidden.truncate(self._cache.length)

    def forget_graphs(self) -> None:
        """Drop all graphs: the next pass of each kind launches its kernels one by one."""
        if self._graphs is not None:
            self._graphs.forget()

    def settle(self) -> None:
        """Add to `stats` the seconds of all passes whose results the host has seen."""
        self._timing.settle()

    def _caught_up(self, asked: Pass) -> Pass:
        """The part of a pass that remains to run as one pass; here all of it."""
        return asked

    def _forward(self, passes: Sequence[Pass]) -> list[tuple[Tensor, ...]]:
        """Run the passes -> what each one's `compute` returns."""
        block = self._block_for(passes)
        rows = self._padded([len(each.tokens) for each in passes], block)
        segments = [self._begin(each, num_rows) for each, num_rows in zip(passes, rows, strict=True)]
        if self._graphs is not None and self._graphs.has_room and (keys := _graph_keys(segments)) is not None:
            if (found := self._run_graph(self._graphs, keys, passes, segments, block)) is not None:
                return found
            segments = [self._begin(each, num_rows) for each, num_rows in zip(passes, rows, strict=True)]
        self._count_first(sum(rows))
        hidden = self._decoder.forward(segments, block=block)
        parts = hidden.split(rows)
        for each, segment, part in zip(passes, segments, parts, strict=True):
            _level(each)._take_hidden(part[: len(each.tokens)])
            segment.cache.advance(len(each.tokens))
        logits = self._logits(passes, parts, block)
        return [each.compute(own, *each.given) for each, own in zip(passes, logits, strict=True)]

    def _run_graph(
        self,
        graphs: Graphs,
        keys: Sequence[Hashable],
        passes: Sequence[Pass],
        segments: Sequence[Segment],
        block: int | None,
    ) -> list[Tensors] | None:
        """Run the passes as a graph; None where there is no memory for one. keys: of their caches. The rows whose
        logits are wanted are an input of it, unless all are, and their numbers are padded, so that a few graphs serve
        all passes."""
        tokens, [first, *others] = [each.tokens for each in segments], passes
        sizes = [min(power_of_two(each.num_logits), len(ids)) for each, ids in zip(passes, tokens, strict=True)]
        all_wanted = not others and len(first.tokens) == first.num_logits
        wanted = [] if all_wanted else [self._wanted(passes, tokens, sizes, block)]
        table = self._decoder.table_rows(segments)
        given = [tokens, wanted, [] if table is None else [table], *(list(each.given) for each in passes)]

        def compute(*tensors: Tensor) -> list[Tensors]:
            inputs = iter(tensors)
            ids, rows, of_table, *own = [list(islice(inputs, len(some))) for some in given]
            caches = [each.cache for each in segments]
            read = of_table[0] if of_table else None
            hidden = self._decoder.forward(list(map(Segment, caches, ids)), block=block, table_rows=read)
            for each, part in zip(passes, hidden.split([len(some) for some in ids]), strict=True):
                _level(each)._leave_hidden(part)
            logits = self._decoder.logits(hidden.index_select(0, *rows) if rows else hidden, block=block)
            parts = logits[: sum(sizes), : self._vocab_size].split(sizes)
            return [each.compute(part, *some) for each, part, some in zip(passes, parts, own, strict=True)]

        key = *keys, *(each.compute for each in passes), *sizes, *map(len, given)
        first_passes = graphs.first_passes
        # Rows of several sequences seldom come in the same numbers again.
        made = graphs.run(key, [tensor for some in given for tensor in some], compute, patience=len(passes))
        self.stats.first_passes += graphs.first_passes - first_passes
        if made is None:
            return None
        for each, segment in zip(passes, segments, strict=True):
            if (left := _level(each)._left) is not None:
                _level(each)._take_hidden(left[: len(each.tokens)])
            segment.cache.advance(len(each.tokens))
        return [
            (found[0][: each.num_logits],) if each.compute is the_logits else found
            for each, found in zip(passes, made, strict=True)
        ]

    def _take_hidden(self, rows: Tensor) -> None:
        """The hidden rows of a pass's tokens, which the cache is about to count."""
        if self._hidden is not None:
            self._hidden.write(self._cache.length, rows)

    def _leave_hidden(self, rows: Tensor) -> None:
        """Within a graph: leave the hidden rows where they are after each replay."""
        if self._hidden is not None:
            if self._left is None:
                self._left = rows.new_empty(MAX_ROWS, rows.shape[1])
            self._left[: len(rows)].copy_(rows)

    def _wanted(
        self, passes: Sequence[Pass], tokens: Sequence[Tensor], sizes: Sequence[int], block: int | None
    ) -> Tensor:
        """Indices of the rows whose logits are wanted, int64 on the device: of each pass the last ones, padded to so
        many, and all to whole blocks. tokens: of each pass, with padding."""
        parts, start = [], 0
        for each, ids, size in zip(passes, tokens, sizes, strict=True):
            count = len(each.tokens)
            parts.append(torch.arange(size).add_(count - each.num_logits).clamp_(max=count - 1) + start)
            start += len(ids)
        rows = torch.cat(parts)
        if block is not None and (missing := -len(rows) % block):
            rows = torch.cat([rows, rows[-1:].expand(missing)])
        return sent(rows, self._decoder.device)

    def _count_first(self, num_rows: int) -> None:
        """Count a pass as first if a GPU's kernels for `num_rows` rows are not compiled yet."""
        if self._decoder.device.type == "cuda" and num_rows not in self._launched:
            self._launched.add(num_rows)
            self.stats.first_passes += 1

    def _begin(self, asked: Pass, num_rows: int) -> Segment:
        """Begin a forward of `num_rows` rows: the tokens, then padding."""
        tokens, padding, cache = asked.tokens, num_rows - len(asked.tokens), _level(asked)._cache
        filler = PADDING if self._decoder.config.experts is not None else 0
        if isinstance(tokens, Tensor):
            tokens = pad(tokens, (0, padding), value=filler) if padding else tokens
        else:
            tokens = sent(torch.tensor([*tokens, *[filler] * padding], dtype=torch.long), self._decoder.device)
        cache.begin("decode", num_rows)
        return Segment(cache, tokens)

    def _logits(self, passes: Sequence[Pass], parts: Sequence[Tensor], block: int | None) -> list[Tensor]:
        """The logits that each pass asks for. parts: each pass's hidden rows, perhaps with padding at the end."""
        ends = [(len(each.tokens), each.num_logits) for each in passes]
        wanted = [hidden[count - num : count] for hidden, (count, num) in zip(parts, ends, strict=True)]
        sizes = [len(rows) for rows in wanted]
        if block is None:  # bits may depend on the rows of other passes
            return [self._decoder.logits(rows)[:, : self._vocab_size] if len(rows) else rows for rows in wanted]
        if not sum(sizes):
            return wanted
        if len(parts) == 1:
            return [self._last_logits(parts[0], *ends[0], block)]
        rows = torch.cat(wanted)
        if padding := -sum(sizes) % block:
            rows = pad(rows, (0, 0, 0, padding))
        return list(self._decoder.logits(rows, block=block)[: sum(sizes), : self._vocab_size].split(sizes))

    def _last_logits(self, hidden: Tensor, count: int, num_logits: int, block: int) -> Tensor:
        """The logits of the last `num_logits` of `count` rows. hidden: of whole blocks; the rows beside the wanted ones
        fill theirs up, so that nothing is copied."""
        num_rows = num_logits + -num_logits % block
        first, start = count - num_logits, min(count - num_logits, len(hidden) - num_rows)
        logits = self._decoder.logits(hidden[start : start + num_rows], block=block)
        return logits[first - start : count - start, : self._vocab_size]

    def _block_for(self, passes: Sequence[Pass]) -> int | None:
        """Rows of a block, which passes may share. The CPU's kernels need no blocks of several rows: a row has the same
        bits beside any others."""
        any_rows = self._block is None and len(passes) > 1 and self._decoder.takes_any_rows
        return 1 if any_rows else self._block

    def _padded(self, counts: Sequence[int], block: int | None) -> list[int]:
        """Rows of each pass with padding, which is at the end of the last one where passes share blocks. Passes of a
        graph are padded one by one, so that there are few of them."""
        if block is None:
            return [self._room(count) for count in counts]
        if self._graphs is not None and len(counts) > 1:
            counts = [power_of_two(count) for count in counts]
        return [*counts[:-1], counts[-1] + -sum(counts) % block]

    def _room(self, num_rows: int) -> int:
        """Rows of a pass without blocks: a power of two with graphs, so that there are few of them."""
        return num_rows if self._graphs is None else power_of_two(num_rows)


class StreamingLevel(Level):
    """A level over a streaming cache, which skips tokens that no later row attends to."""

    def _caught_up(self, asked: Pass) -> Pass:
        """Run or skip a pass's first tokens, so that the rest fits one pass."""
        cache, rest = self._cache, asked.tokens
        assert isinstance(cache, StreamingCache)
        missing_sinks = max(cache.sinks - cache.length, 0)
        if len(rest) > missing_sinks + cache.window:
            if missing_sinks:
                self._forward([Pass(self, rest[:missing_sinks], 1)])
            rest = rest[missing_sinks:]
            skipped = cache.skip(len(rest))
            rest = rest[skipped:]
            self.stats.rows -= skipped  # counted by the caller, never run
        while len(rest) > cache.max_rows:
            self._forward([Pass(self, rest[: cache.max_rows], 1)])
            rest = rest[cache.max_rows :]
        return replace(asked, tokens=rest)

    def _room(self, num_rows: int) -> int:
        """A few rows are padded to a power of two: the padding costs nothing, and a CPU's library spends the time of
        several passes on the first pass of each new number of rows, which vary when the cache catches up."""
        if self._decoder.takes_any_rows:
            return num_rows
        assert isinstance(self._cache, StreamingCache)
        return power_of_two(num_rows, min(MAX_ROWS, self._cache.max_rows))


def _graph_keys(segments: Sequence[Segment]) -> list[Hashable] | None:
    """The caches' keys of a pass that may be a graph; None where it may not."""
    keys = [each.cache.graph_key for each in segments]
    return None if None in keys or any(len(each.tokens) > MAX_ROWS for each in segments) else keys


def _level(asked: Pass) -> Level:
    """Passes that share one are all of this class."""
    return cast(Level, asked.level)
