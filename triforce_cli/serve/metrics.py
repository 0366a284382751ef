"""The server's metrics, in the text form of Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from triforce_cli.serve.requests import Over, Requests
from triforce_cli.serve.store_use import StoreWatch

CONTENT_TYPE = CONTENT_TYPE_LATEST
_FIRST_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)  # bounds of buckets
_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10)


class Metrics:
    """Counts requests as they end. A registry of its own: nothing else of this process is in it."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"triforce_{name}", what, labels, registry=registry)

        self._requests = counter("requests", "Requests that ended, by API and finish reason.", "api", "finish")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._cached = counter("cached_tokens", "Tokens of prompts that were not computed anew.")
        self._generated = counter("generated_tokens", "Tokens of answers.")
        self._drafted = counter("drafted_tokens", "Tokens that were drafted, by the level that verified them.", "level")
        self._accepted = counter("accepted_tokens", "Drafted tokens that were accepted.", "level")
        self._read = counter("expert_read_bytes", "Bytes of experts that were read from the model's file.")
        self._reading = counter("expert_read_seconds", "Seconds in which experts were read from the model's file.")
        self._first = Histogram(
            "triforce_first_token_seconds",
            "Seconds from a request to its first token, the wait in the queue included.",
            buckets=_FIRST_SECONDS,
            registry=registry,
        )
        self._each = Histogram(
            "triforce_token_seconds",
            "Seconds of a token after the first, the mean of an answer.",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )

    def watch(self, requests: Requests, store: StoreWatch | None) -> None:
        """Have the numbers of running and of waiting requests, and the bytes of the prefix store, if there is one."""
        self._gauge(
            "running_requests", "Requests that are read or answered.", lambda: len(requests.of("reading", "writing"))
        )
        self._gauge("waiting_requests", "Requests in the queue.", lambda: len(requests.of("waiting")))
        if store is not None:
            self._gauge("store_bytes", "Bytes of the prefix store.", lambda: store.use().nbytes)

    def over(self, over: Over) -> None:
        """Count a request that has ended."""
        self._requests.labels(over.api, over.finish).inc()
        if over.first_token_seconds is not None:
            self._first.observe(over.first_token_seconds)
        if over.finished is None:
            return
        stats = over.finished.stats
        self._prompt.inc(stats.prompt_tokens)
        self._cached.inc(stats.reused_tokens)
        self._generated.inc(stats.output_tokens)
        if (milliseconds := stats.milliseconds_per_token) is not None:
            self._each.observe(milliseconds / 1000)
        for link in (stats.prefill_link, stats.decode_link):
            self._read.inc(link.disk.num_bytes)
            self._reading.inc(link.disk.seconds)
        for level in stats.levels:
            self._drafted.labels(level.name).inc(level.drafted)
            self._accepted.labels(level.name).inc(level.accepted)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _gauge(self, name: str, what: str, value: Callable[[], int]) -> None:
        Gauge(f"triforce_{name}", what, registry=self._registry).set_function(value)
