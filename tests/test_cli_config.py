"""The configuration file, its place between variables and defaults, and `triforce config show`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from offload.errors import UsageError
from test_cli_options import parse as generate
from triforce_cli.app import app, main
from triforce_cli.settings import configuration, tree
from triforce_cli.settings.configuration import Configuration

ROOT = typer.main.get_command(app)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty configuration that every command reads."""
    file = tmp_path / "config.toml"
    file.write_text("")
    monkeypatch.setenv(configuration.VARIABLE, str(file))
    return file


def parse(*args: str) -> Mapping[str, Any]:
    """The arguments of a command."""
    return app(list(args), standalone_mode=False).arguments


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(file, monkeypatch):
    assert generate().wanted.max_tokens == 256
    file.write_text("max-tokens = 5")
    assert generate().wanted.max_tokens == 5
    monkeypatch.setenv("TRIFORCE_MAX_TOKENS", "6")
    assert generate().wanted.max_tokens == 6
    assert generate("--max-tokens", "7").wanted.max_tokens == 7


def test_a_commands_own_section_wins_over_what_is_said_of_all(file):
    file.write_text("temperature = 0.25\nquiet = true\n[generate]\ntemperature = 1\n[sessions.ls]\nquiet = false\n")
    assert generate().wanted.sampling.temperature == 1.0
    assert parse("chat")["wanted"].sampling.temperature == 0.25
    assert generate().quiet
    assert not parse("sessions", "ls")["quiet"]
    assert parse("sessions", "prune", "--keep", "1")["quiet"]


def test_an_option_that_is_called_as_a_command_is_leaves_that_command_alone(file):
    """`store = false` was an AttributeError in `triforce store show`."""
    file.write_text("store = false\nquiet = true\n")
    assert generate().setup.store is None
    assert parse("store", "show")["quiet"]


def test_every_kind_of_value_arrives(file):
    file.write_text('[generate]\nstop = ["a b", "c"]\ndtype = "fp32"\ngamma = 3\ntop-p = 0.5\nno-lookup = true\n')
    parsed = generate()
    options = parsed.setup.options
    assert parsed.wanted.stops == ("a b", "c")
    assert (options.dtype, options.gamma, options.lookup) == ("fp32", 3, False)
    assert parsed.wanted.sampling.top_p == 0.5
    file.write_text('[generate]\nstop = "one"')
    assert generate().wanted.stops == ("one",)


def test_config_names_another_file(file, tmp_path):
    file.write_text("max-tokens = 5")
    other = tmp_path / "other.toml"
    other.write_text("max-tokens = 9")
    assert generate("--config", str(other)).wanted.max_tokens == 9


def test_the_users_own_file_is_read_where_none_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv(configuration.VARIABLE)
    monkeypatch.setattr(configuration, "default_file", lambda: tmp_path / "mine.toml")
    assert generate().wanted.max_tokens == 256
    (tmp_path / "mine.toml").write_text("max-tokens = 5")
    assert generate().wanted.max_tokens == 5


def test_the_users_own_file_lies_where_such_files_do(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert configuration.default_file() == tmp_path / "triforce" / "config.toml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_tokens = 5", "max_tokens is no option of any command; did you mean max-tokens?"),
        ("zzz = 5", "zzz is no option of any command; 'triforce config show' lists all there are"),
        ("[chat]\necho = true", "chat.echo is no option of triforce chat"),
        ("[genrate]\nseed = 1", "genrate is no command; did you mean generate?"),
        ("[sessions.lss]\nquiet = true", "sessions.lss is no command; did you mean ls?"),
        ("seed = true", "seed is true; it must be a text or a number"),
        ("quiet = 1", "quiet is 1; it must be true or false"),
        ("seed = 0x" + "f" * 5000, "is not TOML: Exceeds the limit"),
        ("seed = [1]", "seed is [1]; it must be a text or a number"),
        ("stop = [[1]]", "stop[0] is [1]; it must be a text or a number"),
        ("stop = 1979-05-27", "it must be a text or a number"),
        ("seed = ", "is not TOML: "),
        ("seed = 1\nseed = 2", "is not TOML: "),
        ("\udcff", "is not TOML: "),
        ("[a" + ".a" * 20000 + "]", "config.toml"),
    ],
)
def test_what_is_wrong_is_named(file, text, message, capfd):
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert main(["generate", "--prompt", "x"]) == 2
    said = capfd.readouterr().err
    assert message in said
    assert str(file) in said


