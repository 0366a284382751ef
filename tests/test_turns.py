"""The turns of models: which requests are answered together, and when a model has to leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from triforce_cli.apis.api import ApiError
from triforce_cli.serve.turns import Turns


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(test(), 60)  # type: ignore[arg-type]

    asyncio.run(whole())


async def settled() -> None:
    """Let every task go on as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def begun(turns: Turns[str], name: str) -> asyncio.Task[str]:
    return asyncio.get_running_loop().create_task(turns.begin(name))  # type: ignore[arg-type]


def test_requests_for_the_loaded_model_have_their_turn_at_once() -> None:
    async def test() -> None:
        turns = Turns[str]()
        turns.loaded("a", "A")
        assert [await turns.begin("a"), await turns.begin("a")] == ["A", "A"]
        assert not turns.has_to_leave()

    run(test)


def test_another_model_waits_for_the_requests_before_it_and_goes_before_those_after() -> None:
    async def test() -> None:
        turns = Turns[str]()
        turns.loaded("a", "A")
        await turns.begin("a")
        other, later = begun(turns, "b"), begun(turns, "a")
        await settled()
        assert (other.done(), later.done(), turns.has_to_leave()) == (False, False, False)
        turns.end()
        assert (turns.has_to_leave(), turns.has_model, turns.latest) == (True, False, "A")
        await settled()
        assert (turns.next(), other.done(), later.done()) == ("b", False, False)
        turns.loaded("b", "B")
        assert (await other, later.done(), turns.has_to_leave()) == ("B", False, False)
        turns.end()
        assert (turns.has_to_leave(), turns.next()) == (True, "a")
        turns.loaded("a", "A again")
        assert await later == "A again"

    run(test)


def test_a_loaded_model_answers_all_that_wait_for_it() -> None:
    """Requests that take turns would have it loaded again for each."""

    async def test() -> None:
        turns = Turns[str]()
        turns.loaded("a", "A")
        await turns.begin("a")
        waiting = [begun(turns, name) for name in "bababb"]
        await settled()
        turns.end()
        assert (turns.has_to_leave(), turns.next()) == (True, "b")
        turns.loaded("b", "B")
        await settled()
        assert [each.done() for each in waiting] == [name == "b" for name in "bababb"]
        for _ in range(4):
            assert not turns.has_to_leave()
            turns.end()
        assert (turns.has_to_leave(), turns.next()) == (True, "a")

    run(test)


@pytest.mark.parametrize("was_let_in", [False, True])
def test_a_client_that_goes_away_while_it_waits_holds_nobody_up(was_let_in: bool) -> None:
    """Also one whose turn came in that moment."""

    async def test() -> None:
        turns = Turns[str]()
        turns.loaded("a", "A")
        await turns.begin("a")
        other, later = begun(turns, "b"), begun(turns, "a")
        await settled()
        if was_let_in:
            turns.end()
            assert turns.has_to_leave()
            turns.loaded("b", "B")
            other.cancel()
            await settled()
            assert (turns.has_to_leave(), turns.next()) == (True, "a")
        else:
            other.cancel()
            assert await later == "A"
            turns.end()
            turns.end()
            assert not turns.has_to_leave()

    run(test)


def test_a_model_that_cannot_be_loaded_fails_its_requests_alone() -> None:
    async def test() -> None:
        turns = Turns[str]()
        first, second, other = begun(turns, "b"), begun(turns, "b"), begun(turns, "a")
        await settled()
        turns.failed("b", ApiError(503, "no room"))
        for each in (first, second):
            with pytest.raises(ApiError, match="no room"):
                await each
        assert (turns.next(), other.done()) == ("a", False)
        turns.loaded("a", "A")
        assert await other == "A"

    run(test)


def test_a_model_that_nobody_asks_for_leaves_after_a_while() -> None:
    now = [0.0]

    async def test() -> None:
        turns = Turns[str](idle_seconds=10, clock=lambda: now[0])
        turns.loaded("a", "A")
        await turns.begin("a")
        now[0] = 100.0
        assert not turns.has_to_leave()
        turns.end()
        now[0] = 109.0
        assert not turns.has_to_leave()
        now[0] = 110.0
        assert (turns.has_to_leave(), turns.has_model) == (True, False)
        waiting = begun(turns, "a")
        await settled()
        assert (waiting.done(), turns.next()) == (False, "a")
        waiting.cancel()
        await settled()
        now[0] = 500.0
        turns.loaded("a", "A")
        now[0] = 509.0
        assert not turns.has_to_leave()
        now[0] = 510.0
        assert turns.has_to_leave()

    run(test)


def test_a_prompt_that_is_read_for_a_client_that_has_gone_is_read_on_until_another_model_is_asked_for() -> None:
    async def test() -> None:
        turns = Turns[str](idle_seconds=0)
        turns.loaded("a", "A")
        assert not turns.has_to_leave(is_busy=True)
        waiting = begun(turns, "b")
        await settled()
        assert turns.has_to_leave(is_busy=True)
        waiting.cancel()

    run(test)


def test_at_the_end_requests_that_wait_are_refused() -> None:
    async def test() -> None:
        turns = Turns[str]()
        waiting = begun(turns, "a")
        await settled()
        assert Turns[str]().next() is None
        turns.close(ApiError(503, "stopping"))
        for each in (waiting, begun(turns, "a")):
            with pytest.raises(ApiError, match="stopping"):
                await each

    run(test)


def test_the_next_model_is_waited_for() -> None:
    found: list[Any] = []
    turns = Turns[str]()

    def look() -> None:
        while (name := turns.next()) is None:
            pass
        found.append(name)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()

    async def test() -> None:
        begun(turns, "a")
        await settled()
        await asyncio.to_thread(thread.join, 30)

    run(test)
    assert found == ["a"]
