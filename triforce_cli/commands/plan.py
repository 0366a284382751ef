"""`triforce plan`: the memory and time that a request needs, predicted from config.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from offload.errors import DoesNotFit, ModelError, UsageError
from triforce_cli.documents.prompt import read_prompt
from triforce_cli.documents.selection import Named
from triforce_cli.ground.text import duration
from triforce_cli.options import options
from triforce_cli.options.call import spread
from triforce_cli.options.flags import CacheFlags, DocumentFlags, ModelFlags, plan_options
from triforce_cli.options.options import number, option, switch, whole
from triforce_cli.screen.output import Output
from triforce_cli.setup.choice import Models

if TYPE_CHECKING:
    from offload.plan.options import Options
    from offload.plan.planner import Plan
    from offload.plan.request import Request
    from offload.speed.hardware import Hardware
    from triforce_cli.render.plan import Planned

MACHINE = "Machine (what is not given is taken from here, or assumed with --gpus)"

Fit = Annotated[bool, switch("--fit", "Plan the longest context that fits.", MACHINE)]
Gpus = Annotated[int | None, option("--gpus", "Plan for this many GPUs.", MACHINE, metavar="N", parser=whole)]
GpuMemory = Annotated[
    float | None,
    option("--gpu-memory", "Free memory of each GPU, in 10^9 bytes.", MACHINE, metavar="GB", parser=number),
]
HostMemory = Annotated[
    float | None,
    option("--host-memory", "Free memory of the host, in 10^9 bytes.", MACHINE, metavar="GB", parser=number),
]
PlannedLink = Annotated[
    float | None,
    option(
        "--link-gbps",
        "Bandwidth between host and each GPU, in 10^9 bytes per second: 25 for PCIe 4.0 x16, 12.5 for x8.",
        MACHINE,
        metavar="GB/S",
        parser=number,
    ),
]
HostGbps = Annotated[
    float | None,
    option(
        "--host-gbps",
        "Bandwidth of host memory, which all links share, in 10^9 bytes per second: some 42 for two channels of "
        "DDR4-3200, 72 of DDR5-5600, 165 for a server's eight.",
        MACHINE,
        metavar="GB/S",
        parser=number,
    ),
]


@dataclass(frozen=True, kw_only=True)
class MachineFlags:
    """The machine to plan for: the named GPUs, or this machine without `gpus` or with `device`."""

    gpus: Gpus = None
    gpu_memory: GpuMemory = None
    host_memory: HostMemory = None
    link_gbps: PlannedLink = None
    host_gbps: HostGbps = None
    device: options.Device = "auto"

    def check(self) -> None:
        """Raises UsageError."""
        if self.gpus is not None and self.gpus not in (1, 2, 4, 8):
            raise UsageError(f"gpus is {self.gpus}, it must be 1, 2, 4 or 8")
        for name in ("gpu_memory", "host_memory", "link_gbps", "host_gbps"):
            if (value := getattr(self, name)) is not None and not 0.001 <= value <= 1e6:
                raise UsageError(f"{name.replace('_', '-')} is {value}, it must be from 0.001 to 1000000")

    def hardware(self) -> Hardware:
        """The machine's hardware. Raises UsageError."""
        from offload.speed.hardware import Hardware, probe
        from offload.speed.rates import typical

        number = self.gpus or 1
        if self.assumed:
            assumed = Hardware("cuda:0", "RTX 4090", 24 * 10**9, 128 * 10**9, True, typical(number), number)
            return self._changed(assumed)
        here = probe(self.device, number)
        for name, given in (("gpu-memory", self.gpu_memory), ("host-gbps", self.host_gbps)):
            if here.is_cpu and given is not None:
                raise UsageError(f"{name} is about GPUs and {_without_gpus(self.device)}")
        return self._changed(here)

    @property
    def assumed(self) -> bool:
        """True for assumed GPUs, which need not exist here."""
        return self.gpus is not None and self.device == "auto"

    def _changed(self, hardware: Hardware) -> Hardware:
        """`hardware` with the user's changes."""
        if self.gpu_memory is not None:
            hardware = replace(hardware, device_free_bytes=int(self.gpu_memory * 1e9))
        if self.host_memory is not None:
            hardware = replace(hardware, host_free_bytes=int(self.host_memory * 1e9))
        if self.link_gbps is not None:
            speed = self.link_gbps * 1e9
            hardware = replace(hardware, rates=replace(hardware.rates, to_device=speed, to_host=speed))
        if self.host_gbps is not None:
            hardware = replace(hardware, rates=replace(hardware.rates, links=self.host_gbps * 1e9))
        return hardware


