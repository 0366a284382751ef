"""The report of `triforce doctor`: sections of short lines that fit any terminal, and the report as one JSON object."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from offload.units import size
from triforce_cli import __version__
from triforce_cli.ground.text import duration, gigabytes, latency, significant
from triforce_cli.render.advice import advice

if TYPE_CHECKING:
    from offload.bench.checks import Check
    from offload.bench.diagnosis import Diagnosis, Gpu, LinkRates, Record, Software
    from offload.machine import Driver
    from offload.plan.planner import Plan
    from offload.plan.what_if import Expectation

MIN_WIDTH, MAX_WIDTH = 40, 100  # columns

Row = tuple[str, str]


def report(
    diagnosis: Diagnosis,
    checks: Sequence[Check],
    expected: Sequence[Expectation],
    *,
    width: int,
    disk: float | None = None,
) -> str:
    """The whole text, with no line longer than `width` columns (40 at least). disk: bytes per second that the disk of
    the models gives."""
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    sections = [
        ("machine", _machine(diagnosis)),
        ("CPU, measured", _processor(diagnosis)),
        ("disk of the models, measured", [] if disk is None else [("direct reads", f"{gigabytes(disk)}/s")]),
        *((gpu.device, list(_gpu(gpu))) for gpu in diagnosis.gpus),
        ("GPUs together", list(_together(diagnosis))),
        ("software", software_rows(diagnosis.software, diagnosis.driver)),
        *((f"{device}, checked", _checked(checks, device)) for device in diagnosis.devices),
        (f"to expect on {diagnosis.device}, predicted", [_expectation(e) for e in expected]),
        ("advice", [("", line) for line in advice(diagnosis) or ["nothing to improve was found"]]),
    ]
    return "\n".join(_section(title, rows, width) for title, rows in sections if rows)


def document(
    diagnosis: Diagnosis,
    checks: Sequence[Check],
    expected: Sequence[Expectation],
    record: Record,
    disk: float | None = None,
) -> dict[str, Any]:
    """The report as JSON, in bytes, bytes per second and operations per second."""
    return {
        "version": __version__,
        **diagnosis.as_dict(),
        "disk": disk,
        "rates": {device: vars(rates) for device, rates in diagnosis.rates.items()},
        "checks": [{**vars(check), "passed": check.passed} for check in checks],
        "expected": [expectation.as_dict() for expectation in expected],
        "advice": advice(diagnosis),
        "record": vars(record),
    }


def failure(checks: Sequence[Check]) -> str:
    """The line that names the failed checks; "" if none failed."""
    failed = [f"{check.device}: {check.name}" for check in checks if not check.passed]
    return f"{len(failed)} of {len(checks)} checks failed: {'; '.join(failed)}" if failed else ""


def kept(record: Record) -> str:
    """The line with the place of the stored rates."""
    if record.problem:
        return (
            f"rates not kept for the planner: {record.path} cannot be written ({record.problem}); "
            "set TRIFORCE_CACHE_DIR to a folder that can be"
        )
    return f"rates kept for the planner in {record.path}"


def _section(title: str, rows: Sequence[Row], width: int) -> str:
    """A title, and rows whose values are wrapped beside their labels; without labels, a list of points."""
    column = max(len(label) for label, _ in rows)
    lines = [title]
    for label, value in rows:
        first = f"  {label:<{column}}  " if column else "  - "
        lines += textwrap.wrap(value, width, initial_indent=first, subsequent_indent=" " * len(first))
    return "\n".join(lines) + "\n"


def _machine(diagnosis: Diagnosis) -> list[Row]:
    host = diagnosis.machine
    nodes = len(host.numa_nodes)
    numa = "unknown" if not nodes else f"{nodes} node{'s' * (nodes > 1)}"
    pin = "none" if host.memlock_bytes is None else size(host.memlock_bytes)
    bf16 = "fast" if diagnosis.processor.fast_bf16 else "not fast, fp32 is used"
    gpus = [f"{gpu.device} {gpu.name}" for gpu in diagnosis.gpus]
    return [
        ("system", f"{host.system}, in Windows (WSL 2)" if host.in_wsl else host.system),
        ("CPU", f"{host.processor}, {host.num_cores} cores, {diagnosis.processor.num_threads} threads used"),
        ("bf16", f"{bf16}; {', '.join(host.features) or 'features unknown'}"),
        ("memory", f"{gigabytes(host.host_bytes)}, {gigabytes(host.host_free_bytes)} free"),
        ("NUMA", numa),
        ("pin limit", f"{pin} (memlock)"),
        ("GPUs", ", ".join(gpus) or "none"),
    ]


def _processor(diagnosis: Diagnosis) -> list[Row]:
    cpu = diagnosis.processor
    dtype = "bf16" if cpu.fast_bf16 else "fp32"
    return [
        ("DRAM read", f"{gigabytes(cpu.read)}/s; weights in {dtype} products {gigabytes(cpu.weights_read)}/s"),
        ("copies", f"{_link(cpu.link)}, one thread each way"),
        ("products", f"bf16 {_flops(cpu.bf16_flops)}, fp32 {_flops(cpu.fp32_flops)}"),
    ]


def _gpu(gpu: Gpu) -> Iterator[Row]:
    yield "GPU", f"{gpu.name}, compute capability {gpu.compute_capability}" if gpu.compute_capability else gpu.name
    yield "memory", f"{gigabytes(gpu.total_bytes)}, {gigabytes(gpu.free_bytes)} free"
    if gpu.pcie is None:
        yield "PCIe", "unknown: the driver does not tell"
    else:
        link = gpu.pcie
        node = "" if link.numa_node is None else f", NUMA node {link.numa_node}"
        best = f"{link.max_generation}.0 x{link.max_width}"
        yield "PCIe", f"{link.generation}.0 x{link.width}, the GPU can do {best}; at {link.address}{node}"
    if gpu.rates is None:
        yield "measured", f"nothing: {gpu.problem}"
        return
    yield "copies", f"{_link(gpu.rates.link)}, pinned"
    yield "read", f"{gigabytes(gpu.rates.read)}/s; weights in products {gigabytes(gpu.rates.weights_read)}/s"
    yield "products", f"{_flops(gpu.rates.flops)} at 16 bits"


def _together(diagnosis: Diagnosis) -> Iterator[Row]:
    if len(diagnosis.gpus) < 2:
        return
    yield "copies", "not measured" if diagnosis.together is None else f"{_link(diagnosis.together)}, added up"
    pairs = [f"{gpu.device} to {peer}" for gpu in diagnosis.gpus for peer in gpu.peers]
    yield "peer access", ", ".join(pairs) or "none: what one GPU sends another goes through host memory"


def _checked(checks: Sequence[Check], device: str) -> list[Row]:
    """The passed checks, a row for each kind, and each failed check."""
    kinds: dict[str, list[Check]] = {}
    for check in checks:
        if check.device == device:
            kinds.setdefault(check.name.partition(",")[0], []).append(check)
    rows = [(kind, _held(found)) for kind, found in kinds.items()]
    failed = [check for found in kinds.values() for check in found if not check.passed]
    return [*rows, *(("FAILED", f"{check.name}: {check.found}. {check.problem}") for check in failed)]


def _held(checks: Sequence[Check]) -> str:
    failed = sum(not check.passed for check in checks)
    return f"WRONG, {failed} of {len(checks)}" if failed else f"right, {len(checks)} of {len(checks)}"


def software_rows(software: Software, driver: Driver | None) -> list[Row]:
    """Rows of the installed libraries and of those in use."""
    cuda = "no CUDA" if software.torch_cuda is None else f"CUDA {software.torch_cuda}"
    kernels = f"{software.kernels}, for the CPU" if software.kernels else f"none: {software.kernels_problem}"
    unused = software.flash_attn and "flash-attn" not in software.attention
    flash = f"; flash-attn {software.flash_attn} found, for GPUs only" if unused else ""
    return [
        ("triforce", f"{__version__}, Python {software.python}, transformers {software.transformers}"),
        ("torch", f"{software.torch}, built with {cuda}" if software.torch_cuda else f"{software.torch}, {cuda}"),
        ("driver", f"{driver.version}, for CUDA up to {driver.cuda}" if driver else "no NVIDIA driver"),
        ("attention", f"{software.attention}{flash}"),
        ("kernels", kernels),
    ]


def _expectation(expectation: Expectation) -> Row:
    label = f"{expectation.model} {expectation.context // 1024}K"
    if expectation.plan is not None:
        return label, _prediction(expectation.plan)
    _, needs, amounts = expectation.problem.partition("needs ")  # the text before it repeats the label
    return label, f"does not fit: {needs}{amounts}" if needs else expectation.problem


def _prediction(plan: Plan) -> str:
    seconds = plan.predicted
    plain = f", plain {latency(seconds.plain_seconds_per_token)}" if len(plan.composition.levels) > 1 else " (plain)"
    sizes = f"device {gigabytes(plan.placement.total_device_bytes)}"
    if plan.placement.host_bytes:
        sizes += f", host {gigabytes(plan.placement.total_host_bytes)} ({', '.join(plan.placement.offload)})"
    return (
        f"{latency(seconds.seconds_per_token)} a token{plain}, the first after "
        f"{duration(seconds.first_token_seconds)}; {sizes}"
    )


def _link(link: LinkRates) -> str:
    to_host, both = significant(link.to_host / 1e9), significant(link.both / 1e9)
    return f"{gigabytes(link.to_device)}/s to device, {to_host} to host, {both} both at once"


def _flops(per_second: float) -> str:
    if per_second >= 1e12:
        return f"{significant(per_second / 1e12)} TFLOP/s"
    return f"{significant(per_second / 1e9)} GFLOP/s"
