"""`triforce config set` and `unset`: one key changes, the file's other bytes stay."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import UsageError
from triforce_cli import configuration
from triforce_cli.choice import embedded_model
from triforce_cli.configuration_edit import value_at, with_value, without

Run = Callable[..., tuple[int, str, str]]
MINE = """# mine
temperature = 0.8   # warm

[chat]
# the one I talk to
top-k = 3

# how sessions are listed
[sessions.ls]
quiet=true
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration that every command reads and changes; the lock's folder is apart."""
    file = tmp_path / "config.toml"
    file.write_text(MINE)
    monkeypatch.setenv(configuration.VARIABLE, str(file))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return file


def loads(text: str) -> dict:
    return configuration.parsed(Path("config.toml"), text)


# --- the text ---


@pytest.mark.parametrize(
    ("key", "value", "old", "new"),
    [
        ("temperature", 0.5, "temperature = 0.8   # warm", "temperature = 0.5   # warm"),
        ("chat.top-k", 9, "top-k = 3\n", "top-k = 9\n"),
        ("chat.model", "x", "top-k = 3\n", 'top-k = 3\nmodel = "x"\n'),
        ("top-p", 1, "# warm\n", "# warm\ntop-p = 1\n"),
        ("sessions.ls.json", True, "quiet=true\n", "quiet=true\njson = true\n"),
        ("sessions.rm.yes", True, "quiet=true\n", "quiet=true\n\n[sessions.rm]\nyes = true\n"),
        ("ask.stop", ["a", 'b"'], "quiet=true\n", 'quiet=true\n\n[ask]\nstop = ["a", "b\\""]\n'),
    ],
)
def test_one_line_changes(key, value, old, new):
    assert MINE.count(old) == 1
    assert with_value(MINE, tuple(key.split(".")), value) == MINE.replace(old, new)


def test_a_comment_stays_with_its_section():
    """A new key came between the comment and the section that it is about."""
    text = "a = 1\n\n# about asking\n[ask]\nb = 1\n\n# about chats\n[chat]\n"
    assert with_value(text, ("model",), "x") == f'model = "x"\n\n{text}'
    assert "b = 1\nc = 2\n\n# about chats\n[chat]" in with_value(text, ("ask", "c"), 2)


def test_a_key_goes_and_its_section_and_comments_stay():
    assert without(MINE, ("chat", "top-k")) == MINE.replace("top-k = 3\n", "")
    assert without("a.b = 1\na.c = 2\n", ("a", "c")) == "a.b = 1\n"


def test_a_value_takes_no_sections_place():
    """A section was lost, with all that was in it."""
    with pytest.raises(UsageError, match="sessions is a section"):
        with_value(MINE, ("sessions",), 1)


@pytest.mark.parametrize("text", ["store = false\n", "[[store]]\nx = 1\n"])
def test_what_cannot_be_changed_alone_is_refused(text):
    with pytest.raises(UsageError, match="edit it by hand"):
        with_value(text, ("store", "show"), True)


def test_a_section_with_comments_is_not_removed():
    """The comment at the end of a section is about the next one."""
    with pytest.raises(UsageError, match="has comments"):
        without("[a.b]\nc = 1\n\n# about d\n[a.d]\n", ("a", "b"))


KEYS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3).map(tuple)
LINES = st.lists(
    st.sampled_from(
        ["a = 1", "b.c = 2", "[a]", "[b]", "[c.a]", "# note", "", "c = 'x' # y", "[b.a]", 'a = """\n[x]"""']
    )
)


@given(LINES, KEYS, st.sampled_from([1, "x\n'\"", True, ["y"]]))
def test_whatever_the_file_other_values_and_comments_stay(lines, parts, value):
    text = "\n".join(lines)
    try:
        before = loads(text)
        changed = with_value(text, parts, value)
    except UsageError:
        return
    after = loads(changed)
    assert value_at(after, parts) == value
    assert changed.count("# note") == text.count("# note")
    for line in set(text.splitlines()) - {""}:
        if value_at(before, parts) is None:
            assert line in changed
    if value_at(before, parts) is None:
        assert loads(without(changed, parts)).keys() >= before.keys()


# --- the command ---