@spread
def plan(
    *,
    models: ModelFlags,
    documents: DocumentFlags,
    cache: CacheFlags,
    max_tokens: options.MaxTokens = 256,
    fit: Fit = False,
    machine: MachineFlags,
    dtype: options.Dtype = "auto",
    offload: options.Offload = "auto",
    link_bits: options.LinkBits = "auto",
    cpu_experts: options.CpuExperts = None,
    json: options.AsJson = False,
) -> None:
    """Show the memory that a context needs on device and host, the traffic over the link, and the predicted speed.

    Reads config.json alone, and with --prompt-file the tokenizer; nothing else is loaded and nothing is measured.
    Without --gpus it plans for this machine; with it, for that many GPUs of 24 GB on links of 25 GB/s with 128 GB of
    host memory at 72 GB/s (165 for more than two GPUs), unless you say otherwise; with --device cuda as well, for that
    many GPUs of this machine, with --device cpu for that many processes here.
    Exit code 3 when the context does not fit; the message names the nearest changes that would make it fit.

    Example: triforce plan --model yarn-llama-2-13b-128k --draft llama-68m --context 120000 --gpus 2
    """
    options.check_max_tokens(max_tokens)
    machine.check()
    if fit and cache.context is not None:
        raise UsageError(f"--fit looks for the longest context and --context says {cache.context}; give one of them")
    named = documents.named()
    if named and (fit or cache.context is not None):
        raise UsageError("--prompt-file is what to plan for, and so are --fit and --context; give one of them")
    chosen = models.chosen(weights=False)
    wanted = plan_options(cache, dtype=dtype, offload=offload, link_bits=link_bits, cpu_experts=cpu_experts)
    from offload.config.gguf import notes
    from offload.config.gguf_header import is_gguf, read_header
    from offload.plan.options import DTYPE_BYTES
    from triforce_cli.render import plan as render_plan

    with Output() as output:
        output.note(chosen.draft_note)
        tokens = _prompt_tokens(named, chosen, output)
        num_prompt_tokens = None if tokens is None else len(tokens)
        planned = _planned(_request(chosen, wanted, machine), chosen, machine, num_prompt_tokens, max_tokens, fit=fit)
        for model in filter(is_gguf, filter(None, (chosen.target, chosen.draft))):
            for note in notes(read_header(model), DTYPE_BYTES[planned.request.dtype]):
                output.note(note)
        if json:
            output.document(render_plan.document(planned))
        else:
            output.show(render_plan.report(planned, width=output.text_width))
        if tokens is not None and not machine.assumed:
            output.note(_stored(chosen.target, planned.plan, tokens))


def _prompt_tokens(documents: Named, models: Models, output: Output) -> list[int] | None:
    """The tokens of the documents, by the model's tokenizer; None if no documents are named."""
    if not documents:
        return None
    prompt = read_prompt(documents, None, note=output.note, on_read=output.report).text
    from offload.text.tokenizer import Tokenizer

    return Tokenizer.from_folder(models.target).encode(prompt)


def _request(models: Models, wanted: Options, machine: MachineFlags) -> Request:
    from offload.plan.request import Request

    hardware = machine.hardware()
    request = Request.of(models.target, models.draft, wanted, hardware)  # with what was measured of this machine
    return replace(request, curves=None, hardware=hardware) if machine.assumed else request


def _planned(
    request: Request,
    models: Models,
    machine: MachineFlags,
    num_prompt_tokens: int | None,
    max_tokens: int,
    *,
    fit: bool,
) -> Planned:
    """The plan for a prompt of so many tokens, or for a whole context. fit: the longest context that fits."""
    from offload.plan.what_if import in_16_bits
    from triforce_cli.render.plan import Planned

    longest = request.longest_context() if fit else None
    if num_prompt_tokens is None:
        context = request.context if longest is None else max(longest, max_tokens + 1)
        if max_tokens >= context:
            raise UsageError(f"max-tokens is {max_tokens}, it must be less than the context of {context}")
        num_prompt_tokens = context - max_tokens
    sizes = {"num_prompt_tokens": num_prompt_tokens, "max_tokens": max_tokens}
    try:
        plan = request.plan(**sizes)
    except DoesNotFit as error:
        raise DoesNotFit(_with_remedies(str(error), request, sizes)) from error
    return Planned(
        model=models.target,
        request=request,
        plan=plan,
        link_given=machine.link_gbps is not None,
        host_given=machine.host_gbps is not None,
        longest_context=longest,
        in_16_bits=in_16_bits(request, plan, **sizes),
    )


def _stored(target: Path, plan: Plan, tokens: Sequence[int]) -> str:
    """A note on the part of the prompt that the prefix store has; "" if none, or if there are no weights here."""
    from offload.session.store_files import store_folder, summaries

    if not summaries(store_folder()):
        return ""
    from offload.config.reading import read_config
    from offload.session.conditions import Conditions
    from offload.session.needs import needs_of
    from offload.session.prefix_store import PrefixStore

    try:
        conditions = Conditions.of(target, plan)
    except ModelError:
        return ""
    store = PrefixStore(store_folder(), conditions, on_note=lambda line: None)
    needs = needs_of(plan, read_config(target))
    stored = store.stored(needs, tokens[: max(len(tokens) - plan.placement.rows, 0)])
    if not stored.num_tokens:
        return ""
    seconds = duration(store.read_seconds(stored))
    return f"{stored.num_tokens:,} of {len(tokens):,} prompt tokens are in the store, which reads them in {seconds}"


def _with_remedies(message: str, request: Request, sizes: Mapping[str, int]) -> str:
    from offload.plan.what_if import remedies

    found = remedies(request, **sizes)
    return f"{message}; it would fit with {', or with '.join(found)}" if found else message


def _without_gpus(device: str) -> str:
    if device == "cpu":
        return "--device is cpu; leave that out to plan for GPUs"
    return "this machine has none; add --gpus 1 to plan for one"
