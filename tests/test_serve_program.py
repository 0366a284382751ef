"""`triforce serve` as a program: its answers are those of `ask`, and how it begins and ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kit import programs
from kit.models import TOKENIZER_SIZE, random_model, save, save_pair
from kit.served import CHAT, PATIENCE_SECONDS, Client, received, received_until, request, until
from offload.speed.rates import rates_file
from test_cli_fake import environment

QUESTIONS = ("Where is the key?", "Who came in, and when was that?", "What?")
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 24}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"), context=1024)[0]


def options(target: Path) -> list[str]:
    context = "512" if target.parent.name == "org" else "1024"
    return ["--model", str(target), "--draft", "none", "--dtype", "fp32", "--context", context]


class Program:
    """`triforce serve ARGS`. said: its lines on standard error."""

    def __init__(self, args: Sequence[str], **variables: str) -> None:
        self.said: list[str] = []
        reading, writing = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        self.process = programs.begin(["serve", "--port", "0", *args], env=environment(**variables),
                                      streams=(null, null, writing))  # fmt: skip
        os.close(writing)
        os.close(null)
        self._reader = threading.Thread(target=self._read, args=(reading,))
        self._reader.start()

    @property
    def client(self) -> Client:
        """Once it serves."""
        until(lambda: self._port() or not self._reader.is_alive())
        port = self._port()
        assert port, self.said
        return Client(port)

    def _port(self) -> int:
        found = (re.match(r"serving .* at http://127\.0\.0\.1:(\d+)/v1, ", line) for line in self.said)
        return next((int(match[1]) for match in found if match), 0)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def finish(self) -> int:
        self.process.join(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        assert self.process.exitcode is not None, self.said
        return self.process.exitcode

    def _read(self, reading: int) -> None:
        with os.fdopen(reading) as lines:
            for line in lines:
                self.said.append(line.rstrip("\n"))

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.join()
        self._reader.join()


@pytest.fixture(scope="module")
def server(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with Program([*options(target), "--batch", "2", "--no-store", "--no-speculation"]) as server:
        yield server
        server.signal(signal.SIGTERM)
        assert server.finish() == 0, server.said


def asked(target: Path, question: str, **fields: Any) -> str:
    """The text of `triforce ask`."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]
    args = ["ask", question, *options(target), *given, "--json", "-q", "--no-store", "--no-log", "--no-speculation"]
    done = programs.run(args, env=environment())
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["text"])


def test_answers_are_those_of_ask_alone_and_together(server: Program, target: Path) -> None:
    expected = [asked(target, question, **fields) for question in QUESTIONS[:2] for fields in (GREEDY, SEEDED)]
    requests = [(question, fields) for question in QUESTIONS[:2] for fields in (GREEDY, SEEDED)]
    assert [server.client.chat(question, **fields).said for question, fields in requests] == expected
    assert [server.client.chat(question, **fields, stream=True).said for question, fields in requests] == expected
    with ThreadPoolExecutor(4) as clients:
        together = clients.map(lambda each: server.client.chat(each[0], **each[1], stream=True).said, requests)
        assert list(together) == expected


def test_several_answers_to_a_prompt_are_those_of_their_seeds_and_read_it_once(server: Program) -> None:
    seeds = [{**SEEDED, "seed": seed} for seed in (7, 8, 9)]
    expected = [server.client.chat(QUESTIONS[1], **fields).said for fields in seeds]
    assert len({*expected}) == 3
    answer = server.client.chat(QUESTIONS[1], **SEEDED, n=3)
    assert [each["message"]["content"] for each in answer.body["choices"]] == expected
    read = [each["timings"]["prompt_n"] for each in answer.body["choices"]]
    assert sum(read) < 2 * answer.body["usage"]["prompt_tokens"], read
    several = server.client.ask("/v1/completions", {"prompt": list(QUESTIONS), "n": 2, **GREEDY}).body["choices"]
    alone = [server.client.ask("/v1/completions", {"prompt": each, **GREEDY}).body["choices"][0] for each in QUESTIONS]
    assert [each["text"] for each in several] == [each["text"] for each in alone for _ in range(2)]


