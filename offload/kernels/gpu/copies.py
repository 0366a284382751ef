"""Copies by a GPU's kernels, in Triton, which read and write pinned host memory directly: chunks of tiles from their
homes, new rows to them, and rows of a table."""

# Triton evaluates the annotations of programs, so they are not postponed.
import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.formats.layout import ALL_TOKENS
from offload.native.launch import launch

_BLOCK_WORDS = 2048  # of four bytes: four concurrent 16-byte loads of each thread
_WARP_WORDS = 128  # by one 16-byte load of each thread
_ROW_WORDS = 1024  # of four bytes, of a program: two 16-byte loads of each thread
_ROW_WARPS = 4


def chunks(
    homes: Tensor,
    wanted: Tensor,
    held: Tensor,
    *,
    chunk: int,
    page: int,
    tile: int,
    slot: int = 0,
    tokens: range = ALL_TOKENS,
) -> None:
    """Copy chunks' keys and values into `held` [L, 2, H_kv, rows, D], contiguous, by one launch. Chunks have `chunk`
    tokens; tiles are [2, P, H_kv, S, D], with `page` tokens S and `tile` tokens P * S. `chunk` divides `page`, which
    divides `tile`.

    homes: int64 [L, number of tiles], addresses of the tiles as the GPU reads them, multiples of 16. wanted: int64 [L,
    H_kv, n] or, for all layers and heads, [n]: the chunk for each slot from `slot` on, negative for none. tokens: range
    of the sequence; tokens of the chunks outside it are not copied.
    """
    held = held.view(torch.int32)
    num_layers, _, num_heads, num_rows, words = held.shape
    padded = 1 << (words - 1).bit_length()
    rows, num_wanted = rows_at_once(chunk, padded), wanted.shape[-1]
    launch(
        copy_chunks,
        (2 * num_wanted, num_heads, num_layers),
        (
            homes, wanted, held, homes.shape[1], num_wanted if wanted.dim() == 3 else 0, num_rows, slot,
            tokens.start, tokens.stop,
        ),
        CHUNK=chunk,
        PER_PAGE=page // chunk,
        PER_TILE=tile // chunk,
        WORDS=words,
        WORDS_PADDED=padded,
        ROWS=rows,
        num_warps=warps(rows * padded),
    )  # fmt: skip


def new_rows(
    rows: Tensor, positions: Tensor, slot_of: Tensor, held: Tensor, homes: Tensor, *, size: int, page: int, tile: int
) -> None:
    """Copy new keys and values, rows [2, H_kv, T, D], each head's contiguous, home and into a block cache by one
    launch. positions: int64 [T]; negative ones are of padding, which is copied nowhere. slot_of: int32 [N]: the slots
    of their blocks of `size` tokens, each in one. held: [2, H_kv, slots * size, D], contiguous. homes: int64 [number of
    tiles], see `chunks`."""
    rows, held = rows.view(torch.int32), held.view(torch.int32)
    _, num_heads, num_rows, words = rows.shape
    assert rows.stride()[2:] == (words, 1)
    launch(
        copy_new_rows,
        (num_rows, num_heads, 2),
        (rows, positions, slot_of, held, homes, rows.stride(0), rows.stride(1), held.shape[2]),
        SIZE=size, PAGE=page, TILE=tile, WORDS=words, WORDS_PADDED=1 << (words - 1).bit_length(),
        num_warps=warps(words),
    )  # fmt: skip


