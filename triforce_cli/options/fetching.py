"""The fetch of a model from the hub, announced and with progress: by `triforce pull`, or since --model names it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import ModelError
from offload.hub.names import MAIN, models_folder, pull_command, tagged
from offload.units import size
from triforce_cli.ground.text import line_text, path_text
from triforce_cli.options.consent import answered
from triforce_cli.render import models as render_models
from triforce_cli.screen.output import Output

if TYPE_CHECKING:
    from offload.hub.files import GgufModel
    from offload.hub.pull import PullPlan
    from offload.hub.remote import Listing


def fetched(output: Output, listing: Listing, *, gguf: GgufModel | None = None, config_only: bool = False) -> PullPlan:
    """Fetch a model, with progress and notes, and return the plan of the pull. gguf: the GGUF model of the repository
    that is wanted. Raises TriforceError."""
    from offload.hub.pull import pull

    def announce(plan: PullPlan) -> None:
        for line in render_models.pull_plan(plan):
            output.note(line)

    try:
        return pull(listing, config_only=config_only, gguf=gguf, on_plan=announce, report=output.report)
    except KeyboardInterrupt:
        named = {} if gguf is None else gguf.named
        output.note(f"stopped; {pull_command(listing.repository, listing.revision, **named)} resumes it")
        raise


def make_present(*names: Path | str | None, yes: bool, quiet: bool = False) -> None:
    """Fetch GGUF models that --model OWNER/NAME:LABEL names and that are not here: with `yes`, or if a person agrees.
    Other names are left to whoever looks them up. Raises TriforceError."""
    for name in names:
        if name is not None:
            _make_present(str(name), yes=yes, quiet=quiet)


def _make_present(name: str, *, yes: bool, quiet: bool) -> None:
    parted = None if os.path.exists(name) else tagged(name)
    if parted is None:
        return
    from offload.hub.library import has_label

    repository, label = parted
    if has_label(repository, label):
        return
    with Output(quiet=quiet) as output:
        command = pull_command(repository, label=label)
        if not yes and not output.has_person:
            raise ModelError(f"{name} is not here; {command} fetches it, and so does --yes")
        output.wait(f"asking the hub for {repository}")
        from offload.hub.disk import free_bytes
        from offload.hub.files import labelled
        from offload.hub.remote import list_repository

        listing = list_repository(repository, MAIN, label=label)
        gguf = labelled(listing, label)
        free, folder = size(free_bytes(models_folder())), line_text(path_text(models_folder()))
        question = f"{name} is not here; fetch {size(gguf.num_bytes)} ({free} free in {folder})?"
        if not yes and not answered(output, question):
            raise ModelError(f"{name} is not here; {command} fetches it")
        fetched(output, listing, gguf=gguf)