def test_the_next_turn_of_a_conversation_reads_what_is_new_alone(server: Program) -> None:
    """With fewer than 512 tokens nothing was reused. Two conversations take turns; with a seed a text is as alone."""
    talks, lengths, told = [request(question)["messages"] for question in QUESTIONS[:2]], [0, 0], []
    for _ in range(3):
        for number, talk in enumerate(talks):
            answer = server.client.ask(CHAT, {"messages": talk, **GREEDY}).body
            usage, reply = answer["usage"], answer["choices"][0]["message"]["content"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= lengths[number]
            lengths[number] = usage["prompt_tokens"] - 1
            told.append(([*talk], reply))
            talk += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
    for messages, reply in told:
        alone = server.client.ask(CHAT, {"messages": messages, **GREEDY, "seed": 1}).body
        assert alone["choices"][0]["message"]["content"] == reply


def test_requests_that_differ_in_their_billing_blocks_alone_reuse_all_rows(server: Program) -> None:
    """Nothing behind the block was reused: Claude Code changes it with every request."""
    usages = []
    for cch in ("36ee5", "36ee5", "0aaa9"):
        block = f"x-anthropic-billing-header: cc_version=2.1.177.{cch[:3]}; cc_entrypoint=cli; cch={cch};"
        system = [{"type": "text", "text": text} for text in (block, "You answer questions about keys.")]
        answer = server.client.ask("/v1/messages", request("Whose is it?", system=system, **GREEDY)).body
        usages.append(answer["usage"])
    assert usages[2] == usages[1]
    assert usages[1]["cache_read_input_tokens"] > 4 * usages[1]["input_tokens"]


def test_apis_say_the_same(server: Program) -> None:
    client, question = server.client, QUESTIONS[2]
    said = client.chat(question, **GREEDY).said
    message = client.ask("/v1/messages", request(question, **GREEDY)).body
    assert message["content"] == [{"type": "text", "text": said}]
    response = client.ask("/v1/responses", {"input": question, "temperature": 0, "max_output_tokens": 24}).body
    assert response["output"][0]["content"][0]["text"] == said
    assert (message["stop_reason"], response["status"]) == ("max_tokens", "incomplete")
    count = client.ask("/v1/messages/count_tokens", request(question)).body["input_tokens"]
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == count
    assert message["usage"]["output_tokens"] == 24


def test_scores_are_those_of_the_tokens(server: Program) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "temperature": 0, "max_tokens": 5}
    choice = server.client.chat("Where?", **fields).body["choices"][0]
    scores = choice["logprobs"]["content"]
    assert len(scores) == 5
    for score in scores:
        assert score["top_logprobs"][0]["token"] == score["token"]
        assert score["logprob"] == max(each["logprob"] for each in score["top_logprobs"]) <= 0
    text = server.client.ask("/v1/completions", {"prompt": "Where?", "logprobs": 1, "temperature": 0}).body
    assert len(text["choices"][0]["logprobs"]["tokens"]) == 16 == text["usage"]["completion_tokens"]


def test_the_status_is_of_this_model_and_its_plan(server: Program) -> None:
    client = server.client
    client.chat("x", **GREEDY)
    found, counts = client.ask("/status").body, client.ask("/metrics").text
    assert (found["model"], found["context"], found["at_a_time"], found["store"]) == ("target", 1024, 2, None)
    assert "CPU" in found["plan"]
    assert all(found["memory"]["devices"][0]["by_purpose"][name] for name in ("target layers", "kv cache"))
    assert (found["running"], found["waiting"]) == ([], [])
    assert f'triforce_requests_total{{api="{CHAT}",finish="length"}}' in counts
    assert "triforce_store_bytes" not in counts


