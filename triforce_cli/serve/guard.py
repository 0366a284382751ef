"""The guard of the web application: who may use it, and what goes back when something fails."""

from __future__ import annotations

import traceback

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from triforce_cli import log
from triforce_cli.apis.api import ApiError
from triforce_cli.apis.table import api_of
from triforce_cli.serve.access import Access

_OPEN = ("/health",)  # paths that need no key
_GONE = 499  # the status of a response that nobody reads


def error_response(path: str, error: Exception) -> Response:
    """The response to a request that failed, in the form of the path's API."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_GONE)
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{error.detail}: {path[:80]}", headers=error.headers)
    if not isinstance(error, ApiError):
        error = ApiError(500, f"unexpected {type(error).__name__}")
    return JSONResponse(api_of(path).error(error), error.status, error.headers)


class Guard:
    """An ASGI application around another one. It refuses requests that `access` does not allow, and logs errors that
    nothing handled."""

    def __init__(self, application: ASGIApp, access: Access) -> None:
        self._application, self._access = application, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        try:
            self._access.check(Headers(scope=scope), method=scope["method"], is_open=scope["path"] in _OPEN)
        except ApiError as error:
            await error_response(scope["path"], error)(scope, receive, send)
            return
        try:
            await self._application(scope, receive, send)
        except Exception:
            log.failure(traceback.format_exc())
            raise
