"""The web application: its routes, and the handlers of requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from offload.errors import UsageError
from offload.interrupts import Abandoned, abandoned_if
from triforce_cli import __version__
from triforce_cli.apis.api import Api, ApiError, identifier
from triforce_cli.apis.messages import Messages
from triforce_cli.apis.table import APIS
from triforce_cli.serve import status
from triforce_cli.serve.access import Access
from triforce_cli.serve.documents import sent_document
from triforce_cli.serve.guard import SHARE, Guard, OnRefusal, Refusals, is_page
from triforce_cli.serve.job import Job, Reports
from triforce_cli.serve.load import Share
from triforce_cli.serve.metrics import CONTENT_TYPE, Metrics
from triforce_cli.serve.page import page
from triforce_cli.serve.reader import Reader, no_model
from triforce_cli.serve.replies import Telling, events, whole
from triforce_cli.serve.requests import Requests
from triforce_cli.serve.scheduler import Scheduler
from triforce_cli.serve.store_use import StoreUse, StoreWatch

T = TypeVar("T")

BODY_SECONDS = 60.0  # for a client to send its request
_NO_BUFFERING = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # by proxies


@dataclass(frozen=True)
class Served:
    """The served model. names: of the model. created: when the server began, in seconds since 1970. context: tokens.
    shows_thoughts: to clients. planned: the part of the status that follows from its plan."""

    names: tuple[str, ...]
    created: int
    context: int
    shows_thoughts: bool
    planned: Mapping[str, Any] = field(default_factory=dict)

    def models(self) -> list[dict[str, Any]]:
        """The model under each of its names, as OpenAI's and Anthropic's clients know one."""
        return [
            {
                "id": name, "object": "model", "type": "model", "display_name": name, "created": self.created,
                "owned_by": "triforce", "context_length": self.context,
            }
            for name in self.names
        ]  # fmt: skip


class _Stream(StreamingResponse):
    """Server-sent events. on_end: called once nothing more is sent, for whatever reason."""

    def __init__(self, texts: AsyncIterator[str], *, on_end: Callable[[], None]) -> None:
        super().__init__(texts, media_type="text/event-stream", headers=_NO_BUFFERING)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


class Service:
    """The handlers of requests. store: looks at the prefix store, if there is one. note: takes lines for the log."""

    def __init__(
        self,
        served: Served,
        reader: Reader,
        scheduler: Scheduler,
        note: Callable[[str], None],
        store: StoreWatch | None = None,
    ) -> None:
        self._served, self._reader, self._scheduler, self._note = served, reader, scheduler, note
        self._metrics, self._store = Metrics(), store
        self._requests = Requests(self._metrics.over)
        self._metrics.watch(self._requests, store)
        self._reading = ThreadPoolExecutor(1, "reader")  # encoding a long prompt takes seconds
        self._documents = ThreadPoolExecutor(1, "documents")  # reading a large one takes minutes

    def routes(self) -> list[Route]:
        return [
            Route("/", self._about),
            Route("/health", self._health),
            Route("/documents", self._document, methods=["POST"]),
            Route("/status", self._status),
            Route("/metrics", self._measured),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route(f"{Messages.path}/count_tokens", self._count, methods=["POST"]),
            *(Route(api.path, self._answerer(api), methods=["POST"]) for api in APIS),
        ]

    async def _about(self, request: Request) -> Response:
        if is_page(request.scope):
            return page()
        return Response(f"triforce {__version__} serves {self._served.names[0]}\n", media_type="text/plain")

    async def _health(self, request: Request) -> Response:
        is_stopping = self._scheduler.is_stopping
        return JSONResponse({"status": "stopping" if is_stopping else "ok"}, 503 if is_stopping else 200)

    async def _document(self, request: Request) -> Response:
        """A document as text, for the page's questions."""
        name, body = request.query_params.get("name", ""), await _body(request)
        try:
            return JSONResponse(await self._read(request, self._documents, sent_document, name, body))
        except UsageError as error:
            raise ApiError(400, str(error)) from error

    async def _status(self, request: Request) -> Response:
        served, store = self._served, await self._store_use()
        fixed = {"model": served.names[0], "names": served.names, "context": served.context, **served.planned}
        uptime, is_stopping = time.time() - served.created, self._scheduler.is_stopping
        return JSONResponse(status.document(fixed, self._requests, store, uptime=uptime, is_stopping=is_stopping))

    async def _measured(self, request: Request) -> Response:
        await self._store_use()  # so that it is known without a look at the disk
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def _store_use(self) -> StoreUse | None:
        return None if self._store is None else await asyncio.to_thread(self._store.use)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._served.models(), "has_more": False})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = next((model for model in self._served.models() if model["id"] == name), None)
        if found is None:
            raise no_model(name, self._served.names)
        return JSONResponse(found)

    async def _count(self, request: Request) -> Response:
        """The number of tokens of a prompt."""
        body = await _body(request)
        return JSONResponse(
            {"input_tokens": await self._read(request, self._reading, self._reader.num_tokens, Messages(), body)}
        )

    def _answerer(self, api: Api) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def answer(request: Request) -> Response:
            return await self._answer(api, request)

        return answer

    async def _answer(self, api: Api, request: Request) -> Response:
        readable = await self._read(request, self._reading, self._reader.read, api, await _body(request))
        body, name, reports = readable.body, f"{api.path} {identifier('')[:6]}", Reports()
        jobs = [Job(name, *asked, reports, number) for number, asked in enumerate(readable.asked)]
        for note in readable.notes:
            self._note(f"{name}: {note}")
        reply = api.reply(body, body.get("model") or self._served.names[0])
        choices = [Telling(job, shows_thoughts=self._served.shows_thoughts) for job in jobs]
        self._scheduler.submit(jobs)
        for job in jobs:
            self._requests.follow(job, api.path)
        if body.get("stream"):
            return _Stream(events(reports, choices, reply), on_end=lambda: self._leave(jobs))
        try:
            return JSONResponse(reply.document(await _unless_gone(request, whole(reports, choices))))
        finally:
            self._leave(jobs)

    def _leave(self, jobs: Sequence[Job]) -> None:
        """The connection of a request has ended."""
        self._scheduler.forget(jobs)
        for job in jobs:
            self._requests.left(job)

    async def _read(self, request: Request, pool: ThreadPoolExecutor, read: Callable[..., T], *given: Any) -> T:
        """Run a function in a thread of `pool`, while other requests are served. It ends early if the client goes away,
        or the server stops. Raises ClientDisconnect, ApiError."""
        is_gone = threading.Event()

        def reading() -> T:
            with abandoned_if(lambda: is_gone.is_set() or self._scheduler.is_stopping):
                return read(*given)

        try:
            return await _unless_gone(request, asyncio.get_running_loop().run_in_executor(pool, reading))
        except Abandoned as error:
            self._scheduler.check_open()
            raise ClientDisconnect from error
        finally:
            is_gone.set()


