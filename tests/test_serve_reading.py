"""The work of reading a request: in proportion to it, refused by counts first, and ended where nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kit.models import byte_tokenizer
from kit.served import PATIENCE_SECONDS, Server, received_until, until
from offload import strict_json
from offload.decode.sampling import SamplingParams
from offload.errors import DoesNotFit
from offload.interrupts import Abandoned, abandoned_if, poll
from offload.text.tokenizer import Tokenizer
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.answering.thoughts import _BLOCK, Channels, Splitter
from triforce_cli.apis.api import ApiError
from triforce_cli.apis.messages import Messages as MessagesApi
from triforce_cli.apis.table import APIS, api_of
from triforce_cli.batch.prompts import Prompts
from triforce_cli.options.answering import Layout
from triforce_cli.prompts import steps
from triforce_cli.prompts.formats import ChatFormat
from triforce_cli.prompts.guards import Guard, Guards
from triforce_cli.prompts.messages import read
from triforce_cli.prompts.script import write_messages
from triforce_cli.serve.reader import Reader

NONE = Guards(Guard(()), Guard(()))
LINE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ENDLESS = "{% for a in range(9000) %}{% for b in range(9000) %}{% endfor %}{% endfor %}"


def tokenizer(template: str = LINE) -> Tokenizer:
    inner = byte_tokenizer()
    inner.chat_template = template
    return Tokenizer(inner)


def said(count: int, content: str = "x") -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for _ in range(count)]


class Searched(str):
    """A text that counts how often it is searched."""

    times: ClassVar[int] = 0

    def __contains__(self, part: str) -> bool:
        Searched.times += 1
        return super().__contains__(part)


def test_messages_are_found_in_one_look() -> None:
    """Each was looked for from the beginning of the text: 16,000 short ones took 50 s, 100,000 over 8 minutes."""

    def render(messages: Sequence[Mapping[str, object]]) -> str:
        return Searched("".join(f"{each['role']}: {each['content']}\n" for each in messages))

    Searched.times = 0
    messages = read([*said(300), {"role": "user", "content": " 7\n"}, *said(300, "1000000000")])
    text, behind = write_messages(messages, render, NONE)
    assert (text.count("\n"), behind) == (602, "\n")
    assert Searched.times < 20


def test_messages_that_hold_numbers_are_told_from_their_marks() -> None:
    """Many numbers in a row in a text were tried one after the other. Of equal messages the first was named."""
    numbers = " ".join(map(str, range(10**9, 10**9 + 3000)))
    messages = read(said(12, numbers))

    def without_the_third(given: Sequence[Mapping[str, object]]) -> str:
        return "".join(str(each["content"]) for number, each in enumerate(given) if number != 2)

    with pytest.raises(Exception, match="leaves message 3, of the role user, out"):
        write_messages(messages, without_the_third, NONE)


class Key(str):
    """A name of a field that counts how often it is compared."""

    times: ClassVar[int] = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Key.times += 1
        return super().__eq__(other)


def test_a_field_that_occurs_twice_is_found_in_one_look() -> None:
    """Each name was counted in the list of all: an object of 32 MB took hours."""
    Key.times = 0
    pairs: list[tuple[str, object]] = [(Key(number), 1) for number in range(1000)]
    with pytest.raises(ValueError, match="a field occurs twice: '999'"):
        strict_json._object([*pairs, (Key(999), 2)])
    assert Key.times < 20_000


def test_a_begun_reply_is_searched_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of it was copied behind each mark."""
    lengths: list[int] = []
    found = Splitter._found

    def noted(self: Splitter) -> Any:
        lengths.append(len(self._held))
        return found(self)

    monkeypatch.setattr(Splitter, "_found", noted)
    unit = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>so<|end|><|start|>x"
    count = 4 * _BLOCK // len(unit)
    begun = Prompt([1], is_chat=True, begin=unit * count, marks=Channels()).without_begin().earlier
    assert (begun.num_text, begun.num_thoughts) == (4 * count - 2, 4 * count - 2)  # a blank line between them
    assert max(lengths) <= _BLOCK + len(unit)


def test_more_messages_than_tokens_are_refused_before_the_template_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    chat_format = ChatFormat(tokenizer().limited(100))
    assert len(chat_format.prompt_of_messages(read(said(100, ""))).tokens) > 100  # short texts are counted later
    monkeypatch.setattr(Tokenizer, "render_chat", lambda *given, **more: pytest.fail("it ran"))
    with pytest.raises(DoesNotFit, match="at least 101 tokens and the context is 100"):
        chat_format.prompt_of_messages(read(said(101)))


