"""The table of HTTP APIs."""

from __future__ import annotations

from triforce_cli.apis.api import Api
from triforce_cli.apis.chat_completions import ChatCompletions
from triforce_cli.apis.completions import Completions
from triforce_cli.apis.messages import Messages
from triforce_cli.apis.responses import Responses

APIS: tuple[Api, ...] = (ChatCompletions(), Completions(), Responses(), Messages())


def api_of(path: str) -> Api:
    """The API of a path; the first one for a path of none."""
    return next((api for api in APIS if path.startswith(api.path)), APIS[0])
