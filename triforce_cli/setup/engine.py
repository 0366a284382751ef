"""Preparation of a command: the tokenizer and the plan, then the engine, and the session if one is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from triforce_cli import __version__
from triforce_cli.screen.output import Output
from triforce_cli.setup.choice import Models

if TYPE_CHECKING:
    from offload.decode.sampling import SamplingParams
    from offload.engine.engine import Engine
    from offload.plan.options import Options
    from offload.plan.planner import Plan
    from offload.plan.request import Request
    from offload.progress import OnProgress
    from offload.session.prefix_store import PrefixStore
    from offload.session.store import Store
    from offload.text.tokenizer import Tokenizer
    from triforce_cli.ground.inputs import Note


@dataclass(frozen=True)
class StoreSettings:
    """The settings of the prefix store. limit: its bytes; None: the store's own limit."""

    limit: int | None = None


@dataclass(frozen=True)
class Prepared:
    """Models whose weights are not loaded yet. request: makes plans for them on this machine. note: shows the person a
    line. busy_share: the share of the CPU that other programs use, where passes run on the CPU and no note was shown
    yet. store: of the prefix store; None: rows are neither read nor kept."""

    models: Models
    tokenizer: Tokenizer
    request: Request
    note: Note
    busy_share: float = 0.0
    store: StoreSettings | None = None

    def limited(self, context: int) -> Prepared:
        """The models, prepared for a shorter context of `context` tokens."""
        options = replace(self.request.options, context=context)
        return replace(self, request=replace(self.request, options=options))

    @property
    def prompt_tokenizer(self) -> Tokenizer:
        """The tokenizer for texts that have to fit the context: it gives up early on a text that is surely too long."""
        return self.tokenizer.limited(self.request.context)


@dataclass(frozen=True)
class Setup:
    """Models, the options of their plan, and the settings of the prefix store, if it is used. given: a plan to use."""

    models: Models
    options: Options
    given: Plan | None = None
    store: StoreSettings | None = None

    def prepare(self, output: Output, *, sampling: SamplingParams | None = None) -> Prepared:
        """Prepare the models; see the function `prepare`."""
        prepared = prepare(self.models, self.options, output, sampling=sampling, given=self.given)
        return replace(prepared, store=self.store)


def prepare(
    models: Models,
    options: Options,
    output: Output,
    *,
    sampling: SamplingParams | None = None,
    given: Plan | None = None,
    measures: bool = False,
) -> Prepared:
    """Name the models used, load the tokenizer and inspect the machine. On a CPU a model's passes are timed at its
    first use, unless a plan is given. measures: the command itself measures times.

    Raises ModelError and UsageError, also for parts of `sampling` that the model cannot do.
    """
    output.note(models.note)
    output.wait("starting")
    from triforce_cli.screen.busy import OtherPrograms, busy_note

    others = OtherPrograms()  # while torch is imported and the first passes are timed
    from offload.config.gguf import notes
    from offload.config.gguf_header import is_gguf, read_header
    from offload.engine.engine import disk_timed, kernels_problem, load_tokenizer, prefill_problem, timed
    from offload.engine.request import check_sampling
    from offload.machine import in_wsl, on_windows_drive, untested_versions
    from offload.plan.options import DTYPE_BYTES
    from offload.plan.request import Request

    tokenizer = load_tokenizer(models.target, models.draft)
    untimed = Request.on_this_machine(models.target, models.draft, options)
    if given is None and untimed.curves is None and untimed.hardware.is_cpu:
        output.wait("measuring this CPU, once")
    request = disk_timed(timed(untimed), models.target) if given is None else replace(untimed, given=given)
    looks_back = sampling is not None and check_sampling(sampling, request.target, tokenizer)
    device = "cpu" if request.hardware.is_cpu else "cuda"
    if looks_back and device == "cuda":
        output.note("what is written depends on the tokens before it: the GPU waits for the host after each pass")
    for model in filter(is_gguf, filter(None, (models.target, models.draft))):
        for note in notes(read_header(model), DTYPE_BYTES[request.dtype]):
            output.note(note)
    if in_wsl() and (slow := [str(model) for model in (models.target, models.draft) if on_windows_drive(model)]):
        output.note(f"{slow[0]} is on a Windows drive, which WSL 2 reads slowly: copy it to a folder of Linux")
    problems = [kernels_problem(device, config) for config in (request.target, request.draft) if config]
    for problem in dict.fromkeys(filter(None, problems)):
        output.note(f"slower than need be, on torch's operators: {problem}")
    if problem := untested_versions(device):
        output.note(problem)
    if problem := prefill_problem(device):
        output.note(f"prompts are read by torch's fused kernel: {problem}")
    share = others.share() if device == "cpu" else 0.0
    if measures or (untimed.curves is None and request.curves is not None):  # this CPU was measured just now
        output.note(busy_note(share))
        share = 0.0
    return Prepared(models, tokenizer, request, output.note, share)


@contextmanager
def open_engine(prepared: Prepared, plan: Plan, *, on_progress: OnProgress) -> Iterator[Engine]:
    """The engine for `plan`, with weights loaded; closed at the end. Raises ModelError, DoesNotFit."""
    from offload.engine.engine import Engine
    from triforce_cli.screen.busy import note_for_long

    models, settings = prepared.models, prepared.store
    prepared.note(note_for_long(prepared.busy_share, plan.predicted_seconds))

    def open_store(plan: Plan) -> PrefixStore:
        from offload.session.conditions import Conditions
        from offload.session.prefix_store import PrefixStore
        from offload.session.store_files import store_folder

        assert settings is not None
        conditions = Conditions.of(models.target, plan)
        return PrefixStore(store_folder(), conditions, limit=settings.limit, on_note=prepared.note)

    with Engine.load(
        plan,
        models.target,
        models.draft,
        prepared.tokenizer,
        open_store=None if settings is None else open_store,
        on_progress=on_progress,
    ) as engine:
        yield engine


def open_session(prepared: Prepared, plan: Plan, folder: Path, *, read_only: bool) -> Store:
    """The session in `folder`, locked until it is closed. Raises SessionError if other models or plans wrote it."""
    from offload.session.fingerprints import identity_of
    from offload.session.store import Store

    identity = identity_of(prepared.models.target, plan)
    return Store.open(folder, identity, read_only=read_only, writer=__version__)
