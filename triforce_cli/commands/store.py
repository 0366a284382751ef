"""`triforce store`: what the prefix store keeps of prompts on the disk, and its removal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.errors import UsageError
from offload.session.store_files import clear as clear_store
from offload.session.store_files import nbytes, pages_of, remove, store_folder, summaries
from offload.units import size
from triforce_cli.options import options
from triforce_cli.options.call import spread
from triforce_cli.options.consent import Yes, agreed
from triforce_cli.options.other_programs import Group
from triforce_cli.render import store as render_store
from triforce_cli.render.sessions import named
from triforce_cli.screen.output import Output

store = typer.Typer(
    cls=Group, no_args_is_help=True, help="Look at what is kept of long prompts (--no-store), or remove it."
)

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="Models or documents, as store show names them.", show_default=False),
]


@store.command()
@spread
def show(*, json: options.AsJson = False, quiet: options.Quiet = False) -> None:
    """Show what is kept of long prompts, by model: tokens, size, last use, names of documents.

    Every command that reads a prompt of a thousand tokens or more keeps what it computes of it, and no later prompt
    that begins alike is computed again. It is in the user's cache folder, or in the folder that TRIFORCE_CACHE_DIR
    names; what was not used for the longest time goes first.

    Example: triforce store show --json
    """
    folder, found = store_folder(), summaries(store_folder())
    with Output(quiet=quiet) as output:
        if json:
            output.document(render_store.document(folder, found))
        elif found:
            output.text(render_store.table(found))
            output.note(render_store.footnote(folder, found))
        else:
            output.note(f"nothing is kept in {folder}; ask, generate and chat keep what they read of long prompts")


@store.command()
@spread
def clear(names: Names = None, *, yes: Yes = False, quiet: options.Quiet = False) -> None:
    """Remove what is kept of prompts: all of it, or that of models or of documents. The next prompt is read again, and
    kept again (--no-store).

    It holds the prompts' content in the model's own numbers. Sessions and models stay. Of a prompt with one of the
    documents all is removed, what other prompts share with it, too.

    Example: triforce store clear lease.pdf --yes
    """
    folder, chosen = store_folder(), tuple(dict.fromkeys(names or ()))
    with Output(quiet=quiet) as output:
        pages = {page: count for name in chosen for page, count in _pages(folder, name).items()}
        total = sum(pages.values()) if chosen else nbytes(folder)
        if not total:
            output.note(f"nothing is kept in {folder}")
        which = f"what is kept of {named(list(chosen))}" if chosen else f"all that is kept in {folder}"
        if total and not yes and not agreed(output, f"remove {which}, {size(total)}, for good?"):
            return
        if chosen:
            remove(folder, pages)
        else:
            clear_store(folder)
        output.note(f"removed {size(total)} from {folder}" if total else "")


def _pages(folder: Path, name: str) -> dict[Path, int]:
    """The pages of a model or a document. Raises UsageError if there are none."""
    if not (found := pages_of(folder, name)):
        raise UsageError(f"nothing is kept of {name!r} in {folder}; 'triforce store show' lists what is")
    return found