def test_progress_and_timings_are_those_of_the_engine(server: Program) -> None:
    """The tokens of a prompt that have rows before are read, and cached."""
    for count in (30, 50):
        fields = {**GREEDY, "stream": True, "return_progress": True, "stream_options": {"include_usage": True}}
        events = [data for _, data in server.client.chat("Whose house? " * count, **fields).events if data != "[DONE]"]
        usage, timings = events[-1]["usage"], events[-1]["timings"]
        assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
        assert timings["predicted_n"] == usage["completion_tokens"] == 24
        progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        for each in progress:
            assert (each["total"], each["cache"]) == (usage["prompt_tokens"], timings["cache_n"])
            assert each["cache"] <= each["processed"] <= each["total"]
        assert progress
        assert (timings["cache_n"] > 300) is (count == 50)


def test_citations_are_of_the_messages(target: Path, server: Program) -> None:
    """Whole and in a stream; where they cannot be found, they are refused."""
    text = "\n".join(f"Room {number} is {word}." for number, word in enumerate(("red", "blue", "green") * 8))
    with Program([*options(target), "--no-store", "--no-speculation", "--cite"]) as citing:
        for stream in (False, True):
            answer = citing.client.chat(f"{text}\n\nWhich?", cite=True, stream=stream, **GREEDY)
            assert answer.status == 200, answer.text
            last = answer.events[-2][1] if stream else answer.body
            assert 1 <= len(last["citations"]) <= 3
            for cite in last["citations"]:
                assert (cite["document"], cite["text"] in f"{text}\n\nWhich?") == ("message 1", True)
        assert "citations" not in citing.client.chat(text, **GREEDY).body
        assert citing.client.ask("/status").body["cites"] is True
        refused = citing.client.ask("/v1/responses", {"input": text, "cite": True})
        assert (refused.status, "cite is true, it can only be false" in refused.text) == (400, True)
    refused = server.client.chat(text, cite=True)
    assert (refused.status, "start it with --cite" in refused.text) == (400, True)


def test_settings_that_the_model_has_not_are_refused(server: Program) -> None:
    colour = {"type": "json_schema", "json_schema": {"schema": {"type": "colour"}}}
    for fields in (
        {"logit_bias": {"99999": 1}}, {"temperature": -1}, {"top_p": 2}, {"logprobs": True, "top_logprobs": 99},
        {"response_format": colour}, {"tools": [{}]}, {"template_args": {"nothing": 1}},
    ):  # fmt: skip
        refused = server.client.chat("x", **fields)
        assert refused.status == 400, fields
        assert refused.body["error"]["type"] == "invalid_request_error"


def test_a_schema_is_followed(server: Program) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    said = server.client.chat("x", response_format=wanted, max_tokens=64, temperature=0).said
    assert json.loads(said) == {"a": "b"}


def test_an_answer_under_way_ends_after_a_signal_and_others_are_refused(target: Path) -> None:
    """Both have begun before the signal: an answer that is asked for after it is refused."""
    with Program([*options(target), "--no-store"]) as server:
        client = server.client
        under_way, connection = (
            client.begin(prompt, stream=True, temperature=0, max_tokens=300) for prompt in ("x", "y")
        )
        begun, others = (received_until(each, b"data: ") for each in (under_way, connection))
        server.signal(signal.SIGTERM)
        assert b"data: [DONE]" in begun + received(under_way)
        under_way.close()
        assert b"data: [DONE]" in (rest := others + received(connection)) or b"server_stopping" in rest
        connection.close()
        assert server.finish() == 0, server.said
        assert any("prompt tokens" in line for line in server.said)


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_drops_answers_under_way(target: Path, number: signal.Signals) -> None:
    with Program([*options(target), "--no-store"]) as server:
        connection = server.client.begin("x", stream=True, temperature=0, max_tokens=900)
        received_until(connection, b'"content"')
        server.signal(number)
        time.sleep(0.01)
        server.signal(number)
        rest = received(connection)
        connection.close()
        code = server.finish()
    if b"[DONE]" in rest:  # it was quicker
        assert code == 0
    else:
        assert (code, b"the server is stopping" in rest) == (128 + number, True)


