"""`triforce models`: the models that can run, and how much of their context fits this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from offload.errors import UsageError
from offload.hub.names import models_folder
from offload.units import size
from triforce_cli.ground.text import counted
from triforce_cli.options import completion, options
from triforce_cli.options.consent import Yes, agreed
from triforce_cli.options.flags import ProgramFlags, spread
from triforce_cli.options.other_programs import Group
from triforce_cli.render import models as render_models
from triforce_cli.render.models import Absent, Line, Named
from triforce_cli.screen.output import Output
from triforce_cli.settings.aliases import Aliases
from triforce_cli.setup.choice import embedded_model

if TYPE_CHECKING:
    from offload.hub.library import Entry
    from offload.hub.removal import Stored


models = typer.Typer(cls=Group, invoke_without_command=True)

Families = Annotated[
    bool, options.switch("--families", "List the families of models that run here instead.", options.OUTPUT)
]


@dataclass(frozen=True, kw_only=True)
class Listing:
    """One `triforce models`, parsed."""

    device: str
    families: bool
    aliases: Aliases
    as_json: bool
    quiet: bool

    def run(self) -> None:
        """List the models. The line of an unusable model has the reason."""
        with Output(quiet=self.quiet) as output:
            if self.families:
                self._list_families(output)
                return
            output.wait("looking")
            from offload.hub.library import absent_aliases, entries, has_room, longest_context
            from offload.speed.hardware import probe

            hardware = probe(self.device)
            lines = [Line(entry, longest_context(entry, hardware)) for entry in [*_embedded(), *entries()]]
            named = [Named(name, model, self.aliases.problem(name)) for name, model in self.aliases.names.items()]
            absent = [Absent(alias, has_room(alias, hardware)) for alias in absent_aliases()]
            if self.as_json:
                output.document(render_models.table_document(models_folder(), lines, named, absent, hardware))
            else:
                output.text(render_models.table(lines, named, absent, width=output.width))
                output.note(render_models.footnote(models_folder(), hardware))

    def _list_families(self, output: Output) -> None:
        from offload.config.families import KNOWN

        if self.as_json:
            output.document(render_models.families_document(KNOWN))
        else:
            output.text(render_models.families(KNOWN))


@dataclass(frozen=True, kw_only=True)
class Removal:
    """One `triforce models rm`, parsed. models: distinct."""

    models: tuple[Stored, ...]
    yes: bool
    quiet: bool

    def run(self) -> None:
        from offload.hub.removal import remove

        with Output(quiet=self.quiet) as output:
            table = render_models.stored(self.models)
            total = size(sum(model.num_bytes for model in self.models))
            if self.yes or agreed(output, f"remove {counted(len(self.models), 'model')}, {total}, for good?", table):
                for model in self.models:
                    output.note(f"removed {model.name}, {size(remove(model))}")


@models.callback()
@spread
def listing(
    context: typer.Context,
    *,
    device: options.Device = "auto",
    families: Families = False,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
    program: ProgramFlags,
) -> Listing:
    """List the stored models, how much of their context fits this machine, aliases, and what can be pulled.

    Pulled and converted models are in the user's data folder, or in the folder that TRIFORCE_MODELS_DIR names. Aliases
    are those of the configuration file (triforce config edit).

    Example: triforce models --json
    """
    if context.invoked_subcommand is not None:
        _check_is_bare(context)
    named = options.configuration_of(context).aliases()
    return Listing(device=device, families=families, aliases=named, as_json=json, quiet=quiet)


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
    program: ProgramFlags,
) -> Removal:
    """Remove stored models, those whose pull was interrupted too. Sessions, and models in other folders, stay.

    Example: triforce models rm llama-68m
    """
    aliases = options.configuration_of(context).aliases()
    from offload.hub.removal import find_stored

    found = dict.fromkeys(find_stored(aliases.path(name)[-1]) for name in names)
    return Removal(models=tuple(found), yes=yes, quiet=quiet)


def _check_is_bare(context: typer.Context) -> None:
    """Raises UsageError for options of the listing before the name of another command, which would not heed them."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            command = f"triforce models {context.invoked_subcommand}"
            raise UsageError(f"{parameter.opts[0]} stands before {context.invoked_subcommand}; put it behind {command}")


def _embedded() -> Iterator[Entry]:
    """The entries of the embedded pair."""
    from offload.hub.library import entry_of

    yield entry_of(embedded_model("demo-target"), "demo-target (embedded)", "demo-draft")
    yield entry_of(embedded_model("demo-draft"), "demo-draft (embedded)")
