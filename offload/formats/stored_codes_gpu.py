"""Codes of stored matrices on a GPU, in Triton: words of 4 bytes of them, loaded from their blocks, or looked up.

Words are at any even byte, or with blocks of an odd number of bytes at any. Codes of 4 bits in a book are looked up two
at a time, codes in a grid eight at a time, and their signs four at a time: the layout of numbers for a product is
computed back to the last load, so that nothing that depends on a word's place may be behind it.
"""

# Triton reads the annotations of programs: they are not postponed.
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.formats.encodings import BOOKS, Grid
from offload.formats.stored import StoredMatrix, entries

_ONES = 0x01010101


def book_of(stored: StoredMatrix) -> Tensor:
    """The table in which a form's codes are looked up, `_book` or `_grid_book`. Of forms without one any tensor, the
    blocks."""
    own, device = stored.encoding, stored.rows.device
    if own.grid is not None:
        return _grid_book(own.grid, device)
    return _book(own.code, device) if own.looked_up else stored.rows


@cache
def _book(code: str, device: torch.device) -> Tensor:
    """int16 [256], by bytes of two codes: in each the number of the lower half's code as an int8, and that of the upper
    half's above it. In memory that is never freed, since graphs read it; the first launch of a pass is no graph's."""
    numbers = torch.tensor(BOOKS[code], dtype=torch.int8).view(torch.uint8)
    pairs = torch.stack([numbers.expand(16, 16), numbers[:, None].expand(16, 16)], -1).contiguous()
    return pairs.view(torch.int16).flatten().to(device)


@cache
def _grid_book(grid: Grid, device: torch.device) -> Tensor:
    """Words, int32: 16 of the signs of four codes, which have 1 in the bytes of those that are below 0, or of what is
    added to four codes, 1 or -1; then the entries of the grid. In memory that is never freed, too."""
    signs = (torch.arange(16)[:, None] >> torch.arange(4) & 1).to(torch.int8).view(torch.int32).flatten()
    if grid.signs.bits == 1:
        signs[0], signs[1] = _ONES, -_ONES
    return torch.cat([signs, entries(grid, torch.device("cpu")).view(torch.int32).flatten()]).to(device)


@triton.jit
def words_at(home, odd, at, held, BLOCK: tl.constexpr, TURNED: tl.constexpr):
    """Load words: int32 [M, N] from the byte offsets `at` [M, 1]. home: pointers [1, N] to whole words. odd: the bytes,
    below 4, from `home` to the first block. Offsets and `odd` are even if blocks have an even number of bytes. held:
    other words are 0. TURNED: the halves of an aligned word are swapped, and those of an unaligned word are in
    order."""
    if BLOCK % 4 == 0:
        words = tl.load(home + at // 4, mask=held, other=0)
    elif BLOCK % 2:
        source, shift = home + (at + odd) // 4, ((at + odd) & 3) * 8
        low = tl.load(source, mask=held, other=0)
        high = tl.load(source + 1, mask=held & (shift != 0), other=0)
        # A funnel shift: this is how LLVM knows it, and how nothing is shifted by 32.
        words = (low.to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)).to(tl.int32) | high << 1 << (31 - shift)
    else:
        apart, source = in_two(odd, at), home + (at + odd) // 4
        low = tl.load(source, mask=held, other=0)
        if TURNED:
            high = tl.load(source + tl.where(apart, 1, 0), mask=held, other=0)
            words = (low >> 16) & 0xFFFF | high << 16
        else:
            high = tl.load(source + 1, mask=held & apart, other=0)
            words = tl.where(apart, (low >> 16) & 0xFFFF | high << 16, low)
    return words


@triton.jit
def in_two(odd, at):
    """Whether the four bytes from `at` on span two words."""
    return (at + odd) & 2 != 0


