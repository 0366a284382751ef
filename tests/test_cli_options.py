"""The options of `triforce generate`, parsed without an engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import typer

from kit.sampler_values import others
from offload.decode.sampling import SETTINGS
from offload.errors import UsageError
from offload.grammar.constraint import Constraint
from offload.session.names import session_folder
from triforce_cli.answering.single import SingleAnswer
from triforce_cli.app import app, main
from triforce_cli.options.flags import _offloaded
from triforce_cli.settings import tree
from triforce_cli.setup import choice
from triforce_cli.setup.choice import choose_models

WORDS = Path(__file__).parent / "words.lark"
FLAGS = [  # option, what is typed, where it arrives, as what
    ("--prompt", "In short:", "prompt", "In short:"),
    ("--prompt-file", "-", "documents.prompt_file", [Path("-")]),
    ("--max-tokens", "7", "max_tokens", 7),
    *(
        (f"--{row.label}", str(value), f"sampling.{row.name}", value)
        for row in SETTINGS.values()
        if row.kind is not bool
        for value in others(row)[:1]
    ),
    ("--json-schema", '{"type": "object"}', "sampling.constraint", Constraint("json-schema", '{"type": "object"}')),
    ("--json-schema", "true", "sampling.constraint", Constraint("json-schema", "true")),
    ("--regex", "[0-9]+", "sampling.constraint", Constraint("regex", "[0-9]+")),
    ("--choice", "yes,no", "sampling.constraint", Constraint("choice", '["yes", "no"]')),
    ("--grammar", str(WORDS), "sampling.constraint", Constraint("grammar", WORDS.read_text(encoding="utf-8"))),
    ("--dry-breaker", ";", "sampling.dry_breakers", (";",)),
    ("--logit-bias", "42=-5", "sampling.logit_bias", ((42, -5.0),)),
    ("--logit-bias", "a=b=-inf", "sampling.logit_bias", (("a=b", -math.inf),)),
    ("--stop", "END", "stops", ("END",)),
    ("--context", "4096", "options.context", 4096),
    ("--budget", "512", "options.budget", 512),
    ("--chunk", "8", "options.chunk", 8),
    ("--gamma", "0", "options.gamma", 0),
    ("--draft-gamma", "3", "options.draft_gamma", 3),
    ("--sinks", "4", "options.sinks", 4),
    ("--window", "100", "options.window", 100),
    ("--device", "cuda:1", "options.device", "cuda:1"),
    ("--gpus", "2", "options.gpus", 2),
    ("--gpus", "auto", "options.gpus", None),
    ("--dtype", "fp32", "options.dtype", "fp32"),
    ("--offload", "kv", "options.offload", frozenset({"kv"})),
    ("--device-memory", "2.5", "options.device_memory", 2.5),
    ("--host-memory", "1.5", "options.host_memory", 1.5),
    ("--weight-bits", "6", "options.weight_bits", 6),
    ("--kv-bits", "16", "options.kv_bits", 16),
    ("--link-bits", "12", "options.link_bits", 12),
    ("--cpu-experts", "5", "options.cpu_experts", 5),
    ("--cache", "kept", "session", Path("kept")),
    ("--session", "book", "session", session_folder("book")),
    ("--thinking", "off", "thinks", False),
    ("--thinking-tokens", "5", "thought_tokens", 5),
    ("--timeout", "1.5", "timeout", 1.5),
    ("--output", "kept.txt", "file", Path("kept.txt")),
]
SWITCHES = [
    ("--no-speculation", "options.speculation", False),
    ("--no-lookup", "options.lookup", False),
    ("--stats", "stats", True),
    ("--cite", "cites", True),
    ("--compare", "compares", True),
    ("--json", "form", "json"),
    ("--jsonl", "form", "jsonl"),
    ("--extract", "form", "code"),
    ("--echo", "echo", True),
    ("--quiet", "quiet", True),
    *((f"--{row.label}", f"sampling.{row.name}", True) for row in SETTINGS.values() if row.kind is bool),
]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tmp_path)


def variable_of(flag: str) -> str:
    return "TRIFORCE_" + flag[2:].replace("-", "_").upper()


T = TypeVar("T")


def first_used(kind: type[T], method: str, call: Callable[[], None]) -> T:
    """The object whose method a command calls. The command ends there."""
    with patch.object(kind, method, autospec=True, side_effect=EOFError) as used, pytest.raises(EOFError):
        call()
    return used.call_args.args[0]


def parse(*args: str) -> SingleAnswer:
    return first_used(SingleAnswer, "under_way", app(["generate", *args], standalone_mode=False))


def value_at(args: tuple[str, ...], path: str) -> Any:
    return value_of(parse(*args), app(["generate", *args], standalone_mode=False), path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The value at a path where nothing is asked for but a model."""
    args = ("--model", str(tmp_path_factory.mktemp("model")))
    return partial(value_of, parse(*args), app(["generate", *args], standalone_mode=False))


