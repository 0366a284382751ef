"""`triforce version`: the installed versions, for bug reports."""

from __future__ import annotations

from dataclasses import asdict

from triforce_cli import __version__
from triforce_cli.options import options
from triforce_cli.options.call import spread
from triforce_cli.screen.output import Output


@spread
def version(*, json: options.AsJson = False) -> None:
    """The versions of triforce and of what it stands on: Python, torch and its CUDA, the attention that runs.

    `triforce --version` says the first alone, at once.

    Example: triforce version --json
    """
    with Output(quiet=True) as output:
        from offload import machine
        from offload.bench.diagnosis import software
        from triforce_cli.render.doctor import software_rows

        found, driver = software(), machine.driver()
        if json:
            cuda = None if driver is None else asdict(driver)
            output.document({"version": __version__} | asdict(found) | {"driver": cuda})
        else:
            output.text("".join(f"{label:<11}{value}\n" for label, value in software_rows(found, driver)))
