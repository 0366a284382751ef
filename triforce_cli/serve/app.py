"""The web application: its routes, and the handlers of requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
from triforce_cli.serve.catalogue import Catalogue
from triforce_cli.serve.documents import sent_document
from triforce_cli.serve.guard import SHARE, Guard, OnRefusal, Refusals, is_page
from triforce_cli.serve.job import Job, Reports
from triforce_cli.serve.load import Share
from triforce_cli.serve.metrics import CONTENT_TYPE, Metrics
from triforce_cli.serve.page import page
from triforce_cli.serve.reader import Readable, parsed
from triforce_cli.serve.replies import Telling, events, whole
from triforce_cli.serve.requests import Requests
from triforce_cli.serve.scheduler import Scheduler
from triforce_cli.serve.served import Served
from triforce_cli.serve.store_use import StoreUse, StoreWatch
from triforce_cli.serve.turns import Turns

T = TypeVar("T")

BODY_SECONDS = 60.0  # for a client to send its request
_NO_BUFFERING = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # by proxies


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
    """The handlers of requests. shows_thoughts: to clients. store: looks at the prefix store, if there is one. note:
    takes lines for the log."""

    def __init__(
        self,
        catalogue: Catalogue,
        turns: Turns[Served],
        scheduler: Scheduler,
        note: Callable[[str], None],
        *,
        shows_thoughts: bool = True,
        store: StoreWatch | None = None,
    ) -> None:
        self._catalogue, self._turns, self._scheduler, self._note = catalogue, turns, scheduler, note
        self._metrics, self._store, self._shows_thoughts = Metrics(), store, shows_thoughts
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
        return Response(f"triforce {__version__} serves {self._latest.names[0]}\n", media_type="text/plain")

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
        served, store = self._latest, await self._store_use()
        about = {"model": served.names[0], "names": served.names, "context": served.context}
        fixed = {**about, "loaded": self._turns.has_model, **served.planned}
        uptime, is_stopping = time.time() - self._catalogue.created, self._scheduler.is_stopping
        return JSONResponse(status.document(fixed, self._requests, store, uptime=uptime, is_stopping=is_stopping))

    async def _measured(self, request: Request) -> Response:
        await self._store_use()  # so that it is known without a look at the disk
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def _store_use(self) -> StoreUse | None:
        return None if self._store is None else await asyncio.to_thread(self._store.use)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": await self._listed(), "has_more": False})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = next((model for model in await self._listed() if model["id"] == name), None)
        if found is None:
            raise self._catalogue.no_model(name)
        return JSONResponse(found)

    @property
    def _latest(self) -> Served:
        """The loaded model, or the one that was."""
        assert self._turns.latest is not None, "requests are taken once the first model is loaded"
        return self._turns.latest

    async def _listed(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._catalogue.listed)

    async def _count(self, request: Request) -> Response:
        """The number of tokens of a prompt."""
        body = await self._parsed(request)
        served = await self._turn(request, body)
        try:
            count = await self._read(request, self._reading, served.reader.num_tokens, Messages(), body)
        finally:
            self._turns.end()
        return JSONResponse({"input_tokens": count})

    def _answerer(self, api: Api) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def answer(request: Request) -> Response:
            return await self._answer(api, request)

        return answer

    async def _answer(self, api: Api, request: Request) -> Response:
        body = await self._parsed(request)
        with ExitStack() as stack:
            served = await self._turn(request, body)
            stack.callback(self._turns.end)
            readable = await self._read(request, self._reading, served.reader.read, api, body)
            return await self._reply(api, request, readable, served.names[0], stack)

    async def _reply(self, api: Api, request: Request, readable: Readable, model: str, stack: ExitStack) -> Response:
        """The response to a request. stack: closed at the end of the connection."""
        body, name, reports = readable.body, f"{api.path} {identifier('')[:6]}", Reports()
        jobs = [Job(name, *asked, reports, number) for number, asked in enumerate(readable.asked)]
        for note in readable.notes:
            self._note(f"{name}: {note}")
        reply = api.reply(body, body.get("model") or model)
        choices = [Telling(job, shows_thoughts=self._shows_thoughts) for job in jobs]
        self._scheduler.submit(jobs)
        stack.callback(self._leave, jobs)
        for job in jobs:
            self._requests.follow(job, api.path)
        if body.get("stream"):
            return _Stream(events(reports, choices, reply), on_end=stack.pop_all().close)
        return JSONResponse(reply.document(await _unless_gone(request, whole(reports, choices))))

    def _leave(self, jobs: Sequence[Job]) -> None:
        """The connection of a request has ended."""
        self._scheduler.forget(jobs)
        for job in jobs:
            self._requests.left(job)

    async def _parsed(self, request: Request) -> Mapping[str, Any]:
        """The object that a request is. Raises ApiError, ClientDisconnect."""
        return await self._read(request, self._reading, parsed, await _body(request))

    async def _turn(self, request: Request, body: Mapping[str, Any]) -> Served:
        """The model that a request names, once it has its turn, which is to be ended. Raises ApiError,
        ClientDisconnect."""
        return await _unless_gone(request, self._turns.begin(self._catalogue.name_of(body.get("model"))))

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
