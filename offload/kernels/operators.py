"""Attention over runs by torch's operators, on any device: where no kernels of our own run.

Rows attend in blocks of `ROWS`, filled up, over pieces of a run whose shape follows from their place in the run.
Results are merged in the order of the pieces, and keys that a row does not see add exact zeros: so a row's bits depend
on the keys that it sees, and neither on the rows beside it nor on their number. Where a trial finds a row's place in a
block to change its bits (kernels/rows.py), rows attend one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.formats.quantised_kv import GROUP, KVCodes
from offload.kernels.attention import Part, attend, attended_rows, fold, merge, sink_part, unfold
from offload.kernels.places import append_rows
from offload.kernels.rows import AttentionShape, attention_alike
from offload.kernels.runs import MASS_DTYPE, Chosen, Rows, Run

ROWS = 16  # of a block
PAGES = 4  # that are attended to at a time
CODED_PAGE = 512  # tokens


@dataclass
class _Block:
    """n rows and what they have gathered, first of all their sink logits. queries: [H_kv, G * n, D] each; own: int64
    [G * n], each folded row's place among the runs' positions; group: G."""

    queries: Sequence[Tensor]
    own: Tensor
    group: int
    part: Part | None = None
    masses: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # by piece: (mass, lse of the piece)

    def add(self, part: Part, num_chunks: int) -> None:
        """num_chunks: of the part's masses those that count."""
        if part.mass is not None:
            self.masses.append((part.mass[..., :num_chunks], part.lse))
        self.part = part if self.part is None else merge(self.part, part)

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.own) // self.group

    def out(self) -> Tensor:
        """[n, H * D] fp32."""
        assert self.part is not None
        return unfold(self.part.out, self.count)

    def lse(self) -> Tensor:
        """[n, H] fp32."""
        assert self.part is not None
        return unfold(self.part.lse[..., None], self.count)

    def mass(self) -> Tensor:
        """[n, H_kv, G, C] fp32: relative to all pieces."""
        assert self.part is not None
        whole = self.part.lse.clamp(min=torch.finfo(torch.float32).min)  # from which -inf may be taken
        mass = torch.cat([mass * (lse - whole).exp()[..., None] for mass, lse in self.masses], -1)
        return mass.view(len(mass), -1, self.count, mass.shape[-1]).permute(2, 0, 1, 3)


