"""`triforce ask`: a question, documents and a template in, one answer out; and where it comes from."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.models import save_pair
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.passages import NUM_ROWS, Attended, Passage
from offload.engine.request import GenerationRequest
from offload.errors import UsageError
from offload.plan.options import Options
from test_cli_options import first_used
from triforce_cli.answering.citations import citations
from triforce_cli.answering.request import Wanted
from triforce_cli.answering.single import SingleAnswer
from triforce_cli.app import app
from triforce_cli.batch.openai import own
from triforce_cli.batch.records import read_records
from triforce_cli.prompts.conversation import Conversation, Document
from triforce_cli.prompts.formats import ChatFormat
from triforce_cli.settings.placeholders import filled
from triforce_cli.tools.tools import read_tools

Triforce = Callable[..., tuple[int, str, str]]
BOOK = "It was a dull day.\nThe key is under the mat.\nNobody came.\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder, context=1024)
    (folder / "book.txt").write_text(BOOK)
    (folder / "question.txt").write_text("Where is the {thing}?\n")
    return folder


@pytest.fixture
def asked(folder: Path, triforce: Triforce, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Of `triforce ask ARGS`; stdin: what is piped in, None: a terminal."""

    def run(*args: str, stdin: str | None = None) -> str:
        piped = io.TextIOWrapper(io.BytesIO((stdin or "").encode()))
        monkeypatch.setattr("triforce_cli.documents.prompt.stdin_is_terminal", lambda: stdin is None)
        monkeypatch.setattr("triforce_cli.commands.ask.stdin_is_terminal", lambda: stdin is None)
        monkeypatch.setattr("triforce_cli.screen.utf8.read_stdin", lambda what, note: piped.buffer.read())
        common = ("--model", str(folder / "target"), "--draft", "none", "--dtype", "fp32", "--temperature", "0", "-q")
        code, out, err = triforce("ask", *common, "--max-tokens", "12", *args)
        assert (code, err) == (0, ""), err
        return out

    return run


def expected(folder: Path, conversation: Conversation, begin: str = "") -> list[int]:
    """The tokens of the answer, by the engine."""
    tokenizer = load_tokenizer(folder / "target", None)
    chat_format = ChatFormat(tokenizer)
    prompt = chat_format.prompt(conversation, begin).tokens
    options = Options(device="cpu", dtype="fp32")
    plan = plan_request(folder / "target", None, options, num_prompt_tokens=len(prompt), max_tokens=12)
    request = GenerationRequest(
        prompt,
        SamplingParams(temperature=0.0),
        max_tokens=12,
        stop=chat_format.stops,
        end_tokens=chat_format.end_tokens,
    )
    with Engine.load(plan, folder / "target", None, tokenizer) as engine:
        return [token for step in engine.generate(request) for token in step.tokens]


def test_the_question_stands_behind_documents_in_the_models_template(folder: Path, asked: Callable[..., str]) -> None:
    conversation = Conversation().with_system("Be brief.").with_document(Document("book.txt", BOOK)).asked("Where?")
    wanted = expected(folder, conversation)
    system = folder / "system.txt"
    system.write_text("Be brief.")
    args = ("Where?", "--file", str(folder / "book.txt"), "--json")
    assert json.loads(asked(*args, "--system", "Be brief."))["tokens"] == wanted
    assert json.loads(asked(*args, "--system-file", str(system)))["tokens"] == wanted


def test_piped_text_is_a_document_or_the_question(folder: Path, asked: Callable[..., str]) -> None:
    piped = expected(folder, Conversation().with_document(Document("standard input", BOOK)).asked("Where?"))
    assert json.loads(asked("Where?", "--json", stdin=BOOK))["tokens"] == piped
    question = expected(folder, Conversation().asked("Where?"))
    assert json.loads(asked("--json", stdin="Where?"))["tokens"] == question
    assert json.loads(asked("Where?", "--json", stdin=""))["tokens"] == question


