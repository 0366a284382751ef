"""`triforce models`: the models that can run, and how much of their context fits this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from offload.hub.names import models_folder
from triforce_cli import options
from triforce_cli.aliases import Aliases
from triforce_cli.choice import embedded_model
from triforce_cli.flags import ProgramFlags, spread
from triforce_cli.output import Output
from triforce_cli.render import models as render_models
from triforce_cli.render.models import Line, Named

if TYPE_CHECKING:
    from offload.hub.library import Entry


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
            from offload.hub.library import absent_aliases, entries, longest_context
            from offload.plan.hardware import probe

            hardware = probe(self.device)
            lines = [Line(entry, longest_context(entry, hardware)) for entry in [*_embedded(), *entries()]]
            named = [Named(name, model, self.aliases.problem(name)) for name, model in self.aliases.names.items()]
            absent = list(absent_aliases())
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


@spread
def models(
    context: typer.Context,
    *,
    device: options.Device = "auto",
    families: Families = False,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
    program: ProgramFlags,
) -> Listing:
    """List the stored models, their sizes, and how much context fits this machine; aliases; what can be pulled.

    Pulled and converted models are in the user's data folder, or in the folder that TRIFORCE_MODELS_DIR names. Aliases
    are those of the configuration file (triforce config set aliases.NAME MODEL).

    Example: triforce models --json
    """
    named = options.configuration_of(context).aliases()
    return Listing(device=device, families=families, aliases=named, as_json=json, quiet=quiet)


def _embedded() -> Iterator[Entry]:
    """The entries of the embedded pair."""
    from offload.hub.library import entry_of

    yield entry_of(embedded_model("demo-target"), "demo-target (embedded)", "demo-draft")
    yield entry_of(embedded_model("demo-draft"), "demo-draft (embedded)")
