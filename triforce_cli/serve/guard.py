"""The guard of the web application: who may use it and how much, and what goes back when something fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from triforce_cli.apis.api import ApiError
from triforce_cli.apis.table import api_of
from triforce_cli.ground import log
from triforce_cli.serve.access import Access
from triforce_cli.serve.load import Load

SHARE = "triforce.share"  # of a request in the load, in its scope
_OPEN = ("/health",)  # paths that need no key, and are no load
_PAGE = "/"  # so is the page, which has no data; to a browser, which asks for it so
_GONE = 499  # the status of a response that nobody reads


@dataclass(frozen=True)
class Refusal:
    """A request that was not answered. address: of the client, or "". The texts are the client's, or quote it."""

    address: str
    method: str
    path: str
    status: int
    reason: str


OnRefusal = Callable[[Refusal], None]


class Refusals:
    """Makes the responses to requests that fail. on_refusal: called for each, in the event loop's thread."""

    def __init__(self, access: Access, on_refusal: OnRefusal) -> None:
        self._access, self.on_refusal = access, on_refusal

    def response(self, scope: Scope, error: Exception) -> Response:
        """The response in the form of the path's API."""
        if isinstance(error, ClientDisconnect):
            return Response(status_code=_GONE)
        path = scope["path"]
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, f"{error.detail}: {path[:80]}", headers=error.headers)
        if not isinstance(error, ApiError):
            error = ApiError(500, f"unexpected {type(error).__name__}")
        self.on_refusal(Refusal(address_of(scope), scope["method"], path, error.status, str(error)))
        return JSONResponse(api_of(path).error(error), error.status, {**error.headers, **self._for_pages(scope)})

    def _for_pages(self, scope: Scope) -> Mapping[str, str]:
        """The headers without which a browser keeps a response from the page that asked."""
        origin = Headers(scope=scope).get("origin")
        return {"access-control-allow-origin": origin, "vary": "Origin"} if origin in self._access.origins else {}


class Guard:
    """An ASGI application around another one. It refuses requests that `access` does not allow, or that are too many,
    and logs errors that nothing handled."""

    def __init__(self, application: ASGIApp, access: Access, refusals: Refusals) -> None:
        self._application, self._access, self.refusals = application, access, refusals
        self._load = Load()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        is_open = scope["path"] in _OPEN or is_page(scope)
        try:
            self._access.check(Headers(scope=scope), method=scope["method"], is_open=is_open)
            share = None if is_open else self._load.begin(address_of(scope))
        except ApiError as error:
            await self.refusals.response(scope, error)(scope, receive, send)
            return
        try:
            await self._application({**scope, SHARE: share}, receive, send)
        except Exception:
            log.failure(traceback.format_exc())
            raise
        finally:
            if share is not None:
                share.end()


def is_page(scope: Scope) -> bool:
    """Whether a browser asks for the page."""
    return scope["path"] == _PAGE and "text/html" in Headers(scope=scope).get("accept", "")


def address_of(scope: Scope) -> str:
    """The address of a request's client, without its port."""
    return scope["client"][0] if scope.get("client") else ""
