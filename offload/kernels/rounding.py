"""The fingerprint of rounding: how torch's operators round on the CPU in this process.

Which code a library runs follows from the processor, the library's build, environment variables (MKL's, oneDNN's,
torch's own) and settings that nobody lists. So a few small operators run, and their bits tell.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from offload.kernels.attention import attend, attend_joined

_ROWS, _INPUTS, _OUTPUTS = 96, 640, 320  # no powers of two: ends of vectors and of blocks count
_HEADS, _PAGES, _PAGE, _DIM = 2, 3, 48, 64
_DIGEST_BYTES = 16


@cache
def rounding(dtype: torch.dtype, threads: int) -> str:
    """A digest of the bits that a prefill's operators give on the CPU in `dtype`; it takes a few milliseconds. threads:
    the process's."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with torch.inference_mode():
        for found in _results(dtype):
            digest.update(found.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _results(dtype: torch.dtype) -> Iterator[Tensor]:
    x = _numbers(_ROWS, _INPUTS, step=7919)
    weight = _numbers(_OUTPUTS, _INPUTS, step=6151)
    for kind in dict.fromkeys((dtype, torch.float32)):
        yield linear(x.to(kind), weight.to(kind))
    yield rms_norm(x, x.shape[1:], eps=1e-6)
    for function in (torch.exp, torch.sigmoid, torch.tanh, torch.cos, silu):
        yield function(x)
    yield x.softmax(1)
    q = _numbers(_HEADS, _ROWS, _DIM, step=4099).to(dtype)
    keys, values = (_numbers(_PAGES, _HEADS, _PAGE, _DIM, step=step).to(dtype) for step in (3571, 2053))
    for run in (attend, attend_joined):
        part = run(q, keys, values, None)
        yield from (part.out, part.lse)


def _numbers(*shape: int, step: int) -> Tensor:
    """Numbers from -1 to 1 without a pattern, the same everywhere: fp32."""
    numbers = torch.arange(math.prod(shape)) * step % 8191 - 4095
    return numbers.float().div_(4096).view(shape)
