"""The choice of blocks on a GPU, in Triton, see `kernels.choosing`.

One launch scores the blocks. Each further one divides what is left into chunks and keeps of each chunk the blocks with
the highest scores, until one chunk is left: which is chosen of all is kept of every chunk that it is in. The number of
launches follows from N alone and the visible blocks are counted on the GPU, so a graph may contain them.
"""

# Triton evaluates the annotations of programs, so they are not postponed.
import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.native.launch import launch

MOST_ROWS = 64  # that are scored at a time
ROWS = 16  # of a program that scores: the minimum of tensor cores
KEYS = 64  # blocks of a program that scores
CHUNK = 8192  # blocks, or twice as many as are chosen
CHUNK_WARPS, _SMALLEST = 8, 256
_PAST_INFINITE = 0x7F800001  # bits of a number that no score reaches
_HALVINGS = 31  # until two of them are one apart


def choose(q: Tensor, pooled: Tensor, visible: Tensor, most: int) -> Tensor:
    """See `kernels.choosing.choose`. Memory: the scores of 64 rows, and as much again for what is left of them."""
    most = min(most, len(pooled))
    if not most:
        return visible.new_empty(len(q), 0, dtype=torch.int32)
    if len(q) > MOST_ROWS:
        parts = zip(q.split(MOST_ROWS), visible.split(MOST_ROWS), strict=True)
        return torch.cat([choose(rows, pooled, own, most) for rows, own in parts])
    assert q.is_contiguous()
    assert pooled.is_contiguous()
    bits, numbers, is_first = _scores(q, pooled, visible).view(torch.int32), visible, True
    while True:
        num_rows, count = bits.shape
        chunk, num_chunks = chunking(count, most)
        kept = bits.new_empty(2, num_rows, num_chunks * most)
        launch(
            keep_highest,
            (num_chunks, num_rows),
            (bits, numbers, visible, kept[0], kept[1], count, most),
            **constants(chunk, most, is_first=is_first),
            num_warps=CHUNK_WARPS,
        )
        bits, numbers, is_first = kept[0], kept[1], False
        if num_chunks == 1:
            return numbers


