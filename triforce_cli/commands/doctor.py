"""`triforce doctor`: what this machine is, how fast it is, and what to expect of it."""

from __future__ import annotations

from dataclasses import dataclass

from triforce_cli import options
from triforce_cli.choice import choose_models
from triforce_cli.flags import ProgramFlags, spread
from triforce_cli.output import Output
from triforce_cli.signals import deferred


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """One `triforce doctor`, parsed."""

    as_json: bool
    quiet: bool

    def run(self) -> None:
        """Look, measure, keep the rates for the planner, report."""
        output = Output(quiet=self.quiet)
        with output:
            output.wait("starting")
            with deferred():
                from offload.bench.diagnosis import diagnose, remember, usable_hardware
                from offload.engine import time_again
                from offload.plan.expectations import expectations
            from triforce_cli.render import doctor as render_doctor

            diagnosis = diagnose(output.wait)
            record = remember(diagnosis)
            output.wait("timing the demo models")
            demo = choose_models(None, None)
            time_again(demo.target, demo.draft)
            expected = expectations(usable_hardware(diagnosis))
            if self.as_json:
                output.document(render_doctor.document(diagnosis, expected, record))
            else:
                output.text(render_doctor.report(diagnosis, expected, width=output.width))
            output.note(render_doctor.kept(record))


@spread
def doctor(
    *,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
    program: ProgramFlags,
) -> Doctor:
    """Look at this machine, measure it, and say what to expect and what to improve.

    The measured rates are kept for the planner, and how long passes of the demo models take on the processor: run it
    once, and again when the machine changes.

    Example: triforce doctor --json
    """
    return Doctor(as_json=json, quiet=quiet)