def test_what_is_taken_from_standard_input_beside_a_question_is_named(
    folder: Path, triforce: Triforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`while read l; do triforce ask "Say $l"; done` asked once, with the loop's other lines as a document."""
    common = ("--model", str(folder / "target"), "--draft", "none", "--max-tokens", "2")
    for args, what in (
        (("ask", "Say one"), "a document"),
        (("generate", "--prompt", "Say one"), "the beginning of the prompt"),
    ):
        for piped, said in (("two\n", f"4 characters, read as {what}; </dev/null leaves it out"), ("", "")):
            monkeypatch.setattr("triforce_cli.screen.utf8.read_stdin", lambda what, note, piped=piped: piped.encode())
            code, _, err = triforce(*args, *common)
            assert code == 0
            assert [line for line in err.splitlines() if line.startswith("standard input")] == (
                [f"standard input: {said}"] if said else []
            )
            assert triforce(*args, *common, "-q")[2] == ""
    monkeypatch.setattr("triforce_cli.screen.utf8.read_stdin", lambda what, note: b"Where?")
    for command in ("ask", "generate"):  # all that there is: nothing else could be meant
        assert "standard input" not in triforce(command, *common)[2]


@pytest.mark.parametrize(
    ("written", "question"),
    [("    return x\n", "    return x"), ("a\r\n", "a"), ("a\n\n", "a\n"), (" a ", " a "), ("a\r", "a\r")],
)
def test_one_last_line_end_belongs_to_the_file_and_all_else_to_the_question(
    written: str, question: str, folder: Path, asked: Callable[..., str]
) -> None:
    """White space at the beginning of a question, code for example, was lost."""

    def num_tokens(*args: str, stdin: str | None = None) -> int:
        count: int = json.loads(asked(*args, "--max-tokens", "1", "--json", stdin=stdin))["stats"]["prompt_tokens"]
        return count

    chat_format = ChatFormat(load_tokenizer(folder / "target", None))
    (folder / "written.txt").write_bytes(written.encode())
    wanted = len(chat_format.prompt(Conversation().asked(question)).tokens)
    assert num_tokens("--prompt-file", str(folder / "written.txt")) == wanted
    assert num_tokens(stdin=written) == wanted
    assert num_tokens(written) == len(chat_format.prompt(Conversation().asked(written)).tokens)
    system = len(chat_format.prompt(Conversation().with_system(question).asked("x")).tokens)
    assert num_tokens("x", "--system-file", str(folder / "written.txt")) == system
    assert num_tokens("x", "--system", question) == system


def test_a_question_file_may_have_placeholders(folder: Path, asked: Callable[..., str]) -> None:
    wanted = expected(folder, Conversation().asked("Where is the key?"))
    found = asked("--prompt-file", str(folder / "question.txt"), "--var", "thing=key", "--json")
    assert json.loads(found)["tokens"] == wanted


def test_an_answer_begins_as_it_is_to_and_ends_with_a_line(folder: Path, asked: Callable[..., str]) -> None:
    found = json.loads(asked("Where?", "--begin-reply", "Under", "--json"))
    assert found["text"].startswith("Under")
    assert found["tokens"] == expected(folder, Conversation().asked("Where?"), "Under")
    text = asked("Where?", "--begin-reply", "Under")
    assert text.startswith("Under")
    assert text.endswith("\n")
    assert asked("Where?", "--begin-reply", "Under", "-o", str(folder / "out.txt")) == ""
    assert (folder / "out.txt").read_text() == text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "there is no question"),
        (("what", "is", "this"), "put the question in quotes: triforce ask 'what is this'"),
        (("Why?", "--file", "a.pdf", "b.pdf"), "give each document, or their folder, a --file of its own"),
        (("Why?", "--template-arg", "tools=[5]"), "tools is no variable to set"),
        (("Why?", "--template-arg", 'a="\\ud800"'), "half of a surrogate pair"),
        (("Why?", "--prompt-file", "x"), "there are two questions"),
        (("Why?", "--system", "a", "--system-file", "x"), "two system messages"),
        (("Where is {it}?", "--var", "that=x"), "has the placeholder {it}; --var names that"),
        (("Why?", "--var", "1=x"), "var is '1=x'"),
        (("Why?", "--file", "nowhere.txt"), "cannot be read from nowhere.txt"),
        (("Why?", "--template", "none"), "template is 'none'"),
        (("Why?", "--thinking", "loud"), "thinking is 'loud'"),
        (("Why?", "--json", "--jsonl"), "two forms of one answer"),
        (("Why?", "--logprobs", "1"), "--logprobs go into JSON"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    args: tuple[str, ...], said: str, folder: Path, triforce: Triforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triforce_cli.commands.ask.stdin_is_terminal", lambda: True)
    code, out, err = triforce("ask", "--model", str(folder / "target"), *args)
    assert (code, out) == (2, "")
    assert said in err


def test_placeholders_are_names_in_braces() -> None:
    values = {"a": "{b}", "b": "x"}
    assert filled("{a}{{a}} {1} {}", values, "it") == "{b}{a} {1} {}"
    assert filled("{a} {{", {}, "it") == "{a} {{"
    with pytest.raises(UsageError, match="placeholder"):
        filled("{c}", values, "it")


def test_lines_of_openais_format_are_lines_of_our_own() -> None:
    body = {
        "model": "x", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 5, "n": 1, "stop": None,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "logprobs": True, "top_logprobs": 2, "temperature": 0,
    }  # fmt: skip
    found = own({"custom_id": "a", "url": "/v1/chat/completions", "body": body}, "line 1", str)
    assert found == {
        "id": "a", "messages": body["messages"], "max_tokens": 5, "json_schema": {"type": "object"}, "logprobs": 2,
        "temperature": 0,
    }  # fmt: skip
    assert own({"body": {"response_format": {"type": "json_object"}}}, "", str)["json_schema"] == {"type": "object"}
    for wrong, said in [
        ({"url": "/v1/embeddings", "body": {}}, "only requests to"),
        ({"body": {"n": 2}}, "n is 2, it can only be 1"),
        ({"body": {"response_format": {"type": "xml"}}}, "response_format"),
    ]:
        with pytest.raises(UsageError, match=said):
            own(wrong, "line 1", str)


SCHEMA = {"type": "object", "required": ["a"]}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": None}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"json_schema": SCHEMA}),
        ({"tools": [1]}, {"tools": [1]}),
        ({"tools": [1], "tool_choice": "auto"}, {"tools": [1], "tool_choice": "auto"}),
        ({"tools": [1], "tool_choice": None, "parallel_tool_calls": True}, {"tools": [1], "parallel_tool_calls": True}),
        ({"tools": [1], "tool_choice": "none"}, {}),
        ({"tools": None, "logit_bias": None, "n": None, "user": None, "logprobs": None, "top_logprobs": None}, {}),
        ({"reasoning_effort": "low"}, {"template_args": {"reasoning_effort": "low"}}),
        ({"reasoning_effort": None}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"template_args": {"enable_thinking": False}}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"a": 1}},
            {"template_args": {"reasoning_effort": "low", "a": 1}},
        ),
        ({"logprobs": False, "top_logprobs": 3}, {}),
        ({"response_format": {"type": "json_object", "json_schema": None}}, {"json_schema": {"type": "object"}}),
        ({"max_tokens": 3, "max_completion_tokens": 3}, {"max_tokens": 3}),
        ({"model": "m", "user": "u", "metadata": {}, "service_tier": "auto", "stream": False, "n": 1}, {}),
    ],
)  # fmt: skip
def test_a_field_of_openais_is_one_of_our_own_or_changes_nothing(body: dict[str, Any], found: dict[str, Any]) -> None:
    """A schema beside json_object was left out, and so were tools."""
    assert own({"body": body}, "line 1", str) == found


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "needs"),
        ({"response_format": {"type": "json_object", "strict": True}}, "has 'strict', which is not understood"),
        ({"response_format": "json"}, "its type may be one of text, json_object, json_schema"),
        ({"response_format": {"type": ["json_object"]}}, "its type may be one of text, json_object, json_schema"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "are one limit, and say 3 and 4"),
        ({"logprobs": 5}, "logprobs is 5, it can only be true or false"),
        ({"top_logprobs": 5}, "top_logprobs needs logprobs"),
        ({"tool_choice": "required"}, "tool_choice demands a call, and no functions are offered"),
        ({"tool_choice": {"type": "functions"}}, 'tool_choice is {"type": "functions"}'),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls is 1"),
        ({"stream": True}, "stream is true, it can only be false"),
        ({"functions": []}, "there is no field 'functions'"),
        ({"tools": [{"name": "f"}]}, "tool 1 is not"),
        ({"tools": "f"}, "tools is .*; it must be a list of definitions"),
        ({"chat_template_kwargs": 3, "reasoning_effort": "low"}, "template_args is 3; it must be an object"),
        ({"chat_template_kwargs": {"messages": []}}, "messages is no variable to set"),
        ({"chat_template_kwargs": {"tools": [3]}}, "tools is no variable to set"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 has a content that is no text"),
    ],
)
def test_a_field_of_openais_that_is_not_to_be_had_is_named(body: dict[str, Any], message: str) -> None:
    line = json.dumps({"body": {"messages": [{"role": "user", "content": "Hi"}]} | body})
    with pytest.raises(UsageError, match=f"line 1.*{message}"):
        read_records(line, "in", Wanted(max_tokens=5, sampling=SamplingParams()))


