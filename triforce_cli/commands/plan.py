"""`triforce plan`: what a request would take, from config.json alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import DoesNotFit, UsageError
from triforce_cli import __version__, options
from triforce_cli.output import Output

if TYPE_CHECKING:
    from offload.plan.hardware import Hardware
    from offload.plan.options import Options
    from offload.plan.remedies import Request


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What to plan for: the cards named, or, without `gpus`, this machine. GB are 10^9 bytes."""

    gpus: int | None
    gpu_memory: float | None
    host_memory: float | None
    link_gbps: float | None
    device: str

    def hardware(self) -> Hardware:
        from offload.plan.hardware import Hardware, probe
        from offload.plan.rates import RTX_4090

        if self.gpus is None:
            return self._changed(probe(self.device))
        assumed = Hardware("cuda:0", "RTX 4090", 24 * 10**9, 128 * 10**9, True, RTX_4090, self.gpus)
        return self._changed(assumed)

    def _changed(self, hardware: Hardware) -> Hardware:
        """With what the user says instead of what is there or assumed."""
        if self.gpu_memory is not None:
            hardware = replace(hardware, device_free_bytes=int(self.gpu_memory * 1e9))
        if self.host_memory is not None:
            hardware = replace(hardware, host_free_bytes=int(self.host_memory * 1e9))
        if self.link_gbps is not None:
            speed = self.link_gbps * 1e9
            hardware = replace(hardware, rates=replace(hardware.rates, to_device=speed, to_host=speed))
        return hardware


@dataclass(frozen=True, kw_only=True)
class Planning:
    """One `triforce plan`, parsed."""

    model: Path
    draft: Path | None
    machine: Machine
    options: Options
    max_tokens: int
    as_json: bool

    def run(self) -> None:
        """Plan and say so. Reads config.json and nothing else of a model."""
        from triforce_cli import render_plan

        output = Output(quiet=True)
        with output:
            request = self._request()
            try:
                plan = request.plan()
            except DoesNotFit as error:
                raise DoesNotFit(_with_remedies(str(error), request)) from error
            if self.as_json:
                output.document({"plan": plan.as_dict(), "model": str(self.model), "version": __version__})
            else:
                output.text(render_plan.report(plan, request.target, request.hardware, name=self.model.name))

    def _request(self) -> Request:
        from offload.plan.config import ModelConfig
        from offload.plan.remedies import Request

        target = ModelConfig.from_folder(self.model)
        draft = ModelConfig.from_folder(self.draft) if self.draft is not None and self.options.speculation else None
        context = self.options.context or target.context_limit
        if self.max_tokens >= context:
            raise UsageError(f"max-tokens is {self.max_tokens}, it must be less than the context of {context}")
        return Request(target, draft, self.options, self.machine.hardware(), context - self.max_tokens, self.max_tokens)


def plan(
    *,
    model: options.Model = None,
    draft: options.Draft = None,
    context: options.Context = None,
    max_tokens: options.MaxTokens = 256,
    gpus: options.Gpus = None,
    gpu_memory: options.GpuMemory = None,
    host_memory: options.HostMemory = None,
    link_gbps: options.PlannedLink = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    offload: options.Offload = "auto",
    budget: options.Budget = None,
    chunk: options.Chunk = None,
    gamma: options.Gamma = None,
    draft_gamma: options.DraftGamma = None,
    no_lookup: options.NoLookup = False,
    no_speculation: options.NoSpeculation = False,
    json: options.AsJson = False,
    debug: options.Debug = False,
) -> Planning:
    """What a context of that length would take: where every byte goes, what streams, how fast it would be.

    Reads config.json alone; nothing is loaded and nothing is measured. Seconds are predictions. Without --gpus it plans
    for this machine; with it, for that many cards of 24 GB on links of 25 GB/s with 128 GB of host memory, unless you
    say otherwise. Exit code 3 when it does not fit, with the nearest changes that would.

    Example: triforce plan --model Yarn-Llama-2-13b-128k --draft llama-68m --context 120000 --gpus 2
    """
    from offload.plan.options import Options

    options.check_max_tokens(max_tokens)
    options.check_machine(gpus, gpu_memory, host_memory, link_gbps)
    models = options.choose_models(model, draft)
    return Planning(
        model=models.target,
        draft=models.draft,
        machine=Machine(gpus=gpus, gpu_memory=gpu_memory, host_memory=host_memory, link_gbps=link_gbps, device=device),
        options=Options(
            context=context,
            budget=budget,
            chunk=chunk,
            gamma=gamma,
            draft_gamma=draft_gamma,
            lookup=not no_lookup,
            dtype=dtype,
            offload=options.offloaded(offload),
            speculation=not no_speculation,
        ),
        max_tokens=max_tokens,
        as_json=json,
    )


def _with_remedies(message: str, request: Request) -> str:
    from offload.plan.remedies import remedies

    found = remedies(request)
    return f"{message}; it would fit with {', or with '.join(found)}" if found else message