@triton.jit
def halves_at(home, odd, at, held, BLOCK: tl.constexpr):
    """Load words of which only the lower halves are valid, or bytes if blocks have an odd number of them, as
    `words_at`."""
    if BLOCK % 4:
        words = tl.load(home + (at + odd) // 4, mask=held, other=0) >> (((at + odd) & (3 if BLOCK % 2 else 2)) * 8)
    else:
        words = tl.load(home + at // 4, mask=held, other=0)
    return words


@triton.jit
def items_at(home, odd, at, item, held, FIELD: tl.constexpr, BLOCK: tl.constexpr):
    """Load items of a Field, in the lowest bits: int32 [M, N] from the byte offsets `at` of blocks, which have an even
    number of bytes, and `item`, both [M, 1]."""
    bit = FIELD.at + item // FIELD.many * FIELD.outer + item % FIELD.many * FIELD.inner
    half = at + bit // 16 * 2 + (odd if BLOCK % 4 else 0)
    source, shift = home + half // 4, (half & 2) * 8 + bit % 16
    items = tl.load(source, mask=held, other=0)
    if FIELD.is_across:
        high = tl.load(source + 1, mask=held & (shift + FIELD.bits > 32), other=0)
        items = (items.to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)).to(tl.int32) | high << 1 << (31 - shift)
    else:
        items >>= shift
    return items & ((1 << FIELD.bits) - 1)


@triton.jit
def integers_at(home, odd, at, group, held, SMALL: tl.constexpr, BLOCK: tl.constexpr):
    """Load the integers of a Small, as `items_at`."""
    integers = items_at(home, odd, at, group, held, SMALL.low, BLOCK)
    if SMALL.high.bits:
        integers |= items_at(home, odd, at, group, held, SMALL.high, BLOCK) << SMALL.low.bits
    return integers


@triton.jit
def codes_of(
    home, odd,  # as above: blocks
    book,  # from book_of
    word,  # int32 [M]: words of codes, counted through the blocks
    held,  # bool [M, 1]
    FORM: tl.constexpr,  # an Encoding
    TURNED: tl.constexpr,
):  # fmt: skip
    """Words of codes, of their remaining bits and of their upper bits, [M, N] each; a form uses the first ones."""
    BLOCK: tl.constexpr = FORM.nbytes
    at, within = (word // FORM.words * BLOCK)[:, None], (word % FORM.words)[:, None]
    if FORM.in_halves:
        lower = at + FORM.codes.at + within // 8 * 64 + within % 8 * 4
        codes = words_at(home, odd, lower, held, BLOCK, TURNED)
        others = words_at(home, odd, lower + 32, held, BLOCK, TURNED)
        upper = words_at(home, odd, at + FORM.high.at + within * 4, held, BLOCK, TURNED)
    elif FORM.grid is not None:
        codes, others = in_grid(home, odd, book, at, within, held, FORM.grid, BLOCK)
        upper = codes
    elif FORM.fours.bits:
        codes = in_bytes(items_at(home, odd, at, within, held, FORM.fours, BLOCK), FORM.codes.bits)
        others, upper = codes, codes
    else:
        codes = words_at(home, odd, at + FORM.codes.at + within * 4, held, BLOCK, TURNED)
        others, upper = codes, codes
        if FORM.high.run == 32:
            upper = words_at(home, odd, at + FORM.high.at + within % 8 * 4, held, BLOCK, TURNED)
        if FORM.looked_up:
            codes, others = in_book(book, codes)
    return codes, others, upper


@triton.jit
def in_bytes(codes, BITS: tl.constexpr):
    """Four codes of one or two bits, a byte each: int32 to words."""
    twos = (codes | codes << (16 - 2 * BITS)) & ((1 << 2 * BITS) - 1) * 0x00010001
    return (twos | twos << (8 - BITS)) & ((1 << BITS) - 1) * 0x01010101


@triton.jit
def in_book(book, codes):
    """Words of the numbers of the codes in the lower halves of bytes, and of those in the upper ones, int8."""
    one, two = tl.load(book + (codes & 255)).to(tl.int32), tl.load(book + (codes >> 8 & 255)).to(tl.int32)
    three, four = tl.load(book + (codes >> 16 & 255)).to(tl.int32), tl.load(book + (codes >> 24 & 255)).to(tl.int32)
    lower = one & 0xFF | (two & 0xFF) << 8 | (three & 0xFF) << 16 | four << 24
    return lower, one >> 8 & 0xFF | two & 0xFF00 | (three & 0xFF00) << 8 | (four & 0xFF00) << 16


@triton.jit
def in_grid(home, odd, book, at, eight, held, GRID: tl.constexpr, BLOCK: tl.constexpr):
    """Words of the first four and of the last four of each block's codes 8 * eight to 8 * eight + 7, int8."""
    index = items_at(home, odd, at, eight, held, GRID.lows, BLOCK)
    high = items_at(home, odd, at, eight, held, GRID.highs, BLOCK) if GRID.high.bits else index * 0
    signs = items_at(home, odd, at, eight, held, GRID.signs, BLOCK)
    if GRID.each == 8:
        both = tl.load(book.to(tl.pointer_type(tl.int64)) + 8 + (index | high << 8))
        lower, upper = both.to(tl.int32), (both >> 32).to(tl.int32)
    else:
        lower = tl.load(book + 16 + (index & 255 | (high & (1 << GRID.high.bits) - 1) << 8))
        upper = tl.load(book + 16 + (index >> 8 | high >> GRID.high.bits << 8))
    if GRID.signs.bits == 1:
        added = tl.load(book + signs)
        return more(lower, added), more(upper, added)
    if GRID.signs.bits == 7:
        signs |= (0x96696996 - 2**32 >> ((signs ^ signs >> 5) & 31) & 1) << 7  # bit n: whether n has an odd count of 1
    one, two = tl.load(book + (signs & 15)), tl.load(book + (signs >> 4))
    return (lower ^ one * 255) + one, (upper ^ two * 255) + two  # no byte is 0: nothing is carried


@triton.jit
def more(word, change):
    """Add a word of 1 or -1 to one of int8 that are far from the largest and least."""
    return ((word ^ (0x80808080 - 2**32)) + change) ^ (0x80808080 - 2**32)
