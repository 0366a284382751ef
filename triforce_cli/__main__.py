"""`python -m triforce_cli`, the same as the console script `triforce`."""

import logging
import os
import signal
import sys
import warnings

# What libraries say by themselves, unless the user has asked for it: standard error is this program's.
_SILENCE = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def run() -> int:
    """`app.main`, on which Ctrl-C leaves no traceback either while it is imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    silence_libraries()
    from triforce_cli.app import main
    from triforce_cli.output import forgive_locale

    forgive_locale()
    return main()


def silence_libraries() -> None:
    """Before they are imported. Processes that this one starts inherit it."""
    for variable, value in _SILENCE.items():
        os.environ.setdefault(variable, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
    logging.getLogger().addHandler(logging.NullHandler())  # else the logging module writes warnings itself


if __name__ == "__main__":
    sys.exit(run())
