"""Access to the server: the hosts and origins that requests may name, and the key."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from triforce_cli.apis.api import ApiError

_LOCAL = "localhost"


def is_loopback(host: str) -> bool:
    """True for an address or name of this machine alone."""
    host = host.lower()
    if host == _LOCAL or host.endswith(f".{_LOCAL}"):
        return True
    with suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return False


@dataclass(frozen=True)
class Access:
    """The rule for requests. host: the address that the server listens on. key: that every request has to carry, or
    None. origins: of web pages that may use the server.

    Without a key the Host header has to name this machine: otherwise a web page whose name is made to lead here could
    use the server (DNS rebinding). A page's own name is in Origin, which programs other than browsers do not send. The
    server's own page has the origin that the request's Host names; a page whose name is made to lead here has that,
    too, but not the host of this machine, or the key.
    """

    host: str
    key: str | None = None
    origins: frozenset[str] = frozenset()

    def check(self, headers: Mapping[str, str], *, method: str = "POST", is_open: bool = False) -> None:
        """Raises ApiError for a request that is not allowed. headers: by names in lower case. is_open: the request
        needs no key."""
        origin = headers.get("origin")
        if origin is not None and origin not in self.origins and not _is_own(origin, headers.get("host", "")):
            raise ApiError(403, f"web pages from {origin[:200]} may not use this server; --allow-origin allows them")
        if self.key is None:
            self._check_host(headers.get("host", ""))
        elif not (is_open or _is_preflight(method, origin)):
            self._check_key(_keys_in(headers), self.key)

    def _check_key(self, given: Sequence[str], key: str) -> None:
        if not any(hmac.compare_digest(each.encode(), key.encode()) for each in given):
            raise ApiError(401, "the key is missing or wrong; it goes into Authorization: Bearer", "invalid_api_key")

    def _check_host(self, header: str) -> None:
        name = _host_in(header)
        if name != self.host and not is_loopback(name):
            raise ApiError(403, f"this server is for programs on this machine, not for the host {header[:200]!r}")


def _is_preflight(method: str, origin: str | None) -> bool:
    """True for a browser's question whether a page may send a request; such a question carries no key."""
    return method == "OPTIONS" and origin is not None


def _is_own(origin: str, host: str) -> bool:
    """Whether a page came from the host that its request names."""
    return bool(host) and origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _host_in(header: str) -> str:
    """The name or address in a Host header, without its port; "" if it cannot be read."""
    if "@" in header:  # no host, and what stands before it would not be looked at
        return ""
    with suppress(ValueError):
        return urlsplit(f"//{header}").hostname or ""
    return ""


def _keys_in(headers: Mapping[str, str]) -> tuple[str, str]:
    """The keys of a request, as OpenAI's and as Anthropic's clients send them."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else "", headers.get("x-api-key", "")
