"""The program's environment variables: those of options, and a few others. An unknown TRIFORCE_ variable is an
error."""

from __future__ import annotations

import os
from typing import Any

from offload.errors import UsageError
from triforce_cli.settings import tree
from triforce_cli.settings.configuration import nearest

PREFIX = "TRIFORCE_"
OTHERS = frozenset(
    (
        *("TRIFORCE_CACHE_DIR", "TRIFORCE_LOG_DIR", "TRIFORCE_MODELS_DIR", "TRIFORCE_SESSIONS_DIR"),
        *("TRIFORCE_KERNELS", "TRIFORCE_GRAPHS"),
        *("TRIFORCE_TEST_MODELS", "TRIFORCE_TEST_LLAMA_CPP", "TRIFORCE_TEST_AGENTS"),  # for the project's tests
    )
)


def known(root: Any) -> frozenset[str]:
    """The names of all variables. root: the group of all commands."""
    found = (option for command in tree.commands(root).values() for option in tree.options(command).values())
    return OTHERS.union(str(option.envvar) for option in found)


def check(root: Any) -> None:
    """Raises UsageError for an unknown variable with the program's prefix."""
    names = known(root)
    for name, value in os.environ.items():
        if name.startswith(PREFIX) and value and name not in names:
            remedy = nearest(name, names, prefix=PREFIX)
            raise UsageError(f"the environment variable {name} is none of this program{remedy}")
