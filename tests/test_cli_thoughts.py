"""Thoughts from the command line: of a model that writes the same reply to whatever it reads."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from kit.harmony import TEMPLATE as CHANNELS
from kit.models import TOKENIZER_SIZE, byte_tokenizer, random_model, save
from offload.engine.step import Step
from offload.session import catalogue
from offload.session.names import FOLDER_VARIABLE
from offload.text.tokenizer import Tokenizer
from triforce_cli.answering.answer import Answer, Part
from triforce_cli.prompts.formats import ChatFormat

Triforce = Callable[..., tuple[int, str, str]]
THINK, TALK = "[THINK]", "[/THINK]"
REPLY = [THINK, "I ponder.", TALK, "It is 4.", "</s>"]
TEMPLATE = (  # as R1's but for its marks
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('[/THINK]')[-1] if m.role == 'assistant' else m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% if opens %}[THINK]\n{% endif %}{% endif %}"
)
SCHEMA = {"type": "array", "items": {"type": "boolean"}, "minItems": 20}


def model_that_says(reply: Sequence[str], folder: Path, *, special: bool, template: str = TEMPLATE) -> Path:
    """Its marks are `special` tokens, or others. Every text of `reply` is a token, whose likeliest follower is the next
    one; behind everything else comes the first."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = template
    for each in reply:
        is_mark = re.fullmatch(r"\[[/A-Z_]+\]|<\|\w+\|>", each) is not None
        tokenizer.add_tokens([AddedToken(each, special=special and is_mark, normalized=False)])
    ids = tokenizer.convert_tokens_to_ids(list(reply))
    size = -(-(TOKENIZER_SIZE + len(reply)) // 64) * 64
    model: Any = random_model(
        vocab_size=size, hidden_size=size, num_hidden_layers=1, eos_token_id=ids[-1], tie_word_embeddings=False
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0) if "norm" in name else weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight[ids[0]] = 1.0
        for before, after in itertools.pairwise(ids):
            model.lm_head.weight[after, before] = 2.0
    save(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["special", "text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_that_says(REPLY, tmp_path_factory.mktemp("thinks"), special=request.param)


COMMON = ("--draft", "none", "--dtype", "fp32", "--temperature", "0", "-q")


@pytest.fixture
def asked(model: Path, triforce: Triforce, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr("triforce_cli.commands.ask.stdin_is_terminal", lambda: True)

    def run(question: str, *args: str) -> dict[str, Any]:
        settings = ("--model", str(model), *COMMON, "--max-tokens", "12", "--json")
        code, out, err = triforce("ask", question, *settings, *args)
        assert code == (6 if "--json-schema" in args else 0), err  # JSON is longer than that
        found: dict[str, Any] = json.loads(out)
        return found

    return run


def told(found: dict[str, Any]) -> tuple[str, str | None]:
    return found["text"], found.get("thoughts")


def test_ask_tells_them_apart(asked: Callable[..., dict[str, Any]]) -> None:
    assert told(asked("2+2?")) == ("It is 4.", "I ponder.")
    assert told(asked("2+2?", "--template-arg", "opens=true")) == ("It is 4.", "I ponder.")
    assert told(asked("What is [THINK]")) == ("It is 4.", "I ponder.")
    assert told(asked("2+2?", "--begin-reply", "Well, ")) == ("Well, [THINK]I ponder.[/THINK]It is 4.", None)
    assert told(asked("2+2?", "--begin-reply", "[THINK]")) == ("It is 4.", "I ponder.")
    assert told(asked("2+2?", "--stop", "4")) == ("It is ", "I ponder.")


def test_a_budget_ends_thoughts_and_nothing_else(asked: Callable[..., dict[str, Any]]) -> None:
    """It wrote a mark into answers that had no thoughts, and into JSON."""
    assert told(asked("2+2?", "--thinking-tokens", "5")) == ("It is 4.", "I ponder.")
    assert told(asked("2+2?", "--thinking-tokens", "0"))[1] is None
    schema = asked("2+2?", "--thinking-tokens", "3", "--json-schema", json.dumps(SCHEMA))["text"]
    assert schema.startswith("[")
    assert not set(schema) - set("[truefals, \n")


def test_batches_have_them_and_close_them_before_an_answer_in_json(
    model: Path, triforce: Triforce, tmp_path: Path, asked: Callable[..., dict[str, Any]]
) -> None:
    """Thoughts were a part of the text, and a line with a schema went on in thoughts that the template had opened."""
    messages = [{"role": "user", "content": "2+2?"}]
    lines = [{"messages": messages}, {"messages": messages, "json_schema": SCHEMA}]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    code, out, err = triforce(
        "generate", "--input-jsonl", str(tmp_path / "in"), "--model", str(model), *COMMON, "--max-tokens", "12"
    )
    assert code == 6, err  # JSON is longer than that
    free, bound = sorted(map(json.loads, out.splitlines()), key=lambda result: result["id"])
    assert told(free) == ("It is 4.", "I ponder.")
    assert (
        bound["stats"]["prompt_tokens"] == asked("2+2?", "--json-schema", json.dumps(SCHEMA))["stats"]["prompt_tokens"]
    )
    assert "thoughts" not in bound


def test_a_beginning_that_may_become_a_mark_is_written_where_the_answer_is_broken_off(
    triforce: Triforce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost."""
    model, add = model_that_says(["[TH", "ree.", "</s>"], tmp_path / "model", special=False), Answer.add

    def interrupted(answer: Answer, step: Step) -> Part:
        add(answer, step)
        raise KeyboardInterrupt

    monkeypatch.setattr(Answer, "add", interrupted)
    monkeypatch.setattr("triforce_cli.commands.ask.stdin_is_terminal", lambda: True)
    for more, written in (((), "[TH\n"), (("--json",), "[TH")):
        code, out, err = triforce("ask", "2+1?", "--model", str(model), *COMMON, "--no-speculation", *more)
        assert (code, err) == (130, "")
        assert (json.loads(out)["text"] if more else out) == written


def batch_of(lines: Sequence[dict[str, Any]], model: Path, triforce: Triforce, tmp_path: Path, *args: str) -> list[Any]:
    """The results of lines, in their order."""
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    settings = ("--model", str(model), *COMMON, "--max-tokens", "12")
    code, out, err = triforce("generate", "--input-jsonl", str(tmp_path / "in"), *settings, *args)
    assert code == 0, err
    return sorted(map(json.loads, out.splitlines()), key=lambda result: int(result["id"]))


def test_lines_of_a_batch_say_whether_and_how_long_there_are_thoughts(
    model: Path, triforce: Triforce, tmp_path: Path, asked: Callable[..., dict[str, Any]]
) -> None:
    """They had neither, though ask and chat do."""
    line: dict[str, Any] = {"messages": [{"role": "user", "content": "2+2?"}]}
    body = {"body": line}  # of OpenAI's, which has no such fields: the command line says it
    own = [line, line | {"thinking": "off"}, line | {"thinking_tokens": 0}, line | {"thinking": "hide"}, body]
    for results in (batch_of(own, model, triforce, tmp_path), batch_of(own[:1], model, triforce, tmp_path)):
        assert told(results[0]) == ("It is 4.", "I ponder.")
    _, off, none, hidden, _ = batch_of(own, model, triforce, tmp_path)
    assert told(hidden) == ("It is 4.", "I ponder.")  # in JSON they are
    assert off["tokens"] == asked("2+2?", "--thinking", "off")["tokens"]
    assert off["stats"]["prompt_tokens"] == asked("2+2?", "--thinking", "off")["stats"]["prompt_tokens"]
    assert told(none) == told(asked("2+2?", "--thinking-tokens", "0"))
    *_, last = batch_of(own, model, triforce, tmp_path, "--thinking", "off")
    assert last["tokens"] == off["tokens"]
    assert batch_of([body], model, triforce, tmp_path, "--thinking-tokens", "0")[0]["tokens"] == none["tokens"]


def test_messages_of_a_batch_are_laid_out_as_the_command_says(model: Path, triforce: Triforce, tmp_path: Path) -> None:
    line = {"messages": [{"role": "user", "content": "2+2?"}]}
    own, opened, other = (
        batch_of([line], model, triforce, tmp_path, *args)[0]["stats"]["prompt_tokens"]
        for args in ((), ("--template-arg", "opens=true"), ("--template", "plain"))
    )
    assert opened > own  # thoughts that the template has opened
    assert other - own == len("User: \n\nAssistant:") - len("[user][assistant]")


def test_a_chat_writes_replies_as_json(model: Path, triforce: Triforce, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"2+2?\nagain\n")))
    args = ("chat", "--model", str(model), *COMMON, "--max-tokens", "12", "--json", "--logprobs", "1", "--stop", "4")
    code, out, err = triforce(*args)
    assert (code, err) == (0, "")
    replies = [json.loads(line) for line in out.splitlines()]
    assert [told(reply) for reply in replies] == [("It is ", "I ponder.")] * 2
    for reply in replies:
        assert [score["token"] for score in reply["logprobs"]] == reply["tokens"]
        assert reply["finish_reason"] == "stop"
        assert reply["stats"]["output_tokens"] == len(reply["tokens"])
    assert replies[1]["stats"]["reused_tokens"] > 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    code, _, err = triforce("chat", "--model", str(model), *COMMON, "--logprobs", "1")
    assert (code, "add --json" in err) == (2, True)


def test_a_chat_shows_them_apart(
    model: Path, triforce: Triforce, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"2+2?\nagain\n")))
    code, out, err = triforce(
        "chat", "--model", str(model), *COMMON[:-1], "--max-tokens", "12", "--session", "thoughts"
    )
    assert (code, out.split("\n")[:2]) == (0, ["It is 4.", "It is 4."]), (out, err)
    assert err.count("I ponder.") == 2


# Each of the model's tokens has one follower, so headers are tokens by themselves.
HARMONY = [
    *("<|channel|>analysis<|message|>", "I ponder.", "<|end|>", "<|start|>assistant<|channel|>final<|message|>"),
    *("It is 4.", "<|return|>", "More.", "</s>"),
]


@pytest.fixture(scope="module", params=[True, False], ids=["special", "text"])
def channels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("channels")
    return model_that_says(HARMONY, folder, special=request.param, template=CHANNELS)


def test_channels_are_thoughts_and_the_answer_in_every_command(
    channels: Path, triforce: Triforce, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A reply ended behind its thoughts, and no mark is shown."""
    monkeypatch.setattr("triforce_cli.commands.ask.stdin_is_terminal", lambda: True)
    common = ("--model", str(channels), *COMMON[:-1], "--max-tokens", "12")
    code, out, err = triforce("ask", "2+2?", *common)
    assert (code, out) == (0, "It is 4.\n"), err
    assert "I ponder." in err
    assert not {"<|", "|>"} & {out[i : i + 2] for i in range(len(out))} | {*re.findall(r"<\||\|>", err)}
    assert "I ponder." not in triforce("ask", "2+2?", *common, "--thinking", "hide")[2]
    code, out, err = triforce("ask", "2+2?", *common, "--json")
    assert (told(json.loads(out)), json.loads(out)["finish_reason"]) == (("It is 4.", "I ponder."), "stop"), err
    results = batch_of([{"messages": [{"role": "user", "content": "2+2?"}]}], channels, triforce, tmp_path)
    assert told(results[0]) == ("It is 4.", "I ponder.")


def test_an_answer_of_channels_in_json_begins_behind_its_header(
    channels: Path, triforce: Triforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triforce_cli.commands.ask.stdin_is_terminal", lambda: True)
    common = ("--model", str(channels), *COMMON, "--max-tokens", "12", "--json")
    free, bound = (
        json.loads(triforce("ask", "2+2?", *common, *more)[1]) for more in ((), ("--json-schema", json.dumps(SCHEMA)))
    )
    assert bound["text"].startswith("[")
    assert "thoughts" not in bound
    header = ChatFormat(Tokenizer.from_folder(channels)).tokenizer.encode_piece("<|channel|>final<|message|>")
    assert bound["stats"]["prompt_tokens"] - free["stats"]["prompt_tokens"] == len(header)


def test_a_chat_keeps_the_answers_of_channels_in_its_session(
    channels: Path, triforce: Triforce, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With its headers a reply was refused by the template at the next message."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    args = ("chat", "--model", str(channels), *COMMON, "--max-tokens", "12", "--session", "channels")
    for messages in (b"2+2?\nagain\n", b"and again\n"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(messages)))
        code, out, err = triforce(*args)
        assert (code, out) == (0, "It is 4.\n" * messages.count(b"\n")), err
    turns = catalogue.inspect(tmp_path / "channels").extra["conversation"]["turns"]
    assert [turn["reply"] for turn in turns] == ["It is 4."] * 3


CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TOOLED = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + TEMPLATE + "{# [TOOL_CALLS] #}"


@pytest.mark.parametrize("special", [True, False])
def test_calls_are_in_json_beside_thoughts(
    special: bool, triforce: Triforce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark that is a special token was no text, so that the call behind it was none; batches had no calls."""
    reply = [THINK, "I ponder.", TALK, "[TOOL_CALLS]", f"[{json.dumps(CALL)}, {{}}]", "</s>"]
    model = str(model_that_says(reply, tmp_path / "model", special=special, template=TOOLED))
    (tmp_path / "tools").write_text(json.dumps(TOOL))
    messages = [{"role": "user", "content": "Rain?"}]
    lines = [{"messages": messages, "tools": [TOOL]}, {"messages": messages}]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr("triforce_cli.commands.ask.stdin_is_terminal", lambda: True)
    settings = ("--model", model, *COMMON[:-1], "--max-tokens", "12")
    code, out, err = triforce("ask", "Rain?", *settings, "--tools", str(tmp_path / "tools"), "--json")
    assert code == 0, err
    assert json.loads(out)["tool_calls"] == [CALL]
    assert told(json.loads(out)) == (f"[TOOL_CALLS][{json.dumps(CALL)}, {{}}]", "I ponder.")
    assert "1 of 2 tool calls cannot be read" in err
    code, out, err = triforce("generate", "--input-jsonl", str(tmp_path / "in"), *settings)
    assert code == 0, err
    offered, none = sorted(map(json.loads, out.splitlines()), key=lambda result: result["id"])
    assert (offered["tool_calls"], offered["thoughts"]) == ([CALL], "I ponder.")
    assert "tool_calls" not in none
    assert "line 1 (id 1): 1 of 2 tool calls cannot be read" in err


def test_earlier_calls_are_texts_where_the_template_has_no_place_for_them(triforce: Triforce, tmp_path: Path) -> None:
    """A conversation that another model had begun was refused."""
    model = str(model_that_says(REPLY, tmp_path / "model", special=True, template=TEMPLATE))
    asked, called = {"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"function": CALL}]}
    told = [asked, {"role": "assistant", "content": json.dumps(CALL)}, {"role": "user", "content": "12"}]
    lines = [{"messages": [asked, called, {"role": "tool", "content": "12"}]}, {"messages": told}]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    loud = [option for option in COMMON if option != "-q"]
    code, out, err = triforce("generate", "--input-jsonl", str(tmp_path / "in"), "--model", model, *loud)
    assert code == 0, err
    found = [json.loads(line)["stats"]["prompt_tokens"] for line in out.splitlines()]
    assert found[0] == found[1]
    assert re.search(r"line 1 \(id 1\): earlier tool calls and their results are written as text", err), err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}, "has no place for tools"),
        ({"messages": [{"role": "user", "content": "a"}], "template_args": {"x": 1}}, "has no place for x"),
        ({"messages": [{"role": "odd", "content": "a"}]}, "template refuses these messages .an odd role"),
        ({"prompt": "a", "tools": [TOOL]}, "tools is for a chat template"),
        ({"prompt": "a", "thinking": "off"}, "thinking is for a chat template"),
        ({"messages": [{"role": "user", "content": "a"}], "thinking": False}, "thinking is false; it must be one of"),
        ({"messages": [{"role": "user", "content": "a"}], "thinking_tokens": -1}, "thinking_tokens is -1; it must be"),
        ({"prompt": "a", "timeout": 0}, "timeout is 0; it must be a number of seconds above 0"),
        ({"messages": [{"role": "user", "content": "a"}], "cite": 1}, "cite is 1; it must be true or false"),
    ],
)  # fmt: skip
def test_what_a_template_cannot_do_is_said_with_its_line(
    line: dict[str, Any], message: str, triforce: Triforce, tmp_path: Path
) -> None:
    template = TEMPLATE + "{% if messages[0].role == 'odd' %}{{ raise_exception('an odd role') }}{% endif %}"
    model = str(model_that_says(REPLY, tmp_path / "model", special=True, template=template))
    (tmp_path / "in").write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps(line))
    code, out, err = triforce("generate", "--input-jsonl", str(tmp_path / "in"), "--model", model, *COMMON)
    assert (code, out) == (2, "")
    assert re.search(f"line 2.*{message}", err), err