def rows_at_once(chunk: int, padded: int) -> int:
    """The number of tokens that a program copies at a time, a power of two. padded: words of a token, rounded up to a
    power of two."""
    return min(1 << (chunk - 1).bit_length(), max(_BLOCK_WORDS // padded, 1))


def warps(num_words: int) -> int:
    """The number of warps of a program that copies `num_words` words at a time: as many as 16-byte loads keep busy."""
    return min(max(num_words // _WARP_WORDS, 1), 4)


def table_rows(address: Tensor, tokens: Tensor, out: Tensor) -> None:
    """Copy row tokens[t] of the table at `address`, int64 [1] on the GPU, to row t of out [T, width], contiguous, by
    one launch. Rows are whole words of four bytes. tokens: int64 [T]."""
    words = out.view(torch.int32)
    launch(
        copy_rows,
        (len(tokens), -(-words.shape[1] // _ROW_WORDS)),
        (address, tokens, words, words.shape[1]),
        WORDS=_ROW_WORDS,
        ALIGNMENT=16 if words.shape[1] % 4 == 0 else 4,
        num_warps=_ROW_WARPS,
    )


@triton.jit(do_not_specialize=["num_tiles", "wanted_stride", "num_rows", "slot", "start", "stop"])
def copy_chunks(
    homes,  # [L, num_tiles] int64: address of each tile [2, P, H_kv, S, D], in memory of the GPU or pinned
    wanted,  # [L * H_kv, n] by the stride, int64: the chunk for each slot, negative: none
    held,  # [L, 2, H_kv, num_rows, WORDS] int32, contiguous
    num_tiles,
    wanted_stride,  # 0: one list for all heads and layers
    num_rows,
    slot,  # the first one
    start,  # tokens of the sequence from `start` to `stop` are copied
    stop,
    CHUNK: tl.constexpr,
    PER_PAGE: tl.constexpr,  # chunks
    PER_TILE: tl.constexpr,
    WORDS: tl.constexpr,  # of four bytes, of a token's D numbers; a multiple of four
    WORDS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (2 * s + k, h, l): copy the keys, k = 0, or values of the chunk for slot s of KV head h in layer l."""
    place, kind = tl.program_id(0) // 2, tl.program_id(0) % 2
    head, layer = tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    chunk = tl.load(wanted + (layer * num_heads + head).to(tl.int64) * wanted_stride + place)
    if chunk < 0:
        return
    within = chunk % PER_TILE
    run = (within // PER_PAGE * num_heads + head) * PER_PAGE + within % PER_PAGE
    run += kind * (PER_TILE * num_heads)
    home = tl.load(homes + layer * num_tiles + chunk // PER_TILE).to(tl.pointer_type(tl.int32))
    source = tl.multiple_of(home + run * (CHUNK * WORDS), 16)
    first = ((layer * 2 + kind) * num_heads + head).to(tl.int64) * num_rows + (slot + place) * CHUNK
    first = tl.multiple_of(first * WORDS, 4)
    word = tl.arange(0, WORDS_PADDED)
    for begun in tl.static_range(0, CHUNK, ROWS):
        row = begun + tl.arange(0, ROWS)
        token = chunk * CHUNK + row
        real = (row < CHUNK) & (token >= start) & (token < stop)
        mask = real[:, None] & (word < WORDS)[None, :]
        at = row[:, None] * WORDS + word[None, :]
        tl.store(held + first + at, tl.load(source + at, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_held"])
def copy_new_rows(
    rows,  # [2, H_kv, T, WORDS] int32 by the strides
    positions,  # int64 [T]
    slot_of,  # int32 [N]
    held,  # [2, H_kv, num_held, WORDS] int32, contiguous
    homes,  # int64 [num_tiles]: address of each tile [2, P, H_kv, S, D], in memory of the GPU or pinned
    kind_stride,
    head_stride,
    num_held,
    SIZE: tl.constexpr,  # tokens of a block
    PAGE: tl.constexpr,  # tokens
    TILE: tl.constexpr,  # tokens
    WORDS: tl.constexpr,  # of four bytes, of a token's D numbers
    WORDS_PADDED: tl.constexpr,
):
    """Program (t, h, k): copy the keys, k = 0, or values of row t in KV head h."""
    row, head, kind = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    token = tl.load(positions + row)
    if token < 0:
        return
    word = tl.arange(0, WORDS_PADDED)
    real = word < WORDS
    new = tl.load(rows + kind * kind_stride + head * head_stride + row * WORDS + word, mask=real)
    slot = tl.load(slot_of + token // SIZE)
    place = slot.to(tl.int64) * SIZE + token % SIZE
    target = ((kind * num_heads + head).to(tl.int64) * num_held + place) * WORDS
    tl.store(held + target + word, new, mask=real & (slot >= 0))
    within = token % TILE
    page = kind * (TILE // PAGE) + within // PAGE
    home = tl.load(homes + token // TILE).to(tl.pointer_type(tl.int32))
    tl.store(home + ((page * num_heads + head) * PAGE + within % PAGE) * WORDS + word, new, mask=real)


@triton.jit
def copy_rows(
    address,  # int64 [1]: of the table, in memory of the host that is pinned
    tokens,  # int64 [T]
    out,  # int32 [T, width]
    width,  # words of a row
    WORDS: tl.constexpr,  # at a time
    ALIGNMENT: tl.constexpr,  # bytes of which every row is a multiple
):
    """Program (t, b): block b of the row of token t."""
    place, block = tl.program_id(0), tl.program_id(1)
    word = block * WORDS + tl.arange(0, WORDS)
    inside = word < width
    table = tl.load(address).to(tl.pointer_type(tl.int32))
    source = tl.multiple_of(table + tl.load(tokens + place) * width, ALIGNMENT)
    target = tl.multiple_of(place.to(tl.int64) * width, ALIGNMENT // 4)
    tl.store(out + target + word, tl.load(source + word, mask=inside, other=0), mask=inside)