def value_of(answer: SingleAnswer, call: Any, path: str) -> Any:
    """path: from the fields of the answer on, from those of a part of it, or from the arguments of the call."""
    parts = (answer, answer.setup, answer.wanted, answer.written, SimpleNamespace(**call.arguments))
    value: Any = next(part for part in parts if hasattr(part, path.split(".")[0]))
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("flag", "typed", "path", "expected"), FLAGS)
def test_option_and_its_variable_say_the_same(flag, typed, path, expected, model, plain, monkeypatch):
    assert plain(path) != expected
    assert value_at(("--model", model, flag, typed), path) == expected
    monkeypatch.setenv(variable_of(flag), typed)
    assert value_at(("--model", model), path) == expected


@pytest.mark.parametrize(("flag", "path", "expected"), SWITCHES)
def test_switch_and_its_variable_say_the_same(flag, path, expected, model, plain, monkeypatch):
    assert plain(path) is not expected
    assert value_at(("--model", model, flag), path) is expected
    monkeypatch.setenv(variable_of(flag), "1")
    assert value_at(("--model", model), path) is expected
    monkeypatch.setenv(variable_of(flag), "0")
    assert value_at(("--model", model), path) is not expected


def test_every_option_is_tested_here_and_has_its_variable():
    command = typer.main.get_command(app).commands["generate"]
    declared = {f"--{name}": parameter.envvar for name, parameter in tree.options(command).items()}
    assert declared == {flag: variable_of(flag) for flag in declared}
    apart = {"--model", "--draft", "--link-gbps", "--read-only", "--debug"}  # tested one by one
    apart |= {"--input-jsonl", "--output-jsonl", "--config", "--log-file", "--batch"}  # in files of their own
    apart |= {"--plan"}  # in a file of its own
    apart |= {"--logprobs"}  # which JSON alone has
    apart |= {"--include"}  # of documents
    apart |= {"--store", "--store-size", "--log", "--continue"}  # in files of their own
    apart |= {"--yes"}  # in test_repository.py
    apart |= {"--template", "--template-arg"}  # of messages, which lines alone have
    assert set(declared) == {flag for flag, *_ in FLAGS + SWITCHES} | apart


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_fits_two_screens_of_50_lines(command, triforce, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = triforce(command, "--help")
    assert code == 0
    assert len(out.splitlines()) <= 100


def test_help_names_each_default_once():
    """pull --help said "[default: main]" twice, by the text and by Typer."""
    commands = tree.commands(typer.main.get_command(app)).values()
    shown = [option for command in commands for option in tree.options(command).values() if option.show_default]
    assert not [option.name for option in shown if "[default: " in option.help]


def test_help_all_shows_the_options_that_help_hides(triforce):
    experts = (
        "--chunk",
        "--draft-gamma",
        "--weight-bits",
        "--kv-bits",
        "--link-bits",
        "--sinks",
        "--window",
    )
    for command in ("generate", "chat", "verify", "bench", "plan"):
        for names, shown in (("--help", False), ("--help-all", True), ("--help", False)):
            code, out, _ = triforce(command, names)
            assert code == 0
            assert "--budget" in out
            assert [name in out for name in experts] == [shown] * len(experts)


SHORT = {
    "-m": {"model"},
    "-n": {"number"},
    "-x": {"extract"},
    "-t": {"prompt-template"},
    "-f": {"file", "prompt-file"},
    "-o": {"output"},
    "-q": {"quiet"},
    "-y": {"yes"},
}


def test_a_letter_means_the_same_in_every_command():
    """-f: the documents, --file beside messages and --prompt-file beside a text. That of ask is its question."""
    for words, command in tree.commands(typer.main.get_command(app)).items():
        known = tree.options(command)
        letters = {letter: name for name, found in known.items() for letter in found.opts if letter[1] != "-"}
        assert all(name in SHORT.get(letter, ()) for letter, name in letters.items()), words
        wanted = {letter for letter, names in SHORT.items() if names & set(known)}
        assert set(letters) == wanted, words
    assert "-f" in tree.options(typer.main.get_command(app).commands["ask"])["file"].opts


def test_short_options_are_the_long_ones(model):
    args = "-m", model, "-f", "-"
    assert (value_at(args, "models.target"), value_at(args, "documents.prompt_file")) == (Path(model), [Path("-")])


def test_a_session_that_is_only_read_is_named(model, monkeypatch):
    assert parse("--model", model, "--session", "book", "--read-only").read_only
    monkeypatch.setenv("TRIFORCE_READ_ONLY", "1")
    assert parse("--model", model, "--session", "book").read_only
    with pytest.raises(UsageError, match="--session NAME or --cache PATH"):
        parse("--model", model)


def test_one_session_at_a_time(model):
    with pytest.raises(UsageError, match="give one of them"):
        parse("--model", model, "--session", "book", "--cache", "kept")
    with pytest.raises(UsageError, match="cannot be a session's name"):
        parse("--model", model, "--session", "../book")


def test_link_bandwidth_and_its_variable_say_the_same(model, monkeypatch):
    assert parse("--model", model, "--offload", "kv", "--link-gbps", "2").setup.options.link_gbps == 2.0
    monkeypatch.setenv("TRIFORCE_LINK_GBPS", "3")
    assert parse("--model", model, "--offload", "kv").setup.options.link_gbps == 3.0


def test_command_line_wins_over_the_variable(model, monkeypatch):
    monkeypatch.setenv("TRIFORCE_GAMMA", "5")
    assert parse("--model", model, "--gamma", "6").setup.options.gamma == 6


def test_defaults_are_those_of_the_documentation(model):
    parsed = parse("--model", model)
    wanted, options = parsed.wanted, parsed.setup.options
    sampling = wanted.sampling
    assert (wanted.max_tokens, sampling.temperature, sampling.top_p) == (256, 0.6, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (0, 0.0, None)
    assert (options.sinks, options.window) == (16, 240)
    assert options.offload is None


def test_stop_can_be_repeated_and_its_variable_holds_words(model, monkeypatch):
    assert parse("--model", model, "--stop", "a b", "--stop", "\n").wanted.stops == ("a b", "\n")
    monkeypatch.setenv("TRIFORCE_STOP", "END STOP")
    assert parse("--model", model).wanted.stops == ("END", "STOP")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", set()),
        ("weights", {"weights"}),
        ("kv", {"kv"}),
        ("weights,kv", {"weights", "kv"}),
        ("kv, weights", {"weights", "kv"}),
        ("kv,kv", {"kv"}),
        ("auto", None),
    ],
)
def test_offload_takes_any_order(text, expected):
    assert _offloaded(text) == expected


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--max-tokens", "0"], ["max-tokens", "0", "1 or more"]),
        (["--max-tokens", "-5"], ["max-tokens", "-5", "1 or more"]),
        (["--max-tokens", "many"], ["--max-tokens", "'many'", "whole number"]),
        (["--max-tokens", "1.5"], ["--max-tokens", "'1.5'", "whole number"]),
        (["--temperature", "warm"], ["--temperature", "'warm'", "not a number"]),
        (["--gamma", "-1"], ["gamma", "-1", "from 0 to"]),
        (["--chunk", "0"], ["chunk", "0", "from 1 to"]),
        (["--window", "0"], ["window", "0", "from 1 to"]),
        (["--dtype", "int3"], ["--dtype", "'int3'", "bf16"]),
        (["--selection", "published"], ["--selection"]),
        (["--gpus", "two"], ["gpus", "'two'", "a number or auto"]),
        (["--gpus", "0"], ["gpus", "0", "from 1 to 8"]),
        (["--gpus", "9"], ["gpus", "9", "from 1 to 8"]),
        (["--offload", "disk"], ["offload", "'disk'", "weights,kv, none or auto"]),
        (["--offload", "kv,"], ["offload", "''", "weights,kv, none or auto"]),
        (["--link-gbps", "2"], ["link-gbps", "--offload"]),
        (["--offload", "kv", "--link-gbps", "nan"], ["link-gbps", "nan", "GB/s"]),
        (["--weight-bits", "half"], ["weight-bits", "'half'", "auto, 16, 6 or 4"]),
        (["--weight-bits", "8"], ["weight-bits", "8", "auto, 16, 6 or 4"]),
        (["--kv-bits", "6"], ["kv-bits", "6", "auto, 16 or 4"]),
        (["--link-bits", "few"], ["link-bits", "'few'", "auto, 16 or 12"]),
        (["--link-bits", "8"], ["link-bits", "8", "auto, 16 or 12"]),
        (["--stop", ""], ["stop", "empty"]),
        (["--stop", "\udcff"], ["--stop", "not valid UTF-8"]),
        (["--batch", "9" * 5000], ["batch", "auto or a whole number from 1 to"]),
        (["--batch", "²"], ["batch", "'²'", "auto or a whole number from 1 to"]),
        (["--no-such-option"], ["--no-such-option"]),
        (["--gamma"], ["--gamma", "requires an argument"]),
        (["book.txt"], ["book.txt", "unexpected"]),
    ],
)
def test_bad_argument_is_named_and_ends_with_2(args, named, model, capfd):
    assert main(["generate", "--model", model, "--prompt", "x", *args]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "Value error" not in captured.err  # pydantic's words
    for word in named:
        assert word in captured.err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--temperature", "-1"], "temperature is -1"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "0"], "top-p is 0"),
        (["--top-k", "-1"], "top-k is -1"),
        (["--min-p", "1.5"], "min-p is 1.5"),
        (["--seed", "-1"], "seed is -1"),
        (["--seed", str(2**63)], f"seed is {2**63}"),
    ],
)
def test_silly_sampling_is_named_and_ends_with_2(args, named, model, tmp_path, capfd):
    """Before anything is loaded: the folder holds no model. A chat loaded the model and read the first message."""
    file = tmp_path / "prompt.txt"
    file.write_text("Once upon a time")
    for command in (["generate", "--prompt-file", str(file)], ["verify", "--prompt-file", str(file)], ["chat"]):
        assert main([*command, "--model", model, *args]) == 2
        assert named in capfd.readouterr().err


