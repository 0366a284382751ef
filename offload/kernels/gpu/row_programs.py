"""The program that copies rows of a table on the host, in Triton. `offload.kernels.gpu.rows` launches it."""

# Triton reads the annotations: they are not postponed.
import triton
import triton.language as tl


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
