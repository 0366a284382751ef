"""`triforce` alone: a page of models at a terminal, whose keys fetch and chat, and the help elsewhere."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from kit.gguf_models import write_gguf
from kit.hub import Hub, running
from kit.models import random_model, save
from kit.terminals import CTRL_C, CTRL_D, ENTER, Terminal, plain
from offload.hub import starters
from offload.hub.names import FOLDER_VARIABLE
from offload.hub.starters import STARTERS, Starter
from test_cli_fake import environment, play

REPOSITORY, FILE = "owner/tiny-GGUF", "tiny-Q8_0.gguf"
MODEL = f"{REPOSITORY}/{FILE}"
SMALLEST = STARTERS[-1]
QUICK = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})  # the same time, of which no pauses are made
LEAVES = "Enter or q leaves:"
COMMANDS = ("─ Commands ─", "generate", "config")  # of the help


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    made = tmp_path_factory.mktemp("tiny")
    folder = save(random_model(vocab_size=264, max_position_embeddings=32768), made / "folder", tokenizer=True)
    write_gguf(folder, made / FILE, kind="F16")
    return (made / FILE).read_bytes()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: bytes) -> Iterator[Hub]:
    """It has the one model that is in the table."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "models"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 512)
    monkeypatch.setattr("huggingface_hub.utils._http.time", QUICK)  # between attempts
    monkeypatch.setattr("huggingface_hub.file_download.time", QUICK)
    starter = replace(SMALLEST, name="Tiny", repository=REPOSITORY, file=FILE, num_bytes=len(tiny))
    monkeypatch.setattr(starters, "STARTERS", (starter,))
    with running() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        hub.put(REPOSITORY, {FILE: tiny})
        yield hub


Open = Callable[..., Terminal]


@pytest.fixture
def alone() -> Iterator[Open]:
    """`triforce ARGS` at a terminal, without any by default: alone(*args, columns=, **environment)."""
    opened: list[Terminal] = []

    def begin(*args: str, columns: int = 80, **variables: str) -> Terminal:
        run = {"begin": lambda: play(list(args), environment(**variables), stand_in=False)}
        opened.append(Terminal(["true"], env={}, columns=columns, **run))
        return opened[-1]

    yield begin
    for terminal in opened:
        terminal.close()


def downloads(hub: Hub) -> list[str]:
    return [name for name in hub.asked() if name == FILE]


@pytest.mark.parametrize("key", ["q", ENTER, "\x1b", CTRL_D])
def test_a_page_is_shown_and_left_by_a_key_and_nothing_is_fetched(hub: Hub, alone: Open, key: str) -> None:
    terminal = alone()
    terminal.until_shown(LEAVES)
    terminal.send("x\x1b[A9")  # no keys of the page
    terminal.send(key)
    assert terminal.finish() == 0
    assert "no GPU" in terminal.lines[0] or "host memory" in terminal.lines[0]
    assert terminal.lines[1].startswith("disk: ")
    (line,) = (line for line in terminal.lines if "Tiny" in line)
    assert line.split()[:3] == ["1", "Tiny", "Q8_0"]
    assert hub.asked() == []


def test_a_broken_download_is_taken_up_again_by_the_same_key_and_the_chat_begins(
    hub: Hub, alone: Open, tmp_path: Path, tiny: bytes
) -> None:
    hub.cuts[FILE] = [4 * 512, *[0] * 60]
    broken = alone()
    broken.until_shown(LEAVES)
    broken.send("1")
    assert broken.finish() == 1
    assert "error: the connection broke off" in broken.shown
    hub.cuts.clear()
    assert f"'triforce pull {REPOSITORY}:Q8_0' resumes it" in " ".join(broken.shown.split())
    hub.requests.clear()
    again = alone()
    again.until_shown(LEAVES)
    again.send("1")
    again.until_shown("Ctrl-D leaves")
    assert hub.requests == [(FILE, 4 * 512)]
    assert (tmp_path / "models" / REPOSITORY / FILE).read_bytes() == tiny
    again.until_prompt(1)
    again.send(CTRL_D)
    assert again.finish() == 0


def test_a_model_that_is_here_comes_first_and_chats_without_the_hub(
    hub: Hub, alone: Open, tmp_path: Path, tiny: bytes
) -> None:
    stored = tmp_path / "models" / REPOSITORY / FILE
    stored.parent.mkdir(parents=True)
    stored.write_bytes(tiny)
    terminal = alone("start", columns=60, NO_COLOR="1")
    terminal.until_shown("1 chat; Enter or q leaves:")
    assert ("here already" in terminal.shown, "to fetch" in terminal.shown) == (True, False)
    assert "\x1b[3" not in terminal.written
    terminal.send("\x1b[B")  # an arrow, which is not Escape
    terminal.send("1")
    terminal.until_prompt(1)
    terminal.send(CTRL_D)
    assert (terminal.finish(), hub.asked()) == (0, [])


def test_the_configured_model_of_the_chat_is_the_first_key(hub: Hub, alone: Open, tmp_path: Path, tiny: bytes) -> None:
    (file := tmp_path / "mine.gguf").write_bytes(tiny)
    (config := tmp_path / "config.toml").write_text(f"[aliases]\nmine = '{file}'\n[chat]\nmodel = 'mine'\n")
    terminal = alone(TRIFORCE_CONFIG=str(config))
    terminal.until_shown(LEAVES)
    first, second = (line.split() for line in terminal.lines if line[:2] in (" 1", " 2"))
    assert first[1].startswith(str(file)[:8])
    assert second[1] == "Tiny"
    terminal.send("1")
    terminal.until_prompt(1)
    terminal.send(CTRL_D)
    assert (terminal.finish(), hub.asked()) == (0, [])
    config.write_text("model = 'lost.gguf'\n")
    lost = alone(TRIFORCE_CONFIG=str(config))
    lost.until_shown(LEAVES)
    assert "the configured model: model lost.gguf does not exist" in lost.shown
    lost.send(CTRL_C)
    assert lost.finish() == 130


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_where_nobody_is_the_help_is_printed_as_ever(stream: int, tmp_path: Path) -> None:
    """With one stream that is no terminal."""

    def begin() -> None:
        os.dup2(os.open(tmp_path / "stream", os.O_RDWR | os.O_CREAT), stream)
        play([], environment(COLUMNS="80"), stand_in=False)

    terminal = Terminal(["true"], env={}, begin=begin)
    assert terminal.finish() == 2
    shown = (tmp_path / "stream").read_text() if stream == 1 else plain(terminal.written)
    assert all(words in shown for words in COMMANDS)


def test_a_pipe_gets_the_page_and_the_commands_that_the_first_key_stands_for(hub: Hub, triforce) -> None:
    code, out, err = triforce("start")
    assert code == 0
    assert "Tiny" in out
    assert err.splitlines()[-1] == (f"next: triforce pull {REPOSITORY} --file {FILE} && triforce chat --model {MODEL}")
    (offer,) = json.loads(triforce("start", "--json")[1])["offers"]
    assert (offer["name"], offer["pull"], offer["model"]) == ("Tiny", [REPOSITORY, "--file", FILE], MODEL)
    assert hub.asked() == []


def test_no_model_fits(hub: Hub, triforce, monkeypatch: pytest.MonkeyPatch) -> None:
    huge: Starter = replace(SMALLEST, num_bytes=10**15)
    monkeypatch.setattr(starters, "STARTERS", (huge,))
    code, out, err = triforce("start")
    assert (code, "no model of the table fits in" in out, "next" in err) == (0, True, False)
