"""`python -m triforce_cli`, the same as the console script `triforce`."""

import logging
import os
import signal
import sys
import warnings

# Libraries' own messages are off unless the user sets the variable: only this program writes to standard error.
_SILENCE = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def run() -> int:
    """Run `app.main` and return its exit code. Ctrl-C leaves no traceback, even while the module is being imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    silence_libraries()
    from triforce_cli.app import main
    from triforce_cli.screen.output import forgive_locale

    forgive_locale()
    return main()


def silence_libraries() -> None:
    """Turn off the libraries' own messages. Call it before they are imported; child processes inherit the settings."""
    for variable, value in _SILENCE.items():
        os.environ.setdefault(variable, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
    logging.getLogger().addHandler(logging.NullHandler())  # else the logging module writes warnings itself


if __name__ == "__main__":
    sys.exit(run())
