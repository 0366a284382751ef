"""`triforce models`: the models that can run, how much of their context fits this machine, and what they are stored
in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from offload.hub.names import models_folder
from offload.units import size
from triforce_cli.ground.text import counted
from triforce_cli.options import callbacks, completion, options
from triforce_cli.options.call import spread
from triforce_cli.options.consent import Yes, agreed
from triforce_cli.options.other_programs import Group
from triforce_cli.render import kinds as render_kinds
from triforce_cli.render import models as render_models
from triforce_cli.render.models import Absent, Line, Named
from triforce_cli.screen.output import Output
from triforce_cli.setup.choice import embedded_model

if TYPE_CHECKING:
    from offload.hub.library import Entry


class Models(Group):
    """The commands of `triforce models`; `triforce models NAME` shows a model."""

    default = "show"


models = typer.Typer(cls=Models, invoke_without_command=True)

Families = Annotated[
    bool, options.switch("--families", "List the families of models that run here instead.", options.OUTPUT)
]


@models.callback()
@spread
def listing(
    context: typer.Context,
    *,
    device: options.Device = "auto",
    families: Families = False,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """List the stored models, how much of their context fits this machine, aliases, and what can be pulled.

    Of one model, triforce models FILE lists the kinds of encoding that it is stored in.

    Pulled and converted models are in the user's data folder, or in the folder that TRIFORCE_MODELS_DIR names. Aliases
    are those of the configuration file (triforce config edit).

    Example: triforce models --json
    """
    aliases = callbacks.configuration_of(context).aliases()
    with Output(quiet=quiet) as output:
        if families:
            _list_families(output, as_json=json)
            return
        output.wait("looking")
        from offload.hub.library import absent_aliases, entries, has_room, longest_context
        from offload.speed.hardware import probe

        hardware = probe(device)
        lines = [Line(entry, longest_context(entry, hardware)) for entry in [*_embedded(), *entries()]]
        named = [Named(name, model, aliases.problem(name)) for name, model in aliases.names.items()]
        absent = [Absent(alias, has_room(alias, hardware)) for alias in absent_aliases()]
        if json:
            output.document(render_models.table_document(models_folder(), lines, named, absent, hardware))
        else:
            output.text(render_models.table(lines, named, absent, width=output.width))
            output.note(render_models.footnote(models_folder(), hardware))


@models.command()
@spread
def show(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE|FOLDER",
            help="A model as triforce models lists it, or any folder or GGUF file.",
            show_default=False,
            autocompletion=completion.models,
        ),
    ],
    *,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """List the kinds of encoding that a model's matrices are stored in, by bytes: a file's name tells one at most.

    Reads headers alone. The word show may be left out.

    Example: triforce models Qwen3-8B-Q4_K_M.gguf
    """
    model = callbacks.configuration_of(context).aliases().model(name)
    from offload.config.gguf_header import is_gguf, read_header
    from offload.config.kinds import kinds_of_config, kinds_of_header
    from offload.config.reading import read_config
    from offload.hub.library import locate

    path = locate(model, weights=False)
    kinds = kinds_of_header(read_header(path)) if is_gguf(path) else kinds_of_config(read_config(path))
    with Output(quiet=quiet) as output:
        if json:
            output.document(render_kinds.document(path, kinds))
        else:
            output.text(render_kinds.table(path, kinds))
            output.note(render_kinds.footnote(kinds))


@models.command()
@spread
def rm(
    context: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="As triforce models lists it.",
            show_default=False,
            autocompletion=completion.stored,
        ),
    ],
    *,
    yes: Yes = False,
    quiet: options.Quiet = False,
) -> None:
    """Remove stored models, those whose pull was interrupted too. Sessions, and models in other folders, stay.

    Example: triforce models rm llama-68m
    """
    aliases = callbacks.configuration_of(context).aliases()
    from offload.hub.removal import find_stored, remove

    found = tuple(dict.fromkeys(find_stored(aliases.path(name)[-1]) for name in names))
    with Output(quiet=quiet) as output:
        total = size(sum(model.num_bytes for model in found))
        question = f"remove {counted(len(found), 'model')}, {total}, for good?"
        if yes or agreed(output, question, render_models.stored(found)):
            for model in found:
                output.note(f"removed {model.name}, {size(remove(model))}")


def _list_families(output: Output, *, as_json: bool) -> None:
    from offload.config.families import KNOWN

    if as_json:
        output.document(render_models.families_document(KNOWN))
    else:
        output.text(render_models.families(KNOWN))


def _embedded() -> Iterator[Entry]:
    """The entries of the embedded pair."""
    from offload.hub.library import entry_of

    yield entry_of(embedded_model("demo-target"), "demo-target (embedded)", "demo-draft")
    yield entry_of(embedded_model("demo-draft"), "demo-draft (embedded)")
