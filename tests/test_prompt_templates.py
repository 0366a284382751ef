"""Prompt templates: what they are filled with, what is refused, and where they are listed and changed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.errors import UsageError
from test_cli_options import first_used
from triforce_cli.app import app
from triforce_cli.commands.ask import QuestionSource
from triforce_cli.screen.output import Output
from triforce_cli.settings import configuration
from triforce_cli.settings.placeholders import placeholders_in, replaced
from triforce_cli.settings.prompt_templates import PromptTemplate

Run = Callable[..., tuple[int, str, str]]
FILE = """
[templates.letter]
prompt = "To {whom}, {{so}}:\\n{input}"
system = "You are {tone}."
begin-reply = "Dear {whom}"

[templates.sum]
prompt = "Sum it up, {{x}}."
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(FILE)
    monkeypatch.setenv(configuration.VARIABLE, str(file))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return file


@pytest.fixture
def said(file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[PromptTemplate, list[str]]]:
    """(texts, texts of piped documents) of `triforce ask ARGS`. stdin: None is a terminal."""

    def said(*args: str, stdin: str | None = None) -> tuple[PromptTemplate, list[str]]:
        piped = io.BytesIO((stdin or "").encode())
        monkeypatch.setattr("triforce_cli.commands.ask.stdin_is_terminal", lambda: stdin is None)
        monkeypatch.setattr("triforce_cli.screen.utf8.read_stdin", lambda what, note: piped.read())
        source = first_used(QuestionSource, "texts", app(["ask", *args], standalone_mode=False))
        with Output(quiet=True) as output:
            return source.texts(output), [document.text for document in source.piped(output)]

    return said


VARS = ("--var", "whom=Ann", "--var", "tone=polite")


def test_the_question_or_piped_text_is_the_input(said, tmp_path) -> None:
    wanted = PromptTemplate("letter", "To Ann, {so}:\nLate {x}.", "You are polite.", "Dear Ann")
    assert said("-t", "letter", "Late {{x}}.", *VARS) == (wanted, [])
    (tmp_path / "late.txt").write_text("Late {{x}}.\n")
    assert said("-t", "letter", "--prompt-file", str(tmp_path / "late.txt"), *VARS) == (wanted, [])
    assert said("-t", "letter", "Late {{x}}.", *VARS, stdin="a text") == (wanted, ["a text"])


@pytest.mark.parametrize("template", [(), ("-t", "letter")])
@pytest.mark.parametrize("source", [(), ("--prompt-file", "-")])
def test_piped_text_is_data_whose_braces_stay(said, template: tuple[str, ...], source: tuple[str, ...]) -> None:
    """A program's text beside --var was refused for a placeholder {name}, and lost a brace of each two."""
    code = 'f"{name} {whom} {{x}}"'
    prompt = f"To Ann, {{so}}:\n{code}" if template else code
    (texts, documents) = said(*template, *source, *VARS, stdin=f"{code}\n")
    assert (texts.prompt, documents) == (prompt, [])


def test_a_template_without_input_is_the_question_and_piped_text_a_document(said) -> None:
    wanted = PromptTemplate("sum", "Sum it up, {x}.")
    assert said("-t", "sum") == (wanted, [])
    assert said("-t", "sum", stdin="a text") == (wanted, ["a text"])


def test_what_is_typed_wins_over_the_template(said) -> None:
    texts, _ = said("-t", "letter", "x", *VARS, "--system", "Be {tone}.", "--begin-reply", "Hi")
    assert (texts.system, texts.begin_reply) == ("Be polite.", "Hi")


def test_a_value_is_no_template_itself(said) -> None:
    texts, _ = said("-t", "letter", "x", "--var", "whom={tone}", "--var", "tone={input}")
    assert (texts.prompt, texts.system) == ("To {tone}, {so}:\nx", "You are {input}.")


def test_the_variable_and_the_file_name_templates_too(said, monkeypatch) -> None:
    monkeypatch.setenv("TRIFORCE_PROMPT_TEMPLATE", "sum")
    assert said()[0].name == "sum"


def test_without_a_template_all_is_as_before(said) -> None:
    assert said("Is {this} one?", "--system", "{a}") == (PromptTemplate("", "Is {this} one?", "{a}"), [])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-t", "letter", "x"), "the template letter has the placeholder {tone}; give --var tone=TEXT --var whom=TEXT"),
        (("-t", "letter", "x", "--var", "tone=a"), "has the placeholder {whom}; give --var whom=TEXT"),
        (("-t", "letter", *VARS, "--var", "input=x"), "--var names input"),
        (("-t", "letter", *VARS), "there is no question"),
        (("-t", "sum", "x"), "the template sum has no {input}, so there is no place for the question"),
        (("-t", "sum", "--prompt-file", "x"), "so there is no place for the question"),
        (("-t", "nope", "x"), "has no template 'nope'; there are: letter, sum"),
    ],
)
def test_what_does_not_fit_is_refused(args, message, file, triforce, monkeypatch) -> None:
    monkeypatch.setattr("triforce_cli.commands.ask.stdin_is_terminal", lambda: True)
    code, out, err = triforce("ask", *args)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("templates = 3", "templates must be tables"),
        ("[templates]\na = 'x'", "templates.a must be a table with the key prompt"),
        ("[templates.a]\nsystem = 'x'", "templates.a.prompt is missing"),
        ("[templates.a]\nprompt = ' '", 'templates.a.prompt is " "; it must be a text, not empty'),
        ("[templates.a]\nprompt = 'x'\nsystem = 3", "templates.a.system is 3; it must be a text"),
        ("[templates.a]\nprompt = 'x'\nsytem = 'x'", "templates.a.sytem is not known; there are prompt, system"),
        ("[templates.'a b']\nprompt = 'x'", "templates has the name 'a b'"),
    ],
)
def test_a_bad_table_is_refused(text: str, message: str, file: Path, triforce: Run) -> None:
    file.write_text(text)
    code, _, err = triforce("version")
    assert (code, message in err, str(file) in err) == (2, True, True), err


def test_config_show_lists_templates(file: Path, triforce: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = triforce("config", "show", "ask")
    assert out.endswith(
        "\nprompt templates (triforce ask -t NAME):\n"
        "  letter  {tone} {whom} {input}  To {whom}, {{so}}:\\n{input}\n"
        "  sum     -                      Sum it up, {{x}}.\n"
    )
    assert "prompt templates" not in triforce("config", "show", "chat")[1]
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, triforce("config", "show", "ask")[1].splitlines()[-2:])) == 40
    letter, _ = json.loads(triforce("config", "show", "--json")[1])["templates"]
    assert letter == {
        "name": "letter",
        "prompt": "To {whom}, {{so}}:\n{input}",
        "system": "You are {tone}.",
        "begin_reply": "Dear {whom}",
        "placeholders": ["tone", "whom", "input"],
    }


def test_placeholders_are_names_in_single_braces() -> None:
    assert placeholders_in("{a} {{b}} {1} {c_2}{a}") == ["a", "c_2", "a"]
    assert replaced("{{a}}", {}, "it") == "{a}"
    with pytest.raises(UsageError, match="placeholder"):
        replaced("{a}", {}, "it")
