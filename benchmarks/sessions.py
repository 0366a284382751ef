"""Save and load a session of a full cache, compared with `dd` reading the same files, cold and warm, in one run.

Cold: the files are dropped from the page cache before each read. The KV cache holds random numbers, by default in the
shape of Llama-2-7B; no model runs. Rates are of the files' bytes, which are packed where there are kernels.

--locked locks the cache's memory (mlockall), which has the same effect on the system as pinning it for a GPU.

usage: python benchmarks/sessions.py [--tokens 4096] [--layers 32] [--folder DIR] [--repeats 5] [--locked]
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from report import about, emit, say

from offload.kernels.rope import RopeTable, Scoring
from offload.kv.full import FullCache
from offload.kv.kept import Kept
from offload.metrics import Spread
from offload.pages.storage import Offload
from offload.pages.tiles import TileShape
from offload.session.identity import Identity
from offload.session.store import Store
from offload.transfer.link import make_link
from offload.transfer.memory import Memory

PAGE_TOKENS = 512
MCL_CURRENT, MCL_FUTURE = 1, 2  # of sys/mman.h on Linux
NO_ROPE = Scoring(RopeTable(torch.empty(0), torch.empty(0)))


def make_cache(args: argparse.Namespace) -> FullCache:
    """A filled cache with all tiles on the host, pinned if there is a GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = TileShape(args.heads, args.head_dim, PAGE_TOKENS, 16, torch.bfloat16)
    link = make_link(device)
    cache = FullCache(
        Memory(device),
        shape,
        num_layers=args.layers,
        scorings=[NO_ROPE] * args.layers,
        offload=link and Offload(link),
    )
    cache.reserve(args.tokens)
    noise = torch.randn(cache.pages.page(0, 0).shape).to(torch.bfloat16)
    for number in range(-(-args.tokens // PAGE_TOKENS)):
        for layer in range(args.layers):
            cache.pages.page(layer, number).copy_(noise)
    cache.restored(args.tokens)
    return cache


def lock_memory() -> None:
    """Lock all present and future memory of this process. Raises OSError if that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(MCL_CURRENT | MCL_FUTURE):
        raise OSError(ctypes.get_errno(), "memory cannot be locked; raise the limit (ulimit -l unlimited)")


def drop(files: list[Path]) -> None:
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_with_dd(files: list[Path]) -> None:
    for file in files:
        subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=1M", "status=none"], check=True)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(cache: FullCache, folder: Path, repeats: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each repeat, by operation, and the bytes of the session's pages."""
    shape, tokens = cache.shape, [0] * cache.length
    identity = Identity(
        "model", "tokenizer", "rope", "bf16", cache.num_layers, shape.num_kv_heads, shape.head_dim, shape.page_tokens
    )
    times: dict[str, list[float]] = {"save": [], "dd, cold": [], "load, cold": [], "dd, warm": [], "load, warm": []}
    for _ in range(repeats):
        with Store.open(folder, identity) as store:
            times["save"].append(seconds(partial(store.save, Kept(cache), tokens, capacity=0, extra={}, unchanged=0)))
            files = sorted(folder.glob("page-*"))
            works = {"dd": partial(read_with_dd, files), "load": partial(store.load, Kept(cache), len(tokens))}
            for name, work in works.items():
                drop(files)
                times[f"{name}, cold"].append(seconds(work))
            for name, work in works.items():
                times[f"{name}, warm"].append(seconds(work))
            num_bytes = store.nbytes
        say(", ".join(f"{name} {runs[-1]:.2f} s" for name, runs in times.items()))
    return times, num_bytes


def row(name: str, times: dict[str, list[float]], num_bytes: int) -> list[str]:
    rates = Spread.of([num_bytes / run / 1e9 for run in times[name]])
    ratio = "-"
    if name.startswith("load"):
        pairs = zip(times[name.replace("load", "dd")], times[name], strict=True)
        ratio = f"{Spread.of([theirs / ours for theirs, ours in pairs]).median:.2f}"
    return [name, f"{rates.median:.2f}", f"{rates.least:.2f} to {rates.most:.2f}", ratio]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--folder", type=Path, help="where the session is written; default: the temporary folder")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--locked", action="store_true")
    args = parser.parse_args()
    if args.locked:
        lock_memory()
    cache = make_cache(args)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        times, num_bytes = measure(cache, Path(folder) / "session", args.repeats)
    cached = cache.nbytes() * args.tokens // (cache.shape.tokens * cache.shape.count(args.tokens))
    rows = [row(name, times, num_bytes) for name in times]
    into = ", into locked memory" if args.locked else ""
    title = f"a session of {args.tokens} tokens, {cached / 1e9:.2f} GB in {num_bytes / 1e9:.2f} GB of files{into}"
    measured = [{"what": name, "seconds": run} for name, runs in times.items() for run in runs]
    shared = about(title, 0, num_bytes=num_bytes, num_cached_bytes=cached)
    emit(["what", "GB/s", "range", "of dd"], rows, shared, measured)


if __name__ == "__main__":
    main()