class OperatorAttention:
    """`RunAttention` by torch's operators. Codes are in the order "lanes"."""

    def __init__(self, *, dtype: torch.dtype, chunk: int | None = None) -> None:
        """chunk: tokens of a chunk, a divisor of a page's."""
        self._dtype, self._chunk = dtype, chunk
        self._rows: Rows | None = None
        self._blocks: list[_Block] = []
        self._masses = False

    def begin(self, rows: Rows, counts: Sequence[int], *, masses: bool = False, lasts: Sequence[int] = ()) -> None:
        self._rows, self._masses, self._places = rows, masses and self._chunk is not None, rows.in_memory()
        num_rows, num_kv_heads, group = len(rows.q), rows.k.shape[1], rows.q.shape[1] // rows.k.shape[1]
        size = self._block_rows(rows)
        stop, missing = rows.position + num_rows, -num_rows % size
        ends = [None if last >= stop else last for last in lasts or (stop,)]
        queries, self._keys = self._places.rotated(rows.q, rows.k, rows.scoring, ends)
        filled = zip(*(pad(query, (0, 0, 0, 0, 0, missing)).split(size) for query in queries), strict=True)
        self._blocks = []
        for some, own in zip(filled, self._places.in_blocks(size, group), strict=True):
            folded = [fold(query, num_kv_heads) for query in some]
            self._blocks.append(_Block(folded, own, group, sink_part(rows.scoring.sink_logits, folded[0])))

    def append_rows(self, run: Run) -> None:
        assert self._rows is not None
        rows = self._rows.scoring.cached(self._keys, self._rows.v)
        append_rows(run.pages, run.first, self._rows.index, rows, self._places)

    def attend(self, run: Run) -> None:
        if run.windowed and run.held.dim() == 4:
            for block in self._blocks:
                self._attend_window(block, run)
            return
        for pages, at in self._coded(run) if run.coded else _pieces(run):
            for block in self._blocks:
                self._attend(block, run, pages, at)

    def attend_chosen(self, runs: Sequence[Run], chosen: Chosen) -> None:
        """Each row's tokens are copied together, in pages as those of the runs, and it attends to them at its place in
        a block of rows that are all the same: so its bits are those that a run of the same tokens gives."""
        num_pages, page = chosen.pages or (runs[0].pages.shape[1], runs[0].pages.shape[3])
        assert not self._masses, "no masses of chosen blocks are kept"
        per_piece = min(num_pages, PAGES) * page // chosen.size
        missing = -len(chosen.tokens) % self._blocks[0].count
        tokens = pad(chosen.tokens, (0, missing)).split(self._blocks[0].count)
        lists = pad(chosen.blocks, (0, -chosen.blocks.shape[1] % per_piece, 0, missing), value=-1)
        for block, own, counts in zip(self._blocks, lists.split(self._blocks[0].count), tokens, strict=True):
            for first in range(0, lists.shape[1], per_piece):
                some = own[:, first : first + per_piece]
                own_counts = counts - first * chosen.size
                block.add(self._attended(block, runs, some, own_counts, chosen.size, page), 0)

    def _attended(
        self, block: _Block, runs: Sequence[Run], lists: Tensor, counts: Tensor, size: int, page: int
    ) -> Part:
        """Attention of the block's row r to the first counts[r] tokens of the blocks lists[r], a whole piece."""
        assert self._rows is not None
        scoring, parts = self._rows.scoring, []
        for row in range(block.count):
            query = block.queries[0][:, row :: block.count].repeat_interleave(block.count, 1)
            keys, values = attended_rows(_gathered(runs, lists[row], size, page), joined=scoring.joined)
            seen = counts[row].long().expand(query.shape[1])
            part = attend(query, keys, values, seen, scale=scoring.scale, cap=scoring.cap)
            parts.append(Part(part.out[:, row :: block.count], part.lse[:, row :: block.count]))
        return Part(
            torch.stack([part.out for part in parts], 2).flatten(1, 2),
            torch.stack([part.lse for part in parts], 2).flatten(1, 2),
        )

    def merge(self) -> tuple[Tensor, Tensor | None]:
        out = self._joined([block.out() for block in self._blocks]).to(self._dtype)
        mass = self._joined([block.mass().sum(2) for block in self._blocks]) if self._masses else None
        self._rows, self._blocks = None, []
        return out, mass.to(MASS_DTYPE) if mass is not None and mass.is_cuda else mass

    def part(self) -> Part:
        lse = self._joined([block.lse() for block in self._blocks])
        out = self._joined([block.out() for block in self._blocks]).unflatten(1, (lse.shape[1], -1))
        mass = self._joined([block.mass().flatten(1, 2) for block in self._blocks]) if self._masses else None
        self._rows, self._blocks = None, []
        return Part(out, lse, mass)

    def _joined(self, blocks: Sequence[Tensor]) -> Tensor:
        """The rows of all blocks."""
        assert self._rows is not None
        return (blocks[0] if len(blocks) == 1 else torch.cat(list(blocks)))[: len(self._rows.q)]

    def _block_rows(self, rows: Rows) -> int:
        """1 where a row's place in a block of `ROWS` changes its bits on this CPU."""
        if rows.q.is_cuda:
            return ROWS
        num_kv_heads, head_dim = rows.k.shape[1:]
        shape = AttentionShape(rows.q.shape[1], num_kv_heads, head_dim, PAGES, CODED_PAGE)
        return ROWS if attention_alike(shape, ROWS, self._dtype, torch.get_num_threads()) else 1

    def _attend_window(self, block: _Block, run: Run) -> None:
        """Attend to the rows' windows in a run of one page. The keys that the block sees are copied together first, so
        that a row's bits do not depend on their places in the page."""
        assert self._rows is not None
        window, scoring, first = self._rows.window, self._rows.scoring, block.own[:1] - run.first
        seen = torch.arange(window + block.count - 1, device=first.device) + (first + 1 - window)
        held = run.held.index_select(2, seen.clamp(0, run.held.shape[2] - 1))[:, None]
        keys, values = attended_rows(held, joined=scoring.joined)
        row = torch.arange(block.count, device=first.device).repeat(block.group)
        first_visible = torch.maximum(row, window - 1 - first)
        block.add(
            attend(
                block.queries[run.query], keys, values, row + window, first_visible=first_visible, scale=scoring.scale,
                cap=scoring.cap,
            ),
            0,
        )  # fmt: skip

    def _attend(self, block: _Block, run: Run, pages: Tensor, at: int) -> None:
        """Attend to `pages`, a piece of the run that begins with the run's token `at`."""
        assert self._rows is not None
        count, page, scoring = run.tokens - at, pages.shape[3], self._rows.scoring
        seen, first = self._seen(block, run, at, pages.shape[1] * page)
        part = attend(
            block.queries[run.query],
            *attended_rows(pages, joined=scoring.joined),
            seen,
            first_visible=first,
            chunk=self._chunk if self._masses else None,
            scale=scoring.scale,
            cap=scoring.cap,
        )
        used = min(-(-count // page), pages.shape[1])
        block.add(part, used * page // self._chunk if self._chunk else 0)

    def _seen(self, block: _Block, run: Run, at: int, num_tokens: int) -> tuple[Tensor | None, Tensor | None]:
        """The tokens of the piece up to which each row sees, and the first one that it sees, [G * ROWS] each, as
        `attend` takes them; None: all of them. The host's numbers decide on None only where no graph may run again with
        other numbers."""
        assert self._rows is not None
        before, count = self._rows.index - run.first - at, run.tokens - at
        if run.coded:
            if (bounds := self._places.bounds) is not None:
                return (bounds[0] - at).clamp(max=num_tokens).expand_as(block.own), None
            return None if count >= num_tokens else torch.full_like(block.own, count), None
        if count >= num_tokens and before >= num_tokens and not run.windowed and not self._rows.moving:
            return None, None
        seen = block.own + (1 - run.first - at)
        first = seen - self._rows.window if run.windowed else None
        return seen if before + len(self._rows.q) <= count else seen.clamp(max=count), first

    def _coded(self, run: Run) -> Iterator[tuple[Tensor, int]]:
        """The pieces of a run of codes, as of `_pieces`: the numbers of the codes, in pages of CODED_PAGE tokens, the
        last one filled up."""
        assert self._rows is not None
        step, blocks = PAGES * CODED_PAGE // GROUP, run.held[:, : run.tokens // GROUP]
        for first in range(0, blocks.shape[1], step):
            some = blocks[:, first : first + step]
            filled = pad(some, (0, 0, 0, -some.shape[1] % (CODED_PAGE // GROUP)))
            dim = self._rows.q.shape[2] // (1 + self._rows.scoring.joined)
            rows = KVCodes(filled[None], dim).rows(self._dtype)[0]
            yield rows.unflatten(2, (-1, CODED_PAGE)).transpose(1, 2), first * GROUP


def _pieces(run: Run) -> Iterator[tuple[Tensor, int]]:
    """(pages [2, p, H_kv, S, D], the first one's first token) as far as the run's tokens reach: a few pages at a time;
    of a windowed run one, since windows begin at any."""
    pages, step = run.pages, 1 if run.windowed else PAGES
    for number in range(0, -(-run.tokens // pages.shape[3]), step):
        yield pages[:, number : number + step], number * pages.shape[3]


def _gathered(runs: Sequence[Run], blocks: Tensor, size: int, page: int) -> Tensor:
    """The tokens of blocks [n] of the runs, in pages of `page` tokens: [2, p, H_kv, page, D]. -1 stands for any
    block."""
    _, num_pages, num_heads, own_page, dim = runs[0].pages.shape
    of_page = own_page // size

    def in_tile(run: Run, first: int) -> Tensor:
        """[n, 2, H_kv, size, D]: those blocks of the run, whose first is `first`."""
        within = (blocks - first).clamp(0, run.pages.shape[1] * of_page - 1)
        by_block: Tensor = run.pages.unflatten(3, (-1, size))
        return by_block[:, within // of_page, :, within % of_page]

    found = in_tile(runs[0], 0)
    for number, run in enumerate(runs[1:], 1):
        first = number * num_pages * of_page
        found = torch.where((blocks >= first)[:, None, None, None, None], in_tile(run, first), found)
    by_page = found.view(-1, page // size, 2, num_heads, size, dim).permute(2, 0, 3, 1, 4, 5)
    return by_page.reshape(2, -1, num_heads, page, dim)
