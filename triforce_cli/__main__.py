"""`python -m triforce_cli`, the same as the console script `triforce`."""

import signal
import sys


def run() -> int:
    """`app.main`, on which Ctrl-C leaves no traceback either while it is imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from triforce_cli.app import main
    from triforce_cli.output import forgive_locale

    forgive_locale()
    return main()


if __name__ == "__main__":
    sys.exit(run())