def web_application(service: Service, access: Access, on_refusal: OnRefusal) -> Guard:
    """The ASGI application. on_refusal: called for each request that is refused."""
    refusals = Refusals(access, on_refusal)
    middleware = []
    if access.origins:
        origins = list(access.origins)
        middleware = [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])]

    async def refused(request: Request, error: Exception) -> Response:
        return refusals.response(request.scope, error)

    kinds = (ApiError, HTTPException, ClientDisconnect, Exception)
    application = Starlette(
        routes=service.routes(), middleware=middleware, exception_handlers=dict.fromkeys(kinds, refused)
    )
    return Guard(application, access, refusals)


async def _body(request: Request) -> bytes:
    """The body of a request. Raises ApiError if it is too large or comes too slowly, ClientDisconnect."""
    try:
        return await asyncio.wait_for(_small_body(request), BODY_SECONDS)
    except TimeoutError as error:
        raise ApiError(408, f"the request was not whole after {BODY_SECONDS:g} s") from error


async def _small_body(request: Request) -> bytes:
    share: Share = request.scope[SHARE]
    share.check(int(request.headers.get("content-length", "0")))
    parts: list[bytes] = []
    async for part in request.stream():
        share.take(len(part))
        parts.append(part)
    return b"".join(parts)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which ends early if the client goes away. Raises ClientDisconnect then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Wait until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