def test_bad_variable_is_named(model, capfd, monkeypatch):
    monkeypatch.setenv("TRIFORCE_STATS", "perhaps")
    assert main(["generate", "--model", model]) == 2
    assert "TRIFORCE_STATS" in capfd.readouterr().err


def test_named_model_has_no_draft_unless_named(tmp_path):
    draft = tmp_path / "draft"
    draft.mkdir()
    alone = choose_models(tmp_path, None)
    assert (alone.target, alone.draft, alone.embedded) == (tmp_path, None, False)
    assert choose_models(tmp_path, "none").draft is None
    assert choose_models(tmp_path, str(draft)).draft == draft


def test_without_a_model_the_embedded_pair_is_used(monkeypatch, tmp_path):
    package = tmp_path / "package"
    for name in ("demo-target", "demo-draft"):
        (package / "models" / name).mkdir(parents=True)
    monkeypatch.setattr(choice.resources, "files", lambda name: package)
    pair = choose_models(None, None)
    assert (pair.target, pair.draft, pair.embedded) == (
        package / "models" / "demo-target",
        package / "models" / "demo-draft",
        True,
    )
    assert choose_models(None, "none").draft is None
    assert choose_models(None, str(tmp_path)).draft == tmp_path


def test_missing_folder_ends_with_4_and_says_how_to_get_one(tmp_path, capfd):
    assert main(["generate", "--model", str(tmp_path / "nowhere"), "--prompt", "x"]) == 4
    error = capfd.readouterr().err
    assert "nowhere" in error
    assert "'triforce pull OWNER/NAME' fetches" in error
    assert main(["generate", "--model", str(tmp_path), "--draft", "llama-68m", "--prompt", "x"]) == 4
    assert "draft llama-68m is not a folder, and no such model was pulled" in capfd.readouterr().err


