"""Aliases of models: what they stand for, where they are taken, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.errors import ModelError, UsageError
from offload.hub.names import FOLDER_VARIABLE
from test_cli_models import LARGE, SMALL, put
from triforce_cli.app import app
from triforce_cli.settings import configuration
from triforce_cli.settings.aliases import Aliases
from triforce_cli.setup.choice import embedded_model

Run = Callable[..., tuple[int, str, str]]
TARGET = embedded_model("demo-target")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(
        f'[aliases]\nmine = "{TARGET}"\nours = "mine"\nlost = "nonsense"\nlarge = "yarn-llama-2-13b-128k"\n'
    )
    monkeypatch.setenv(configuration.VARIABLE, str(file))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "models"))
    return file


def models(*args: str) -> tuple[Path, Path | None]:
    """The target and the draft of a command line."""
    chosen = app(["plan", *args], standalone_mode=False).arguments["models"].chosen(weights=False)
    return chosen.target, chosen.draft


@pytest.mark.parametrize("name", ["mine", "ours"])
def test_an_alias_and_one_of_an_alias_are_taken_for_their_model(name: str, file: Path) -> None:
    assert models("--model", name, "--draft", "none") == (TARGET, None)
    assert models("--model", str(TARGET), "--draft", name) == (TARGET, TARGET)


def test_variables_and_the_file_name_models_by_aliases_too(file, monkeypatch) -> None:
    file.write_text(f'model = "ours"\n{file.read_text()}')
    assert models() == (TARGET, None)
    monkeypatch.setenv("TRIFORCE_MODEL", "large")
    target = put(file.parent / "models" / LARGE)
    assert models() == (target, None)


def test_the_model_of_an_alias_comes_with_its_draft(file: Path) -> None:
    target, draft = put(file.parent / "models" / LARGE), put(file.parent / "models" / SMALL)
    assert models("-m", "large") == (target, draft)


def test_models_are_compared_by_aliases(file: Path, triforce: Run, tmp_path: Path) -> None:
    code, _, err = triforce("score", "--model", "mine", "--against", "lost", str(file))
    assert (code, f"error: alias lost (aliases in {file}): nonsense is not" in err) == (4, True)


def test_a_folder_comes_before_an_alias_and_an_alias_before_a_pulled_models_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    aliases = Aliases({"llama-68m": str(TARGET), "small": "llama-68m"}, Path("c.toml"))
    assert aliases.model("llama-68m") == aliases.model("small") == str(TARGET)
    Path("llama-68m").mkdir()
    assert aliases.model("llama-68m") == aliases.model("small") == "llama-68m"


def test_an_alias_of_no_model_is_named_with_its_file(file: Path, triforce: Run) -> None:
    for option in ("--model", "--draft"):
        code, out, err = triforce("ask", "x", option, "lost")
        assert (code, out) == (4, "")
        assert err.startswith(f"error: alias lost (aliases in {file}): nonsense is not a folder and not a model's name")
    assert "run 'triforce pull yarn-llama-2-13b-128k'" in triforce("ask", "x", "-m", "large")[2]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('a = "b"\nb = "c"\nc = "a"', "aliases.a leads to no model: a -> b -> c -> a\n"),
        ('a = "a"', "aliases.a leads to no model: a -> a\n"),
        ("a = 3", "aliases.a is 3; it must be a model: a text, not empty"),
        ('a = " "', 'aliases.a is " "; it must be a model'),
        ('"a/b" = "c"', "aliases has the name 'a/b'"),
        ('"a\\nb" = "c"', "aliases has the name 'a\\nb'"),
        ('none = "c"', "aliases has the name 'none'"),
        ('[aliases.a]\nb = "c"', "aliases.a is {"),
    ],
)
def test_a_bad_table_is_refused_by_every_command(table: str, said: str, file: Path, triforce: Run) -> None:
    file.write_text(f"[aliases]\n{table}\n")
    code, _, err = triforce("version")
    assert (code, said in err, str(file) in err) == (2, True, True), err


def test_aliases_are_no_list() -> None:
    with pytest.raises(UsageError, match="must be a table"):
        Aliases.read(["a"], Path("c.toml"))


def test_aliases_are_listed_with_what_is_wrong(file: Path, triforce: Run) -> None:
    code, out, _ = triforce("models")
    assert code == 0
    listed = out.partition("\naliases:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split() for line in listed[:3]] == [["mine", str(TARGET)], ["ours", "mine"], ["lost", "nonsense"]]
    assert listed[3].startswith("    nonsense is not a folder")
    aliases = json.loads(triforce("models", "--json")[1])["aliases"]
    assert [(each["name"], each["model"], each["problem"] is None) for each in aliases] == [
        ("mine", str(TARGET), True),
        ("ours", "mine", True),
        ("lost", "nonsense", False),
        ("large", "yarn-llama-2-13b-128k", False),
    ]


def test_a_listing_without_aliases_says_nothing_of_them(triforce: Run) -> None:
    assert "aliases" not in triforce("models")[1]


def test_only_what_is_used_is_looked_for() -> None:
    aliases = Aliases({"lost": "nonsense"})
    assert aliases.model("other") == "other"
    with pytest.raises(ModelError, match="alias lost"):
        aliases.model("lost")
