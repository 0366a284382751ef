"""Facts about this machine from the operating system. Nothing is measured."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
KERNELS = "TRIFORCE_KERNELS"  # in the environment: off, torch's operators run
# Of a CPU's many features, those that decide how fast products are. x86, then ARM.
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


@dataclass(frozen=True)
class Machine:
    """num_cores: logical ones that this process may use. Bytes; a container's limits count as the machine's."""

    system: str
    processor: str
    features: tuple[str, ...]
    num_cores: int
    host_bytes: int
    host_free_bytes: int
    memlock_bytes: int | None  # what the process may lock in memory; None: no limit
    numa_nodes: tuple[int, ...]
    usable_numa_nodes: tuple[int, ...]  # those with a core that this process may use


def look(root: Path = ROOT) -> Machine:
    nodes = dict(_numa_nodes(root))
    ours = _usable_cores()
    return Machine(
        system=platform.platform(terse=True),
        processor=_processor(root),
        features=_features(root),
        num_cores=len(ours),
        host_bytes=min(_memory(root)[0], number_in(root / "sys/fs/cgroup/memory.max") or 1 << 62),
        host_free_bytes=free_host_bytes(root),
        memlock_bytes=_memlock_bytes(),
        numa_nodes=tuple(sorted(nodes)),
        usable_numa_nodes=tuple(sorted(number for number, cores in nodes.items() if cores & ours)),
    )


def has_native_kernels(root: Path = ROOT) -> bool:
    """Whether the CPU's kernels were built for this CPU, and are wanted."""
    built = {path.stem for path in (Path(__file__).parents[1] / "kernels" / "native").glob("*.so")}
    own = {"avx2": "avx2", "asimd": "neon"}
    return os.environ.get(KERNELS) != "off" and any(own.get(name) in built for name in _features(root))


def machine_name(root: Path = ROOT) -> str:
    """A name that distinguishes this machine from others that share a home folder."""
    return f"{_processor(root)}, {os.cpu_count()} cores"


def free_host_bytes(root: Path = ROOT) -> int:
    """Bytes that can be allocated now, in a container (cgroup v2) with a limit no more than its own.

    Pages of files that have been read count as used there, and give way.
    """
    _, free = _memory(root)
    group = root / "sys/fs/cgroup"
    limit, used = number_in(group / "memory.max"), number_in(group / "memory.current")
    if limit is None or used is None:
        return free
    cached = re.findall(r"^(?:in)?active_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    return min(free, max(limit - used + sum(map(int, cached)), 0))


def _memory(root: Path) -> tuple[int, int]:
    """(all, available) bytes. The kernel says on Linux, where nothing else need be installed."""
    said = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE))
    if len(said) == 2:
        return 1024 * int(said["MemTotal"]), 1024 * int(said["MemAvailable"])
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _usable_cores() -> set[int]:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return affinity(0) if affinity else set(range(os.cpu_count() or 1))


def _processor(root: Path) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _features(root: Path) -> tuple[str, ...]:
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    present = set(found[1].split()) if found else set()
    return tuple(feature for feature in FEATURES if feature in present)


def _numa_nodes(root: Path) -> Iterator[tuple[int, set[int]]]:
    """(number, its cores) of each node."""
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        yield int(folder.name.removeprefix("node")), set(_core_list(_text(folder / "cpulist")))


def _core_list(text: str) -> Iterator[int]:
    """The cores of "0-3,8"."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


def _memlock_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def number_in(path: Path) -> int | None:
    """The whole number that the file holds; None where there is no file, or something else in it."""
    text = _text(path).strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _text(path: Path) -> str:
    """Nothing where there is no such file, as outside Linux."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def installed_version(package: str) -> str | None:
    """The version of a package that could be imported; it is not."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return "of unknown version"
