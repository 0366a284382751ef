"""`triforce start`, and `triforce` alone at a terminal: models that suit this machine, and one key to fetch one and
chat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from offload.errors import ModelError
from triforce_cli.chat.keys import pressed
from triforce_cli.options import callbacks, options
from triforce_cli.options.call import spread
from triforce_cli.options.flags import number_of_gpus
from triforce_cli.screen.output import Output
from triforce_cli.settings import tree
from triforce_cli.settings.configuration import origin
from triforce_cli.setup.choice import choose_models

if TYPE_CHECKING:
    from offload.config.model import ModelConfig
    from offload.hub.offers import Offer
    from offload.hub.starters import Starter
    from offload.speed.hardware import Hardware
    from triforce_cli.render.start import Found

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A model that is here, as a candidate of offers (offload/hub/offers.py)."""

    name: str
    form: str
    num_bytes: int
    model: str
    config: ModelConfig
    draft: ModelConfig | None
    pull: tuple[str, ...] = ()


@spread
def start(
    context: typer.Context,
    *,
    device: options.Device = "auto",
    gpus: options.Gpus = "1",
    json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Look at this machine, list the models that suit it best by their plans, and by one key fetch one and chat.

    triforce alone at a terminal does the same. Models that are here come first, the configured one before all, then the
    largest of a table that are predicted to write as fast as one reads. Nothing is fetched before a key is pressed, and
    the same key takes a broken download up again.

    Example: triforce start
    """
    with Output(quiet=quiet) as output:
        output.wait("looking at this machine")
        from offload.hub.offers import CONTEXT
        from offload.speed.hardware import probe
        from triforce_cli.render import start as render_start

        found = _found(probe(device, number_of_gpus(gpus)), _configured(context), output)
        if json:
            output.document(render_start.document(found, context=CONTEXT))
            return
        output.text(render_start.page(found, context=CONTEXT, width=output.width))
        if not found.offers:
            return
        if not output.is_dialogue:
            output.note(render_start.next_commands(found.offers[0]))
            return
        keys = [str(number) for number in range(1, len(found.offers) + 1)]
        key = pressed(keys, output, render_start.question(found))
        output.note(key or "q", urgent=True)
    if key:
        placed = ("--device", device, "--gpus", gpus)
        for command, *words in render_start.commands(found.offers[int(key) - 1]):
            _run(context, [command, *words, *(placed if command == "chat" else ())])


def _configured(context: typer.Context) -> str:
    """The model that `triforce chat` has from the environment or the configuration file; "" for none."""
    commands: Any = context.find_root().command
    command, configuration = commands.commands["chat"], callbacks.configuration_of(context)
    model, _ = origin(tree.options(command)["model"], configuration.of(("chat",), command), configuration.file)
    return configuration.aliases().model(str(model)) if model else ""


def _found(hardware: Hardware, configured: str, output: Output) -> Found:
    """The machine and its offers. configured: the model that comes first; where it cannot be used, a note says why."""
    from offload.hub.disk import free_bytes
    from offload.hub.library import entries
    from offload.hub.names import models_folder
    from offload.hub.offers import offer_of, offers
    from offload.hub.starters import STARTERS
    from offload.plan.request import Request
    from triforce_cli.render.start import Found

    measured = Request.with_known_curves
    first: list[Offer] = []
    if configured:
        try:
            offer = offer_of(_stored(configured), hardware, request_of=measured)
            first = [offer] if offer else []
        except ModelError as error:
            output.note(f"the configured model: {error}")
    names = [entry.name for entry in entries() if entry.state == "whole" and not entry.problem]
    others = [each for each in map(_stored, names) if each.model not in {offer.candidate.model for offer in first}]
    others.sort(key=lambda each: -each.config.num_parameters())
    missing = [starter for starter in STARTERS if not _path(starter).is_file()]
    return Found(
        hardware=hardware,
        folder=models_folder(),
        disk_free_bytes=free_bytes(models_folder()),
        stored=[*first, *offers(others, hardware, request_of=measured)],
        fetched=offers(missing, hardware, request_of=measured),
    )


def _stored(name: str) -> Stored:
    """The model that --model NAME stands for. Raises ModelError."""
    from offload.config.gguf_header import is_gguf, parts
    from offload.config.reading import draft_config, read_config
    from offload.hub.starters import STARTERS

    models = choose_models(Path(name), None)
    target, config = models.target, read_config(models.target)
    starter = next((each for each in STARTERS if _path(each) == target), None)
    files = parts(target) if is_gguf(target) else target.iterdir()
    return Stored(
        name=starter.name if starter else name,
        form=starter.form if starter else ", ".join(config.stored_in) or _DTYPES[config.dtype],
        num_bytes=sum(file.stat().st_size for file in files if file.is_file()),
        model=name,
        config=config,
        draft=None if models.draft is None else draft_config(models.draft, target),
    )


def _path(starter: Starter) -> Path:
    from offload.hub.names import model_folder

    return model_folder(starter.repository) / starter.file


def _run(context: typer.Context, words: list[str]) -> None:
    """Run another command of the program, as if its words had been typed."""
    program: Any = context.find_root().command
    program.main(args=words, prog_name="triforce", standalone_mode=False)()
