"""The load of requests under way: their number, by the clients' addresses, and the bytes of their bodies."""

from __future__ import annotations

from collections import Counter

from triforce_cli.apis.api import ApiError

MOST_REQUESTS, MOST_OF_ADDRESS = 384, 256  # under way, and those of one address
SPARE = 128  # connections beyond requests under way: of clients that wait, and for the server's health
MOST_BYTES = 32 << 20  # of a request
MOST_TOTAL = 128 << 20  # of all requests under way, but for the first bytes of each
FREE = 256 << 10  # the first bytes, which come whatever others send
_TO_RETRY = {"retry-after": "1"}


class Load:
    """The requests under way. For one thread. num_bytes: that count for the total."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._of_address = Counter[str]()

    def begin(self, address: str) -> Share:
        """The share of a request that begins. Raises ApiError if too many are under way."""
        if self._of_address.total() >= MOST_REQUESTS or self._of_address[address] >= MOST_OF_ADDRESS:
            raise ApiError(503, "too many requests are under way; try again later", headers=_TO_RETRY)
        self._of_address[address] += 1
        return Share(self, address)

    def end(self, address: str) -> None:
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]


class Share:
    """The share of a request in the load, until it ends."""

    def __init__(self, load: Load, address: str) -> None:
        self._load, self._address = load, address
        self._num_bytes = 0

    def check(self, num_bytes: int) -> None:
        """Raises ApiError if a body of so many bytes is too large, or too large beside those of others."""
        if num_bytes > MOST_BYTES:
            raise ApiError(413, f"the request is over the limit of {MOST_BYTES:,} bytes")
        others = self._load.num_bytes - _counted(self._num_bytes)
        if _counted(num_bytes) > MOST_TOTAL - others:
            raise ApiError(
                503, f"requests of {others:,} bytes are under way, too many for this one; try again later",
                headers=_TO_RETRY,
            )  # fmt: skip

    def take(self, count: int) -> None:
        """Count bytes of the body that came. Raises ApiError as `check` does."""
        self.check(self._num_bytes + count)
        self._load.num_bytes += _counted(self._num_bytes + count) - _counted(self._num_bytes)
        self._num_bytes += count

    def end(self) -> None:
        self._load.num_bytes -= _counted(self._num_bytes)
        self._load.end(self._address)


def _counted(num_bytes: int) -> int:
    """The bytes of a body that count for the total."""
    return max(num_bytes - FREE, 0)