def test_a_bad_value_says_where_it_comes_from(file, capfd):
    file.write_text("max-tokens = 1.5")
    assert main(["generate", "--prompt", "x"]) == 2
    assert f"'1.5' is not a whole number (from {file})" in capfd.readouterr().err


def test_a_file_that_is_named_and_not_there_is_an_error(tmp_path, capfd):
    assert main(["generate", "--config", str(tmp_path / "none.toml")]) == 2
    assert "cannot be read: No such file" in capfd.readouterr().err
    (tmp_path / "large.toml").write_bytes(b"#" * (configuration.MAX_BYTES + 1))
    with pytest.raises(UsageError, match="over 1,048,576 bytes"):
        Configuration.read(tmp_path / "large.toml", ROOT)


def test_help_needs_no_good_file(file):
    file.write_text("broken")
    assert main(["generate", "--help"]) == 0


class TestShow:
    def document(self, capfd, *args: str) -> dict:
        capfd.readouterr()
        assert main(["config", "show", "--json", *args]) == 0
        return json.loads(capfd.readouterr().out)

    def setting(self, document: dict, name: str) -> list[tuple]:
        found = [s for s in document["settings"] if s["name"] == name]
        return [(s["value"], s["origin"], s["commands"]) for s in found]

    def test_names_value_origin_and_commands(self, file, monkeypatch, capfd):
        file.write_text("top-k = 7\n[chat]\ntemperature = 0.1")
        monkeypatch.setenv("TRIFORCE_SEED", "9")
        document = self.document(capfd)
        assert (document["file"], document["found"]) == (str(file), True)
        assert self.setting(document, "top-k")[0][:2] == ("7", str(file))
        assert self.setting(document, "seed")[0][:2] == ("9", "TRIFORCE_SEED")
        varying = {value: (origin, commands) for value, origin, commands in self.setting(document, "temperature")}
        assert varying["0.1"] == (str(file), ["chat"])
        assert varying["0.6"][0] == "default"
        assert "generate" in varying["0.6"][1]

    def test_of_one_command_or_group(self, file, capfd):
        assert {command for s in self.document(capfd, "sessions", "ls")["settings"] for command in s["commands"]} == {
            "sessions ls"
        }
        assert {command for s in self.document(capfd, "sessions")["settings"] for command in s["commands"]} >= {
            "sessions ls",
            "sessions rm",
        }
        assert main(["config", "show", "nothing"]) == 2

    def test_every_option_is_shown_as_it_is_parsed(self, file, monkeypatch, capfd):
        """Not from the same code: the parser's own order of precedence."""
        file.write_text("max-tokens = 5\nmin-p = 0.5")
        monkeypatch.setenv("TRIFORCE_MIN_P", "0.25")
        shown = {s["name"]: s["value"] for s in self.document(capfd, "generate")["settings"]}
        parsed = generate()
        assert shown["max-tokens"] == str(parsed.wanted.max_tokens) == "5"
        assert float(shown["min-p"]) == parsed.wanted.sampling.min_p == 0.25
        assert int(shown["window"]) == parsed.setup.options.window
        assert set(shown) == set(tree.options(ROOT.commands["generate"])) - {"help"}

    def test_as_a_table(self, file, capfd):
        file.write_text("top-k = 7")
        assert main(["config", "show", "generate"]) == 0
        out, err = capfd.readouterr()
        assert f"configuration file: {file}\n" in err
        line = next(line for line in out.splitlines() if line.startswith("top-k "))
        assert line.split() == ["top-k", "7", str(file)]
        assert next(line for line in out.splitlines() if line.startswith("seed ")).split() == ["seed", "-", "default"]


def test_the_home_of_nobody_holds_no_configuration(triforce) -> None:
    code, out, err = triforce("config", "show", "--config", "~nobody-at-all/x")
    assert (code, out) == (2, "")
    assert "~nobody-at-all/x: there is no such home folder" in err