def test_conversations_of_a_batch_are_answered_like_questions(folder: Path, tmp_path: Path, triforce: Triforce) -> None:
    message = {"role": "user", "content": "Where?"}
    lines = [
        {"custom_id": "a", "body": {"messages": [message], "max_tokens": 12, "temperature": 0}},
        {"messages": [message, {"role": "assistant", "content": "Under"}], "max_tokens": 12, "temperature": 0},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    args = ("--model", str(folder / "target"), "--draft", "none", "--dtype", "fp32", "--input-jsonl", str(source), "-q")
    code, out, err = triforce("generate", *args)
    assert (code, err) == (0, "")
    found = {line["id"]: line for line in map(json.loads, out.splitlines())}
    assert found["a"]["tokens"] == expected(folder, Conversation().asked("Where?"))
    assert found[2]["tokens"] == expected(folder, Conversation().asked("Where?"), "Under")
    assert found[2]["text"].startswith("Under")


# Where an answer comes from


def test_a_passage_is_named_by_document_and_lines() -> None:
    class Letters:
        def decode(self, tokens: Any) -> str:
            return "".join(map(chr, tokens))

    tokenizer: Any = Letters()
    other = Document("other.txt", "Something else.\n" * 20)
    twice = Document("book.txt", BOOK + "filler line of text\n" * 30 + BOOK)
    prompt = list(map(ord, f"<system>{other.text}{twice.text}<question>"))
    text = "".join(map(chr, prompt))
    late, early = text.rfind("key is under"), text.find("key is under")
    found = citations(
        [Passage(late - 2, late + 16, (0.5,)), Passage(0, 8, (0.3,)), Passage(early - 2, early + 16, (0.2,))],
        prompt, [other, twice], tokenizer, "",
    )  # fmt: skip
    assert [(each.document, each.first_line, each.last_line) for each in found] == [
        ("book.txt", 35, 35),
        ("book.txt", 2, 2),
    ]
    assert "key is under" in found[0].text
    end = text.find("<question>")
    [over] = citations([Passage(end - 30, end + 10, (0.1,))], prompt, [other, twice], tokenizer, "")
    assert (over.document, over.last_line) == ("book.txt", 36)  # a passage that reaches over the document's end
    short = Document("short.txt", "Yes.\n")
    [all_of_it] = citations(
        [Passage(0, 40, (0.1,))], list(map(ord, f"<system of it>{short.text}<question>" * 2)), [short], tokenizer, ""
    )
    assert (all_of_it.document, all_of_it.first_line, all_of_it.last_line) == ("short.txt", 1, 1)
    assert str(found[1]).startswith("book.txt, line 2 (20%): ")
    many = Document("many.txt", "one two three\nfour five six\nseven eight nine\n")
    [lines] = citations([Passage(0, 60, (0.1,))], list(map(ord, f"    {many.text}    ")), [many], tokenizer, "")
    assert str(lines).startswith("many.txt, lines 1 to 3 (10%): one two three four")


def test_masses_of_a_text_do_not_depend_on_who_drafted_it(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "target", folder / "draft")
    prompt = tokenizer.encode(BOOK * 6)
    found = []
    for settings in ({"speculation": False}, {"gamma": 4, "draft_gamma": 2, "budget": 64, "chunk": 16}, {"chunk": 16}):
        options = Options(device="cpu", dtype="fp32", masses=True, **settings)  # type: ignore[arg-type]
        draft = folder / "draft" if "gamma" in settings else None
        plan = plan_request(folder / "target", draft, options, num_prompt_tokens=len(prompt), max_tokens=24)
        request = GenerationRequest(prompt, SamplingParams(temperature=0.0), max_tokens=24, passages=4)
        with Engine.load(plan, folder / "target", draft, tokenizer) as engine:
            *_, last = engine.generate(request)
            assert not engine.worker.full.keep_mass
        found.append(last.passages)
    assert len(found[0]) == 4
    for others in found[1:]:
        assert [(each.start, each.end) for each in others] == [(each.start, each.end) for each in found[0]]
        assert [each.share for each in others] == pytest.approx([each.share for each in found[0]], rel=1e-3)


def test_the_row_that_gave_a_token_is_found_for_the_first_one_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of one token had no passages: the pass over the prompt's last rows was left out."""
    tokenizer, masses, begun = load_tokenizer(folder / "target", None), list[torch.Tensor](), list[int]()
    monkeypatch.setattr(Attended, "begin", lambda _, rows: (masses.append(rows[-1]), begun.append(len(rows))))
    monkeypatch.setattr(Attended, "add", lambda _, mass, num_rows: masses.append(mass))
    prompt = tokenizer.encode(BOOK * 6)
    options = Options(device="cpu", dtype="fp32", masses=True, speculation=False)
    plan = plan_request(folder / "target", None, options, num_prompt_tokens=len(prompt), max_tokens=3)
    with Engine.load(plan, folder / "target", None, tokenizer) as engine:

        def tokens(prompt: list[int], count: int) -> list[int]:
            request = GenerationRequest(prompt, SamplingParams(temperature=0.0), max_tokens=count, passages=1)
            return [token for step in engine.generate(request) for token in step.tokens]

        first, _ = tokens(prompt, 2)
        assert plan.placement.rows > 1  # of the first pass
        assert tokens([*prompt, first], 1)
        assert begun == [min(NUM_ROWS, plan.placement.rows)] * 2
    of_the_first, of_the_second, again = (mass[..., : len(prompt) // engine.worker.full.mass_chunk] for mass in masses)
    torch.testing.assert_close(of_the_second, again, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(of_the_first, of_the_second, rtol=1e-3, atol=1e-5)


def test_passages_want_a_plan_that_records_masses(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "target", None)
    options = Options(device="cpu", dtype="fp32", speculation=False)
    plan = plan_request(folder / "target", None, options, num_prompt_tokens=9, max_tokens=4)
    with (
        Engine.load(plan, folder / "target", None, tokenizer) as engine,
        pytest.raises(UsageError, match="masses=True"),
    ):
        list(engine.generate(GenerationRequest([1, 2, 3], SamplingParams(), max_tokens=2, passages=1)))


def test_cite_names_passages_below_the_answer_and_in_json(folder: Path, triforce: Triforce) -> None:
    book = folder / "long.txt"
    book.write_text("".join(f"Line {i} says nothing of note.\n" for i in range(25)))
    common = ("--model", str(folder / "target"), "--draft", "none", "--max-tokens", "8", "--file", str(book))
    question = folder / "why.txt"
    question.write_text("Why?")
    args = (*common, "--prompt-file", str(question), "--cite")
    code, out, err = triforce("ask", *args, "--json", "-q")
    assert (code, err) == (0, "")
    found = json.loads(out)["citations"]
    assert 1 <= len(found) <= 3
    assert all(each["document"] == "long.txt" and 1 <= each["first_line"] <= each["last_line"] <= 25 for each in found)
    assert all(0 < each["share"] <= 1 for each in found)
    assert sum(each["share"] for each in found) <= 1
    code, _, err = triforce("ask", *args)
    assert code == 0
    assert "[1] long.txt, line" in err
    code, out, _ = triforce("ask", *args, "--choice", "y,n", "--max-tokens", "1", "--json")
    assert len(json.loads(out)["tokens"]) == 1
    assert json.loads(out)["citations"]
    assert "[1] long.txt, line" in triforce("ask", *args, "--max-tokens", "1")[2]
    no_documents = (*common[:-2], "--prompt-file", str(question), "--cite")
    code, out, err = triforce("ask", *no_documents, "--json")
    assert (code, json.loads(out)["citations"]) == (0, [])
    assert "no place in a document stands out" in err


def test_generate_names_passages_of_documents_and_of_standard_input(
    folder: Path, triforce: Triforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = folder / "long.txt"
    book.write_text("".join(f"Line {i} says nothing of note.\n" for i in range(25)))
    common = ("--model", str(folder / "target"), "--draft", "none", "--max-tokens", "8", "--temperature", "0")
    args = ("generate", *common, "--cite")
    code, out, err = triforce(*args, "--prompt-file", str(book), "--json", "-q")
    assert (code, err) == (0, "")
    found = json.loads(out)["citations"]
    assert 1 <= len(found) <= 3
    assert {each["document"] for each in found} == {"long.txt"}
    assert "[1] long.txt, line" in triforce(*args, "--prompt-file", str(book))[2]
    monkeypatch.setattr("triforce_cli.screen.utf8.read_stdin", lambda what, note: book.read_bytes())
    piped = json.loads(triforce(*args, "--json", "-q")[1])["citations"]
    assert piped == [each | {"document": "standard input"} for each in found]


def test_lines_of_a_batch_name_passages_of_their_prompt_or_messages(
    folder: Path, triforce: Triforce, tmp_path: Path
) -> None:
    book = "".join(f"Line {i} says nothing of note.\n" for i in range(25))
    message, later = ({"role": "user", "content": text} for text in (book, "Why?"))
    said = {"role": "assistant", "content": "So."}
    lines = [
        {"prompt": book, "cite": True},
        {"messages": [message, said, later], "cite": True},
        {"prompt": book},
    ]
    (source := tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    common = ("--model", str(folder / "target"), "--draft", "none", "--max-tokens", "8", "--temperature", "0", "-q")

    def results(*args: str) -> list[Any]:
        code, out, err = triforce("generate", *common, "--input-jsonl", str(source), *args)
        assert (code, err) == (0, "")
        return sorted(map(json.loads, out.splitlines()), key=lambda result: int(result["id"]))

    alone, together = results("--batch", "1"), results("--batch", "2")
    found = [result.get("citations") for result in together]
    assert found == [result.get("citations") for result in alone]
    assert found[2] is None
    assert {each["document"] for each in found[0]} == {"prompt"}
    assert {each["document"] for each in found[1]} == {"message 1"}
    prompt = folder / "long.txt"
    prompt.write_text(book)
    code, out, _ = triforce("generate", *common, "--prompt-file", str(prompt), "--cite", "--json")
    assert [each | {"document": "prompt"} for each in json.loads(out)["citations"]] == found[0]
    assert results("--cite")[2]["citations"] == found[0]
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps(json.loads(triforce("generate", *common, "--prompt-file", str(prompt), "--json")[1])["plan"])
    )
    code, _, err = triforce("generate", *common, "--input-jsonl", str(source), "--plan", str(plan))
    assert (code, "--cite is not what the plan of --plan has" in err) == (2, True)


def test_ask_plans_for_masses_only_where_they_are_wanted(folder: Path) -> None:
    for args, wanted in (((), False), (("--cite",), True)):
        call = app(["ask", "Why?", "--model", str(folder / "target"), *args], standalone_mode=False)
        assert first_used(SingleAnswer, "under_way", call).setup.options.masses is wanted


# Tools


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_tools_are_read_as_the_openai_api_has_them() -> None:
    assert read_tools(json.dumps(WEATHER)) == read_tools(json.dumps([WEATHER])) == [WEATHER]
    half = json.dumps({"function": {"name": "f", "description": "\ud800"}})
    for text, said in [
        ("{", "not JSON"),
        ("[3]", "tool 1 is not"),
        ('[{"function": {}}]', "tool 1 is not"),
        (half, "tool 1 has half of a surrogate pair"),
    ]:
        with pytest.raises(UsageError, match=said):
            read_tools(text)


def test_a_template_without_a_place_for_tools_says_so(folder: Path, triforce: Triforce, tmp_path: Path) -> None:
    tools, question = tmp_path / "tools.json", tmp_path / "q.txt"
    tools.write_text(json.dumps([WEATHER]))
    question.write_text("Why?")
    args = ("--model", str(folder / "target"), "--prompt-file", str(question), "--tools", str(tools))
    code, out, err = triforce("ask", *args)
    assert (code, out) == (2, "")
    assert "has no place for tools" in err


def test_who_asks_the_demo_model_is_told_which_one_answers(triforce: Triforce, tmp_path: Path) -> None:
    question = tmp_path / "q.txt"
    question.write_text("Why?")
    code, _, err = triforce("ask", "--prompt-file", str(question), "--max-tokens", "2")
    assert code == 0
    assert "triforce pull qwen2.5-0.5b-instruct" in err
    assert "988 MB, Apache 2.0" in err


def test_what_stands_beside_the_body_is_named() -> None:
    """It was ignored."""
    with pytest.raises(UsageError, match="line 1: max_tokens stands beside body"):
        own({"body": {}, "max_tokens": 3}, "line 1", str)