def chunking(count: int, most: int) -> tuple[int, int]:
    """(blocks of a chunk, a power of two; number of chunks) of `count` blocks of which `most` are chosen: at most half
    as many are left."""
    chunk = max(CHUNK, 2 << (most - 1).bit_length())
    chunk = max(min(chunk, 1 << (count - 1).bit_length()), _SMALLEST)
    return chunk, -(-count // chunk)


def part_of(dim: int, itemsize: int) -> int:
    """The numbers of a head that are multiplied at a time: products of fp32 take more registers."""
    return min(max(1 << (dim - 1).bit_length(), 16), 128 if itemsize == 2 else 32)


def constants(chunk: int, most: int, *, is_first: bool) -> dict[str, object]:
    """The constants of `keep_highest`."""
    return {
        "FIRST": is_first, "CHUNK": chunk, "MOST_PADDED": 1 << (most - 1).bit_length(), "PAST": _PAST_INFINITE,
        "HALVINGS": _HALVINGS,
    }  # fmt: skip


def _scores(q: Tensor, pooled: Tensor, visible: Tensor) -> Tensor:
    """The scores fp32 [T, N] of the blocks that rows may choose among."""
    num_rows, num_heads, dim = q.shape
    scores = torch.empty(num_rows, len(pooled), device=q.device)
    launch(
        score_blocks,
        (-(-num_rows // ROWS), -(-len(pooled) // KEYS)),
        (q, pooled, visible, scores, num_rows, len(pooled)),
        HEADS=num_heads, DIM=dim, PART=part_of(dim, q.dtype.itemsize), ROWS=ROWS, KEYS=KEYS, WIDEN=not q.is_cuda,
    )  # fmt: skip
    return scores


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def score_blocks(
    q,  # [T, HEADS, DIM], contiguous
    pooled,  # [N, DIM], contiguous
    visible,  # integers [T]
    scores,  # fp32 [T, N]
    num_rows,
    num_blocks,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PART: tl.constexpr,  # of the numbers of a head, a power of two
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDEN: tl.constexpr,  # products of fp32: the interpreter has no bf16
):
    """Program (r, b): block r of the rows scores block b of the keys. Nothing is written of keys that no row sees."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * KEYS
    real = row < num_rows
    seen = tl.max(tl.load(visible + row, mask=real, other=0).to(tl.int32), 0)
    if first >= seen:
        return
    block = first + tl.arange(0, KEYS)
    there = block < num_blocks
    total = tl.zeros([ROWS, KEYS], tl.float32)
    for head in range(HEADS):
        product = tl.zeros([ROWS, KEYS], tl.float32)
        for start in range(0, DIM, PART):
            part = start + tl.arange(0, PART)
            present = (part < DIM)[None, :]
            at = block.to(tl.int64)[:, None] * DIM + part[None, :]
            key = tl.load(pooled + at, mask=there[:, None] & present, other=0.0)
            asked = ((row * HEADS + head) * DIM)[:, None] + part[None, :]
            query = tl.load(q + asked, mask=real[:, None] & present, other=0.0)
            if WIDEN:
                key, query = key.to(tl.float32), query.to(tl.float32)
            product = tl.dot(query, tl.trans(key), product, input_precision="ieee")
        total += tl.where(product > 0.0, product, 0.0)
    target = row.to(tl.int64)[:, None] * num_blocks + block[None, :]
    tl.store(scores + target, total, mask=real[:, None] & there[None, :])


@triton.jit(do_not_specialize=["count", "most"])
def keep_highest(
    scores,  # int32 [T, count]: bits of the scores, -1 for no block
    numbers,  # int32 [T, count]: of the blocks, ascending; not read if FIRST
    visible,  # integers [T]; not read unless FIRST
    kept_scores,  # int32 [T, chunks * most], likewise
    kept_numbers,  # int32 [T, chunks * most], -1 for none
    count,
    most,
    FIRST: tl.constexpr,  # places are numbers, and scores past the visible ones may be anything
    CHUNK: tl.constexpr,
    MOST_PADDED: tl.constexpr,
    PAST: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    """Program (c, t): keep the highest scores of chunk c of row t, in the order of their places. Scores are not
    negative, so their bits are in their order. The least one that is kept is found by bisection, counting the scores
    that reach a number; of those that are equal to it the first are kept."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    source = row.to(tl.int64) * count + place
    limit = count
    if FIRST:
        limit = tl.minimum(tl.load(visible + row).to(tl.int32), count)
    bits = tl.load(scores + source, mask=place < limit, other=-1)
    low, high = tl.full([], 0, tl.int32), tl.full([], PAST, tl.int32)
    for _ in range(HALVINGS):
        middle = low + (high - low) // 2
        is_reached = tl.sum((bits >= middle).to(tl.int32), 0) >= most
        low, high = tl.where(is_reached, middle, low), tl.where(is_reached, high, middle)
    is_equal = (bits == low).to(tl.int32)
    room = most - tl.sum((bits > low).to(tl.int32), 0)
    is_kept = (bits > low) | ((bits == low) & (tl.cumsum(is_equal, 0) <= room))
    number = place
    if not FIRST:
        number = tl.load(numbers + source, mask=is_kept, other=0)
    target = (row * tl.num_programs(0) + chunk).to(tl.int64) * most
    at = target + tl.cumsum(is_kept.to(tl.int32), 0) - 1
    tl.store(kept_scores + at, bits, mask=is_kept)
    tl.store(kept_numbers + at, number, mask=is_kept)
    rest = tl.arange(0, MOST_PADDED)
    unused = (rest < most) & (rest >= tl.sum(is_kept.to(tl.int32), 0))
    none = tl.full([MOST_PADDED], -1, tl.int32)
    tl.store(kept_scores + target + rest, none, mask=unused)
    tl.store(kept_numbers + target + rest, none, mask=unused)
