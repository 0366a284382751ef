"""`python -m triforce_cli`, the same as the console script `triforce`."""

import os
import signal
import sys

SPINS = "1000"  # some 20 us: longer, and a thread of OpenMP takes the time of the one that it waits for


def run() -> int:
    """`app.main`, on which Ctrl-C leaves no traceback either while it is imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "OMP_WAIT_POLICY" not in os.environ:  # OpenMP reads both once, when torch is imported
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    from triforce_cli.app import main
    from triforce_cli.output import forgive_locale

    forgive_locale()
    return main()


if __name__ == "__main__":
    sys.exit(run())