def test_a_killed_server_leaves_a_sound_store(target: Path, tmp_path: Path) -> None:
    """A client sees a closed connection; what the next server says is the same."""
    question = "Where? " * 90  # more than a page
    args, store = [*options(target), "--no-speculation"], {"TRIFORCE_CACHE_DIR": str(tmp_path)}
    if rates_file().exists():
        shutil.copy(rates_file(), tmp_path)  # or each server would measure
    with Program([*args, "--no-store"], **store) as server:
        expected = server.client.chat(question, **GREEDY).said
    with Program(args, **store) as server:
        client = server.client
        assert client.chat(question, **GREEDY).said == expected
        connection = client.begin(question, stream=True, temperature=0, max_tokens=200)
        received_until(connection, b'"content"')
        server.process.kill()
        assert b"[DONE]" not in received(connection)
        connection.close()
        assert server.finish() == -signal.SIGKILL
    with Program(args, **store) as server:
        answers = [server.client.chat(question, **GREEDY) for _ in range(2)]
        assert [answer.said for answer in answers] == [expected] * 2
        cached = [answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached[1] >= 512
        assert not any("damaged" in line or "computed again" in line for line in server.said)


Refused = Callable[..., str]


@pytest.fixture
def refused(triforce: Callable[..., tuple[int, str, str]]) -> Refused:
    """The message for arguments that are not accepted, before a model is loaded."""

    def refused(*args: str) -> str:
        code, out, err = triforce("serve", *args)
        assert (code, out) == (2, ""), err
        assert "load" not in err
        return " ".join(err.split())

    return refused


def test_a_port_in_use_is_told_before_the_model_is_loaded(refused: Refused) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1 port {port} cannot be served (Address already in use)" in refused("--port", str(port))


def test_what_is_no_server_is_refused(target: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triforce_cli.commands.serve._check_installed", lambda: pytest.fail("not refused"))
    model = ["--model", str(target)]
    for host in ("0.0.0.0", "::", "192.168.1.1", "example.com"):
        assert "needs a key (--api-key" in refused(*model, "--host", host)
    for key in ("", " ", "a b\n", "schlüssel", " x"):
        assert "api-key must be" in refused(*model, "--api-key", key)
    for origin in ("*", "localhost:3000", "http://localhost:3000/", "http://localhost/x", "http://", "null", ""):
        assert "allow-origin is" in refused(*model, "--allow-origin", origin)
    for name, values in (("port", (-1, 65536)), ("batch", (0, 65)), ("max-waiting", (0,)), ("max-tokens", (0,))):
        for value in values:
            assert f"{name} is {value}" in refused(*model, f"--{name}", str(value))
    assert "thinking is 'loud'" in refused(*model, "--thinking", "loud")
    assert "seed" in refused(*model, "--seed", "-1")


def test_no_seconds_without_a_request_are_refused(triforce: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = triforce("serve", "--idle-unload", "0")
    assert (code, "idle-unload is 0, it must be above 0" in " ".join(err.split())) == (2, True)


def test_the_key_and_the_names_are_those_that_were_given(target: Path) -> None:
    args = [*options(target), "--no-store", "--serve-as", "one", "--serve-as", "two"]
    with Program(args, TRIFORCE_API_KEY="secret-key") as server:
        assert server.client.ask("/v1/models").status == 401
        keyed = Client(server.client.port, {"x-api-key": "secret-key"})
        assert [model["id"] for model in keyed.ask("/v1/models").body["data"]] == ["one", "two", "target"]
        assert keyed.ask(CHAT, request("x", max_tokens=2, model="two")).body["model"] == "two"
        assert keyed.ask(CHAT, request("x", max_tokens=2, model="target")).body["model"] == "target"
        assert keyed.ask(CHAT, request("x", model="gpt-4o")).status == 404
        until(lambda: sum(f"{CHAT} " in line and "2 new" in line for line in server.said) == 2)
        until(lambda: f"POST {CHAT}: 404" in "".join(server.said))
        begin = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
        lines = [begin.sub("", line, count=1) for line in server.said if begin.match(line)]
        refusals = ["127.0.0.1 GET /v1/models: 401", f"127.0.0.1 POST {CHAT}: 404"]
        assert [line.split(",")[0] for line in lines if line.startswith("127.0.0.1")] == refusals
        assert "secret" not in "\n".join(server.said)
        server.signal(signal.SIGINT)
        assert server.finish() == 0, server.said


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: org/one, org/two, and org/broken."""
    folder = tmp_path_factory.mktemp("models")
    for number, name in enumerate(("one", "two", "broken")):
        fields = {"vocab_size": TOKENIZER_SIZE, "max_position_embeddings": 512, "eos_token_id": None}
        save(random_model(seed=number + 1, **fields), folder / "org" / name, tokenizer=True)
    (folder / "org" / "broken" / "tokenizer.json").write_text("{")
    return folder


def test_requests_choose_among_the_installed_models(target: Path, installed: Path) -> None:
    """Each text is that of its model alone, also where requests for three models come at once."""
    variables = {"TRIFORCE_MODELS_DIR": str(installed)}
    with Program([*options(target), "--no-store", "--no-speculation", "--models"], **variables) as server:
        client = server.client
        listed = {each["id"]: each["context_length"] for each in client.ask("/v1/models").body["data"]}
        assert listed == {"target": 1024, "org/one": 512, "org/two": 512, "org/broken": 512}
        names = ("target", "org/one", "org/two")
        alone = {name: asked(installed / name if "/" in name else target, QUESTIONS[0], **GREEDY) for name in names}
        assert len({*alone.values()}) == 3
        said = [client.chat(QUESTIONS[0], model=name, **GREEDY) for name in (*names, None, "org/one")]
        assert [each.body["model"] for each in said] == [*names, "target", "org/one"]
        assert [each.said for each in said] == [alone[name] for name in (*names, "target", "org/one")]
        with ThreadPoolExecutor(9) as clients:
            several = clients.map(
                lambda name: client.chat(QUESTIONS[0], model=name, stream=True, **GREEDY).said, names * 3
            )
            assert list(several) == [alone[name] for name in names * 3]
        refused = client.chat("x", model="org/broken")
        assert refused.status in (500, 400), refused.text
        assert "tokenizer" in refused.body["error"]["message"]
        for name in ("org/none", "../org/one", str(installed / "org" / "one"), "one", "org/one/x.gguf"):
            assert client.chat("x", model=name).status == 404, name
        assert client.chat(QUESTIONS[0], **GREEDY).said == alone["target"]
        assert client.ask("/status").body["loaded"] is True
        until(lambda: any("org/two is loaded: 512 tokens of context" in line for line in server.said))


def test_the_first_model_is_the_installed_one_at_its_place(installed: Path) -> None:
    args = [*options(installed / "org" / "one"), "--no-store", "--models"]
    with Program(args, TRIFORCE_MODELS_DIR=str(installed)) as server:
        listed = [each["id"] for each in server.client.ask("/v1/models").body["data"]]
        assert listed == ["one", "org/broken", "org/two"]
        assert server.client.chat("x", model="org/one", max_tokens=2).body["model"] == "org/one"
        assert not any("is unloaded" in line for line in server.said)


def test_a_model_that_nobody_asks_for_gives_its_memory_back(target: Path) -> None:
    with Program([*options(target), "--no-store", "--idle-unload", "0.05"]) as server:
        text = server.client.chat(QUESTIONS[0], **GREEDY).said
        until(lambda: any("target is unloaded: " in line for line in server.said))
        status = server.client.ask("/status").body
        assert (status["loaded"], status["model"]) == (False, "target")
        assert server.client.chat(QUESTIONS[0], **GREEDY).said == text
        until(lambda: sum("target is loaded: 1,024 tokens of context" in line for line in server.said) == 1)


def test_without_models_a_request_for_an_installed_one_is_refused(server: Program) -> None:
    refused = server.client.chat("x", model="org/one")
    assert "--models the models that are installed" in refused.body["error"]["message"]