def test_missing_embedded_model_ends_with_4(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(choice.resources, "files", lambda name: tmp_path)
    assert main(["generate", "--prompt", "x"]) == 4
    assert "--model" in capfd.readouterr().err


def test_home_is_expanded_in_a_model_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert choose_models(Path("~"), None).target == tmp_path


@pytest.mark.parametrize("words", [(), ("ask",), ("log", "ls"), ("models",)])
def test_a_short_option_shows_the_help(words, triforce):
    assert triforce(*words, "-h") == triforce(*words, "--help")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("run", "llama3"), "'run' in triforce; try 'triforce chat' or 'triforce ask' or 'triforce generate'\n"),
        (("list",), "'list' in triforce; try 'triforce models'\n"),
        (("ps",), "'ps' in triforce; try 'triforce serve' or 'triforce models'\n"),
        (("help",), "'help' in triforce; try 'triforce --help'\n"),
        (("help", "ask"), "'help' in triforce; try 'triforce ask --help'\n"),
        (("models", "list"), "'list' in triforce models; try 'triforce models' or 'triforce models show'\n"),
        (("log", "list"), "'list' in triforce log; try 'triforce log ls' or 'triforce log show'\n"),
        (("store", "rm"), "'rm' in triforce store; try 'triforce store clear'\n"),
    ],
)
def test_a_command_as_other_programs_call_it_is_refused_with_ours(args, said, triforce):
    """They were no such command, and that was all."""
    assert triforce(*args) == (2, "", f"error: there is no command {said}")


def test_an_unknown_command_that_no_program_has_is_refused_as_before(triforce):
    assert triforce("modles")[2].startswith("error: no such command 'modles'. Did you mean 'models'?\n")
