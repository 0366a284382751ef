"""`triforce doctor`: this machine's hardware, rates and kernel checks, and the speed to expect of it."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from json import dumps
from pathlib import Path
from typing import Annotated

from offload.errors import Differs, TriforceError
from triforce_cli.ground.outfile import OutputFile
from triforce_cli.options import options
from triforce_cli.options.call import spread
from triforce_cli.screen.output import Output
from triforce_cli.screen.utf8 import user_path
from triforce_cli.setup.choice import choose_models

Report = Annotated[
    Path | None,
    options.option(
        "--report",
        "Also write everything to this file, as JSON, for a bug report. It has no prompt and no text.",
        options.OUTPUT,
        metavar="FILE",
    ),
]


@spread
def doctor(
    *,
    report: Report = None,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Look at this machine, measure it, check that it computes right, and say what to expect and what to improve.

    The measured rates are kept for the planner, and how long passes of the demo models take on the CPU: run it
    once, and again when the machine changes. Exit code 5: a check failed.

    Example: triforce doctor --json
    """
    named = None if report is None else user_path(str(report))
    output = Output(quiet=quiet)
    with output, nullcontext() if named is None else OutputFile(named, note=output.note) as file:
        output.wait("starting")
        from offload.bench.checks import check_device
        from offload.bench.diagnosis import diagnose, remember, usable_hardware
        from offload.engine.engine import time_again
        from offload.plan.what_if import expectations
        from offload.speed.hardware import probe
        from triforce_cli.render import doctor as render_doctor

        diagnosis = diagnose(output.wait)
        record = remember(diagnosis)
        output.wait("timing the demo models")
        demo = choose_models(None, None)
        time_again(demo.target, demo.draft)
        output.wait("measuring the disk of the models")
        disk = _disk_rate()
        expected = expectations(usable_hardware(diagnosis))
        checks = [
            check
            for name in diagnosis.devices
            for check in check_device(probe(name), demo.target, demo.draft, output.wait)
        ]
        document = render_doctor.document(diagnosis, checks, expected, record, disk)
        if json:
            output.document(document)
        else:
            output.text(render_doctor.report(diagnosis, checks, expected, width=output.width, disk=disk))
        output.note(render_doctor.kept(record))
        if file is not None:
            file.write((dumps(document, indent=1) + "\n").encode())
    if failure := render_doctor.failure(checks):
        raise Differs(failure)


def _disk_rate() -> float | None:
    """Bytes per second that the disk of the folder of models gives past the page cache; None without models there, or
    where that cannot be measured or kept."""
    from offload.engine.engine import time_disk
    from offload.hub.names import models_folder

    with suppress(OSError, TriforceError):
        return time_disk(models_folder())
    return None
