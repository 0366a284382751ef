"""The prefix store as a person meets it: what is said, what is counted, and how it is left out."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.models import save_pair
from offload.session.prefix_store import PrefixStore
from offload.speed.rates import FOLDER_VARIABLE
from triforce_cli.answering.session import rows_kept
from triforce_cli.screen.output import Output
from triforce_cli.settings import configuration

Triforce = Callable[..., tuple[int, str, str]]
TEXT = "".join(f"Line {number} of a long and rather dull text.\n" for number in range(35))  # some 1,500 bytes


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder, context=4096)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def run(pair: Path, triforce: Triforce, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Triforce]:
    """`triforce COMMAND ARGS` with the tiny model and a store of its own."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(PrefixStore, "read_seconds", lambda self, stored: 0.0)

    def run(*args: str) -> tuple[int, str, str]:
        model = ("--model", str(pair / "target"), "--draft", "none", "--dtype", "fp32", "--max-tokens", "8")
        return triforce(args[0], *model, "--temperature", "0", *args[1:])

    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield run


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have a person at a terminal type an answer."""

    def answer(text: str) -> None:
        monkeypatch.setattr(Output, "has_person", True)
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{text}\n"))

    return answer


def stats(document: str) -> dict[str, Any]:
    found = json.loads(document)["stats"]
    assert isinstance(found, dict)
    return found


def test_a_second_text_begins_with_what_the_first_has_kept(run: Triforce, pair: Path, tmp_path: Path) -> None:
    args = ("generate", "--prompt-file", str(pair / "text.txt"))
    first, second = run(*args), run(*args)
    assert first[:2] == second[:2]
    assert f"what the model has read is kept in {tmp_path}/cache/store, so that it is not read again" in first[2]
    assert f"1,024 of {len(TEXT):,} prompt tokens are from the store" in second[2]
    assert "is kept in" not in second[2]
    other = run(*args, "--prompt", "Another end.", "--json", "-q")
    assert (stats(other[1])["stored_tokens"], stats(other[1])["reused_tokens"]) == (1024, 1024)
    assert other[2] == ""


def test_it_is_left_out_by_an_option_and_by_a_line_of_the_configuration(
    run: Triforce, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("generate", "--prompt-file", str(pair / "text.txt"), "--json")
    assert stats(run(*args, "--no-store")[1])["stored_tokens"] == 0
    assert not (tmp_path / "cache" / "store").exists()
    run(*args)
    assert stats(run(*args, "--no-store")[1])["stored_tokens"] == 0
    (tmp_path / "config.toml").write_text("store = false\n")
    monkeypatch.setenv(configuration.VARIABLE, str(tmp_path / "config.toml"))
    assert stats(run(*args)[1])["stored_tokens"] == 0
    assert stats(run(*args, "--store")[1])["stored_tokens"] == 1024


def test_a_short_prompt_is_not_kept(run: Triforce, tmp_path: Path) -> None:
    assert run("generate", "--prompt", TEXT[:900])[0] == 0
    assert not (tmp_path / "cache" / "store").exists()


def test_ask_chat_and_batches_share_it(
    run: Triforce, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(pair / "text.txt")
    (tmp_path / "lines.jsonl").write_text(json.dumps({"prompt": TEXT + "Who?"}) + "\n")
    (tmp_path / "in.txt").write_text("Who?\n")
    assert stats(run("ask", "Who?", "--file", file, "--json")[1])["stored_tokens"] == 0
    assert stats(run("ask", "What then?", "--file", file, "--json")[1])["stored_tokens"] == 1024
    assert stats(run("generate", "--prompt-file", file, "--json")[1])["stored_tokens"] == 0  # begins otherwise
    batch = run("generate", "--input-jsonl", str(tmp_path / "lines.jsonl"))
    assert stats(batch[1])["stored_tokens"] == 1024
    read, load = list[int](), PrefixStore.load
    monkeypatch.setattr(PrefixStore, "load", lambda *args: read.append(load(*args)) or read[-1])
    with (tmp_path / "in.txt").open() as messages:
        monkeypatch.setattr(sys, "stdin", messages)
        assert stats(run("chat", "--file", file, "--json")[1])["reused_tokens"] > 1024
    assert read == [1024]  # before the question is there


def test_a_session_reads_from_it_and_keeps_its_rows_itself(run: Triforce, pair: Path, tmp_path: Path) -> None:
    args = ("generate", "--prompt-file", str(pair / "text.txt"), "--json")
    session = ("--cache", str(tmp_path / "session"))
    assert stats(run(*args, *session)[1])["stored_tokens"] == 0
    assert not (tmp_path / "cache" / "store").exists()
    run(*args)
    assert stats(run(*args, "--cache", str(tmp_path / "other"))[1])["stored_tokens"] == 1024
    found = stats(run(*args, *session)[1])
    assert (found["stored_tokens"], found["reused_tokens"] > 1024) == (0, True)


@pytest.mark.parametrize("size", ["0", "-1", "nan", "2000000"])
def test_a_size_that_cannot_be_is_refused(run: Triforce, size: str) -> None:
    code, out, err = run("generate", "--prompt", "x", "--store-size", size)
    assert (code, out) == (2, "")
    assert "store-size is" in err


def test_a_small_store_has_what_fits(run: Triforce, pair: Path, triforce: Triforce) -> None:
    args = ("generate", "--prompt-file", str(pair / "text.txt"), "--json")
    run(*args)
    page = json.loads(triforce("store", "show", "--json")[1])["bytes"] / 2
    triforce("store", "clear", "--yes")
    run(*args, "--store-size", str(1.5 * page / 1e9))
    assert json.loads(triforce("store", "show", "--json")[1])["bytes"] == page
    assert stats(run(*args)[1])["stored_tokens"] == 512


def test_a_damaged_page_is_said_and_changes_no_text(run: Triforce, pair: Path, tmp_path: Path) -> None:
    args = ("generate", "--prompt-file", str(pair / "text.txt"))
    text = run(*args)[1]
    for file in sorted((tmp_path / "cache" / "store").glob("*/*.safetensors"))[:1]:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    code, out, err = run(*args)
    assert (code, out) == (0, text)
    assert "a stored page is left out, and computed again: " in err
    assert "1,024" in run(*args)[2]  # kept again


def test_a_plan_counts_what_is_kept(run: Triforce, pair: Path, triforce: Triforce) -> None:
    args = (
        "--model",
        str(pair / "target"),
        "--draft",
        "none",
        "--dtype",
        "fp32",
        "--prompt-file",
        str(pair / "text.txt"),
    )
    assert "in the store" not in triforce("plan", *args)[2]
    run("generate", "--prompt-file", str(pair / "text.txt"))
    assert f"1,024 of {len(TEXT):,} prompt tokens are in the store, which reads them in" in triforce("plan", *args)[2]
    assert "in the store" not in triforce("plan", *args, "--gpus", "1")[2]


def test_what_is_kept_can_be_seen_and_removed(run: Triforce, pair: Path, triforce: Triforce, tmp_path: Path) -> None:
    assert "nothing is kept in" in triforce("store", "show")[2]
    run("generate", "--prompt-file", str(pair / "text.txt"))
    assert "1,024" in triforce("store", "show")[1]
    [kept] = json.loads(triforce("store", "show", "--json")[1])["kept"]
    assert (kept["model"], kept["dtype"], kept["num_tokens"]) == ("target", "fp32", 1024)
    assert kept["documents"] == ["text.txt"]
    assert "\n                    of text.txt\n" in triforce("store", "show")[1]
    assert "removed" in triforce("store", "clear", "-y")[2]
    assert not (tmp_path / "cache" / "store").exists()
    assert "nothing is kept in" in triforce("store", "clear")[2]


def test_removal_asks_and_one_model_or_document_can_be_named(
    run: Triforce, pair: Path, triforce: Triforce, tmp_path: Path, answers: Callable[[str], None]
) -> None:
    """store clear removed all at once, without a question."""
    (tmp_path / "other.txt").write_text(TEXT[::-1])
    for file in (pair / "text.txt", tmp_path / "other.txt"):
        run("generate", "--prompt-file", str(file))

    def documents() -> list[str]:
        return [
            name for kept in json.loads(triforce("store", "show", "--json")[1])["kept"] for name in kept["documents"]
        ]

    assert triforce("store", "clear")[0] == 2  # nobody can be asked
    answers("n")
    code, _, err = triforce("store", "clear", "text.txt")
    assert (code, "remove what is kept of text.txt, " in err, "nothing was removed" in err) == (0, True, True)
    assert documents() == ["other.txt", "text.txt"]
    code, _, err = triforce("store", "clear", "nobody", "text.txt", "-y")
    assert (code, "nothing is kept of 'nobody' in" in err, documents()) == (2, True, ["other.txt", "text.txt"])
    answers("y")
    assert triforce("store", "clear", "text.txt")[0] == 0
    assert documents() == ["other.txt"]
    assert triforce("store", "clear", "target", "-y")[0] == 0
    assert documents() == []


def test_what_is_not_kept_is_not_said_to_be(run: Triforce, pair: Path, tmp_path: Path) -> None:
    """What the model has read is kept, said a store that had no room for a page, and a file size limit."""
    args = ("generate", "--prompt-file", str(pair / "text.txt"))
    err = run(*args, "--store-size", "0.000001")[2]
    assert "what the model has read is not kept: " in err
    assert "the store may take 1.00 kB" in err
    assert "is kept in" not in err
    assert "what the model has read is kept in" in run(*args)[2]  # the first that is kept is said


@pytest.mark.parametrize(
    ("error", "is_kept"), [(None, True), (KeyboardInterrupt(), True), (BrokenPipeError(), True), (OSError(), False)]
)
def test_rows_are_kept_after_an_interrupt_and_not_after_an_error(error: BaseException | None, is_kept: bool) -> None:
    """What failed may be the engine, whose next error would hide the first."""
    kept = list[dict[str, Any]]()
    engine = SimpleNamespace(keep=lambda **settings: kept.append(settings))
    with suppress(KeyboardInterrupt, OSError), rows_kept(engine, ["a"], Output(quiet=True)):  # type: ignore[arg-type]
        if error is not None:
            raise error
    assert [each["documents"] for each in kept] == [["a"]] * is_kept