def test_more_cuts_than_tokens_are_refused_before_they_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each special token's name in a message is a cut, and each side of it was encoded for itself."""
    limited = tokenizer().limited(100)
    name = next(iter(limited.added_tokens(special=True)))
    chat_format = ChatFormat(limited)
    monkeypatch.setattr(Tokenizer, "encode_piece", lambda *given, **more: pytest.fail("it was encoded"))
    with pytest.raises(DoesNotFit, match="at least 101 tokens"):
        chat_format.prompt_of_messages(read(said(1, name * 101)))


def test_texts_of_requests_are_not_remembered() -> None:
    """The last 512 of them were, each with its tokens."""
    chat_format = ChatFormat(tokenizer())
    before = chat_format._encode.cache_info().currsize
    for number in range(5):
        chat_format.prompt_of_messages(read(said(1, f"text {number}")))
    assert chat_format._encode.cache_info().currsize == before


def reader(template: str, context: int, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.setattr("offload.engine.request.check_sampling", lambda *given: False)
    limited = tokenizer(template).limited(context)
    prepared = SimpleNamespace(tokenizer=limited, prompt_tokenizer=limited, request=SimpleNamespace(target=None))
    prompts = Prompts(prepared, Layout("auto", {}))  # type: ignore[arg-type]
    return Reader(prompts, Wanted(max_tokens=9, sampling=SamplingParams()), most_choices=9, context=context)


def refused(found: Reader, messages: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """(status, code) of the refusals in each API, and of the count."""
    bodies = {
        "/v1/chat/completions": {"messages": messages}, "/v1/responses": {"input": messages},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
    }  # fmt: skip
    errors = []
    for path, body in bodies.items():
        with pytest.raises(ApiError) as caught:
            found.read(api_of(path), body)
        errors.append((caught.value.status, caught.value.code))
    with pytest.raises(ApiError) as caught:
        found.num_tokens(MessagesApi(), {"messages": messages})
    return [*errors, (caught.value.status, caught.value.code)]


def test_too_many_messages_are_too_long_a_prompt_in_each_api(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reader(LINE, 100, monkeypatch)
    assert refused(found, said(101, "")) == [(400, "context_length_exceeded")] * 4


def test_messages_that_are_too_much_work_for_the_template_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was status 500, as if the server had failed."""
    monkeypatch.setattr(steps, "MAX_STEPS", 2000)
    found = reader(LINE, 4096, monkeypatch)
    assert found.read(APIS[0], {"messages": said(3)}).asked[0][0].tokens
    assert refused(found, said(1000)) == [(400, "")] * 4


# Nobody waits any more


def test_a_poll_ends_work_for_which_nobody_waits() -> None:
    asked = threading.Event()
    with abandoned_if(asked.is_set):
        poll()
        asked.set()
        other = threading.Thread(target=poll)  # is not concerned
        other.start()
        other.join()
        with pytest.raises(Abandoned):
            poll()
    poll()
    with pytest.raises(Abandoned), abandoned_if(asked.is_set):
        pytest.fail("it began")


@pytest.mark.parametrize("work", ["template", "tokenizer"])
def test_a_template_and_a_tokenizer_poll(work: str) -> None:
    """A template's own errors are refusals of its messages; the end of the work is none."""
    chat_format, looks = ChatFormat(tokenizer(), "chatml"), iter([False])
    chat_format.template = ENDLESS

    def render_or_encode() -> None:
        if work == "template":
            chat_format._rendered(said(1), {}, str)
        else:
            chat_format.tokenizer.encode("x")

    with pytest.raises(Abandoned), abandoned_if(lambda: next(looks, True)):
        render_or_encode()


@pytest.mark.parametrize("how", ["leaves", "stops"])
def test_reading_ends_when_its_client_goes_or_the_server_stops(how: str) -> None:
    """Neither ended it: the program waited for the thread."""
    with Server() as server:
        begun, ended = threading.Event(), threading.Event()

        def endless(*given: Any) -> Any:
            begun.set()
            try:
                while True:
                    poll()
            finally:
                ended.set()

        read, server.reader.read = server.reader.read, endless  # type: ignore[method-assign]
        connection = server.client.begin("endless")
        assert begun.wait(60)
        assert server.client.ask("/health").status == 200
        if how == "leaves":
            connection.close()
        else:
            server.scheduler.stop()
            assert b"server_stopping" in received_until(connection, b"}}")
        assert ended.wait(60)
        connection.close()
        server.reader.read = read  # type: ignore[method-assign]
        if how == "leaves":
            assert server.client.chat("hi there").status == 200
        else:
            server.thread.join(PATIENCE_SECONDS)
            assert not server.thread.is_alive()
        until(lambda: server.num_waiting == 0)