def test_a_value_is_set_and_used(file: Path, triforce: Run) -> None:
    target = str(embedded_model("demo-draft"))
    assert triforce("config", "set", "model", target) == (0, "", f"set model in {file}\n")
    assert file.read_text() == MINE.replace("# warm\n", f'# warm\nmodel = "{target}"\n')
    code, out, _ = triforce("tokens", "--json", str(file))
    assert (code, '"demo-draft"' in out) == (0, True)
    assert triforce("config", "unset", "model") == (0, "", f"removed model from {file}\n")
    assert file.read_text() == MINE


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("max-tokens", "7"), "max-tokens = 7"),
        (("presence-penalty", "-0.5"), "presence-penalty = -0.5"),
        (("quiet", "true"), "quiet = true"),
        (("store", "false"), "store = false"),
        (("gpus", "2"), 'gpus = "2"'),
        (("stop", "END", "a b"), 'stop = ["END", "a b"]'),
        (("system", 'Grüße, "Sie"'), 'system = "Grüße, \\"Sie\\""'),
    ],
)
def test_values_are_written_as_what_they_are(args, line, file: Path, triforce: Run) -> None:
    assert triforce("config", "set", *args)[0] == 0
    assert line in file.read_text().splitlines()
    assert triforce("config", "show")[0] == 0


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("max-tokens", "1.5"), 2, "'1.5' is not a whole number"),
        (("max-tokens", "0"), 2, "max-tokens is 0, it must be 1 or more"),
        (("temperature", "-3"), 2, "temperature is -3"),
        (("temperature", "nan"), 2, "temperature is nan"),
        (("chat.temperature", "-3"), 2, "temperature is -3"),
        (("dtype", "int7"), 2, "'int7'"),
        (("quiet", "perhaps"), 2, "quiet is 'perhaps', it must be true or false"),
        (("top-k", "3", "4"), 2, "top-k takes one value and 2 are given"),
        (("sessions.prune.keep", "x"), 2, "'x' is not a whole number"),
        (("chat.temperatur", "1"), 2, "is no option of triforce chat; did you mean temperature?"),
        (("chatt.temperature", "1"), 2, "chatt is no command"),
        (("chat", "1"), 2, "chat is no option of any command"),
        (("chat.", "1"), 2, "'chat.' is no key"),
        (("config", "x.toml"), 2, "does not name another one"),
        (("model", "nonsense"), 4, "nonsense is not a folder and not a model's name"),
    ],
)
def test_a_bad_value_is_refused_as_the_option_is_and_nothing_is_written(args, code, said, file, triforce) -> None:
    found, out, err = triforce("config", "set", *args)
    assert (found, out) == (code, "")
    assert said in err
    assert file.read_text() == MINE


def test_values_are_checked_beside_those_of_the_file(file: Path, triforce: Run, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("max-tokens = 5\n")
    assert triforce("config", "set", "min-tokens", "6")[0] == 0
    code, _, err = triforce("config", "set", "min-tokens", "6", "--config", str(tmp_path / "other.toml"))
    assert (code, "min-tokens is 6, it must be at most max-tokens, 5" in err) == (2, True)


def test_a_variable_that_wins_is_said(file: Path, triforce: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIFORCE_SEED", "7")
    assert triforce("config", "set", "seed", "8")[2].endswith("TRIFORCE_SEED is set and wins over it\n")


def test_a_faulty_file_can_be_mended(file: Path, triforce: Run) -> None:
    file.write_text("temprature = 1\ntop-p = 2\n")
    assert triforce("config", "show")[0] == 2
    assert triforce("config", "set", "top-p", "3")[0] == 2
    assert triforce("config", "set", "top-p", "0.5")[0] == 0
    assert triforce("config", "unset", "temprature")[0] == 0
    assert file.read_text() == "top-p = 0.5\n"
    file.write_text("a = = 1")
    assert "is not TOML" in triforce("config", "set", "top-p", "0.5")[2]
    assert file.read_text() == "a = = 1"


def test_what_is_not_set_cannot_be_unset(file: Path, triforce: Run) -> None:
    assert triforce("config", "unset", "seed") == (2, "", f"error: seed is not set in {file}\n")
    assert "name one of its keys: chat.top-k" in triforce("config", "unset", "chat")[2]


def test_a_new_file_and_its_folder_are_their_owners_alone(file, triforce, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv(configuration.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    assert triforce("config", "set", "seed", "8")[0] == 0
    made = tmp_path / "home/triforce/config.toml"
    assert made.read_text() == "seed = 8\n"
    assert [stat.S_IMODE(each.stat().st_mode) for each in (made, made.parent)] == [0o600, 0o700]
    assert [each.name for each in made.parent.iterdir()] == ["config.toml"]
    assert triforce("config", "set", "seed", "8", "--config", str(tmp_path / "no/x.toml"))[0] == 2
    assert not (tmp_path / "no").exists()


def test_mode_and_link_of_a_file_stay(file: Path, triforce: Run, tmp_path: Path) -> None:
    kept = tmp_path / "dotfiles.toml"
    os.rename(file, kept)
    file.symlink_to(kept)
    kept.chmod(0o640)
    assert triforce("config", "set", "seed", "8")[0] == 0
    assert file.is_symlink()
    assert "seed = 8\n" in kept.read_text()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o640


def test_a_device_is_not_replaced(triforce: Run) -> None:
    """The variable of the tests' own is /dev/null."""
    code, _, err = triforce("config", "set", "seed", "8")
    assert (code, "/dev/null is no file that settings can be written into" in err) == (2, True)


def test_line_ends_of_another_system_stay(file: Path, triforce: Run) -> None:
    file.write_bytes(b"seed = 1\r\n\r\n[chat]\r\n# x\r\n")
    assert triforce("config", "set", "seed", "2")[0] == 0
    assert file.read_bytes() == b"seed = 2\r\n\r\n[chat]\r\n# x\r\n"
