"""`triforce store`: what the prefix store keeps of prompts on the disk, and its removal."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from offload.session.store_files import clear as clear_store
from offload.session.store_files import store_folder, summaries
from offload.units import size
from triforce_cli import options
from triforce_cli.elsewhere import Group
from triforce_cli.flags import ProgramFlags, spread
from triforce_cli.output import Output
from triforce_cli.render import store as render_store

store = typer.Typer(
    cls=Group, no_args_is_help=True, help="Look at what is kept of long prompts (--no-store), or remove it."
)


@dataclass(frozen=True, kw_only=True)
class Showing:
    """One `triforce store show`, parsed."""

    as_json: bool
    quiet: bool

    def run(self) -> None:
        folder, found = store_folder(), summaries(store_folder())
        with Output(quiet=self.quiet) as output:
            if self.as_json:
                output.document(render_store.document(folder, found))
            elif found:
                output.text(render_store.table(found))
                output.note(render_store.footnote(folder, found))
            else:
                output.note(f"nothing is kept in {folder}; ask, generate and chat keep what they read of long prompts")


@dataclass(frozen=True, kw_only=True)
class Clearing:
    """One `triforce store clear`, parsed."""

    quiet: bool

    def run(self) -> None:
        with Output(quiet=self.quiet) as output:
            removed = clear_store(store_folder())
            output.note(f"removed {size(removed)} from {store_folder()}")


@store.command()
@spread
def show(*, json: options.AsJson = False, quiet: options.Quiet = False, program: ProgramFlags) -> Showing:
    """Show what is kept of long prompts, by model: tokens, size, last use.

    Every command that reads a prompt of a thousand tokens or more keeps what it computes of it, and no later prompt
    that begins alike is computed again. It is in the user's cache folder, or in the folder that TRIFORCE_CACHE_DIR
    names; what was not used for the longest time goes first.

    Example: triforce store show --json
    """
    return Showing(as_json=json, quiet=quiet)


@store.command()
@spread
def clear(*, quiet: options.Quiet = False, program: ProgramFlags) -> Clearing:
    """Remove all that is kept of prompts. The next one is read again, and kept again (--no-store).

    It holds the prompts' content in the model's own numbers. Sessions and models stay.

    Example: triforce store clear
    """
    return Clearing(quiet=quiet)
