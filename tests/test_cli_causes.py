"""Errors name the cause and what helps, where a library or the system would say something else."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offload.errors import UsageError
from offload.hub.names import FOLDER_VARIABLE as MODELS_VARIABLE
from test_cli_prompt import read, unread
from triforce_cli.documents.prompt import read_prompt
from triforce_cli.documents.selection import Named
from triforce_cli.ground import inputs
from triforce_cli.ground.errors import describe
from triforce_cli.screen.utf8 import read_text
from triforce_cli.settings import configuration
from triforce_cli.setup.choice import embedded_model

Run = Callable[..., tuple[int, str, str]]
NOBODY = 65534
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole model that everyone may read."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in MODEL_FILES:
        shutil.copyfile(embedded_model("demo-draft") / name, folder / name)
        (folder / name).chmod(0o644)
    folder.chmod(0o755)
    return folder


@contextmanager
def nobody(folder: Path) -> Iterator[None]:
    """Run as a user without rights, who may enter the folders that lead to `folder`. Who is not root runs as before."""
    if os.geteuid() != 0:
        yield
        return
    modes = {path: path.stat().st_mode for path in folder.parents if path.stat().st_mode & 0o011 != 0o011}
    for path, mode in modes.items():
        path.chmod(mode | 0o011)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)


def plan(triforce: Run, model: Path) -> str:
    """What `triforce plan` says of a model that it cannot use."""
    exit_code, text, said = triforce("plan", "--model", str(model))
    assert (exit_code, text) == (4, "")
    return said


def test_without_a_home_folder_it_says_what_to_set(triforce, monkeypatch):
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CONFIG_HOME", configuration.VARIABLE, MODELS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    exit_code, text, said = triforce("generate", "--prompt", "Hi")
    assert (exit_code, text) == (2, "")
    assert said.startswith(
        f"error: there is no home folder: HOME is not set, and this system knows no user {os.getuid()}"
    )
    assert "set HOME" in said


def test_home_of_nobody_is_a_models_wrong_name(triforce):
    exit_code, _, said = triforce("plan", "--model", "~no-such-person/model")
    assert (exit_code, said) == (2, "error: ~no-such-person/model: there is no such home folder\n")


@pytest.mark.parametrize("name", MODEL_FILES)
def test_file_of_another_user_is_named(triforce, model, name):
    book = model.with_name("book.txt")
    book.write_text("Hi")
    asked = ("generate", "--model", str(model), "--prompt-file", str(book), "--max-tokens", "1", "--quiet")
    assert triforce(*asked)[0] == 0  # all is loaded that is needed: Python may be in a folder of its owner's
    (model / name).chmod(0)
    with nobody(model):
        exit_code, text, said = triforce(*asked)
    assert (exit_code, text) == (4, "")
    assert said.startswith(f"error: {model / name} cannot be read (Permission denied); whoever owns it can let you")
    assert "download" not in said


@pytest.mark.parametrize("mode", [0o000, 0o111], ids=["closed", "names cannot be read"])
def test_folder_of_another_user_is_named(triforce, model, mode):
    model.chmod(mode)
    with nobody(model):
        said = plan(triforce, model)
    model.chmod(0o755)
    assert said.startswith(f"error: model {model} cannot be read (Permission denied); whoever owns it can let you")


def test_models_that_another_user_keeps_are_named(triforce, tmp_path, monkeypatch):
    kept = tmp_path / "models"
    kept.mkdir()
    monkeypatch.setenv(MODELS_VARIABLE, str(kept))
    assert triforce("models")[0] == 0  # all is loaded that is needed: Python may be in a folder of its owner's
    kept.chmod(0)
    with nobody(kept):
        shown = [triforce("models"), triforce("plan", "--model", "llama-68m")]
    kept.chmod(0o755)
    for exit_code, text, said in shown:
        assert (exit_code, text) == (4, "")
        assert "cannot be read (Permission denied)" in said


def test_session_of_another_user_is_no_absent_one(triforce, tmp_path):
    (tmp_path / "sessions").mkdir(mode=0)
    session = tmp_path / "sessions/mine"
    with nobody(session.parent):
        exit_code, _, said = triforce("sessions", "rm", "--yes", str(session))
    assert (exit_code, said) == (4, f"error: {session} cannot be read (Permission denied); check its permissions\n")


def test_what_the_system_says_of_a_file_is_no_fault_of_the_program():
    failure = describe(PermissionError(13, "Permission denied", "/var/book"), debug=False)
    assert (failure.message, failure.exit_code) == ("/var/book: Permission denied", 1)


@pytest.mark.parametrize(
    ("encoding", "advice"),
    [
        ("utf-16", "iconv -f UTF-16 -t UTF-8"),
        ("utf-16-le", "iconv -f UTF-16LE -t UTF-8"),
        ("utf-16-be", "iconv -f UTF-16BE -t UTF-8"),
        ("utf-32", "iconv -f UTF-32 -t UTF-8"),
        ("latin-1", "iconv -f LATIN1 -t UTF-8"),
    ],
)
def test_advice_makes_the_text_that_was_written(tmp_path, encoding, advice):
    file, text = tmp_path / "book.txt", "Déjà vu, naïve café. " * 9
    file.write_bytes(text.encode(encoding))
    with pytest.raises(UsageError) as refused:
        read(file)
    assert advice in str(refused.value)
    made = subprocess.run([*advice.split(), str(file)], capture_output=True, check=True)
    file.write_bytes(made.stdout)
    assert read(file) == text


def test_text_of_another_script_in_utf16_is_told_by_its_mark(tmp_path):
    (tmp_path / "book.txt").write_bytes("吾輩は猫である。".encode("utf-16"))
    with pytest.raises(UsageError, match="it begins as UTF-16 text does; convert it with iconv -f UTF-16 -t UTF-8"):
        read(tmp_path / "book.txt")


def test_pdf_where_a_text_belongs_is_told_by_its_beginning(tmp_path):
    (tmp_path / "schema.json").write_bytes(b"%PDF-1.7\n%\xe2\xe3")
    with pytest.raises(UsageError, match="it is a PDF; pdftotext"):
        read_text(tmp_path / "schema.json", "the JSON schema")


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (b"PK\x03\x04\x14\0\x06\0\x08\xff", "it is a ZIP archive"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1", "it is an old Word"),
        (b"\x1f\x8b\x08\x08\x8b\x9a", "gunzip"),
    ],
)
def test_file_that_is_no_text_is_told_by_its_beginning(tmp_path, data, advice):
    (tmp_path / "book").write_bytes(data)
    with pytest.raises(UsageError, match=advice):
        read(tmp_path / "book")


@pytest.mark.parametrize("text", ["\0", "\0\0\0\0", "one\0two\0three\0", "a\0bc\0def\0"])
def test_zero_bytes_alone_make_no_utf16(tmp_path, text):
    (tmp_path / "names").write_bytes(text.encode())
    assert read(tmp_path / "names") == text


def test_model_with_a_name_that_is_not_utf8_asks_for_another(triforce, model):
    renamed = model.rename(model.with_name(os.fsdecode(b"caf\xe9")))
    said = plan(triforce, renamed)
    assert "bytes in its name that are not UTF-8" in said
    linked = model.with_name("linked")
    linked.symlink_to(renamed)
    assert triforce("plan", "--model", str(linked))[0] == 0


@pytest.mark.parametrize("named", ["main", "newest"])
def test_folder_of_the_hubs_cache_names_its_version(triforce, model, named):
    cached = model.with_name("models--OWNER--NAME")
    for number, version in enumerate(("1111", "2222")):
        folder = Path(shutil.copytree(model, cached / "snapshots" / version))
        os.utime(folder, (number, number))
    if named == "main":
        (cached / "refs").mkdir()
        (cached / "refs/main").write_text("1111")
    version = cached / "snapshots" / ("1111" if named == "main" else "2222")
    said = plan(triforce, cached)
    assert said.endswith(f"versions of a model in it; give {version}\n")
    assert triforce("plan", "--model", str(version))[0] == 0


def test_name_in_the_hubs_cache_leads_nowhere_else(triforce, model):
    cached = model.with_name("models--OWNER--NAME")
    shutil.copytree(model, cached / "snapshots/1111")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("../../..")
    assert plan(triforce, cached).endswith(f"give {cached}/snapshots/1111\n")


def test_gguf_file_is_read(triforce, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF\3\0\0\0")
    assert plan(triforce, tmp_path / "model.gguf").startswith(
        f"error: {tmp_path / 'model.gguf'} is not a whole GGUF file: it has 8 bytes"
    )


@pytest.mark.parametrize(
    ("where", "said"),
    [("model", "is a GGUF file by another name; give it one that ends in .gguf"), ("model.gguf", "give the GGUF file")],
)
def test_gguf_file_that_was_not_named_as_one(triforce, tmp_path, where, said):
    (tmp_path / where).write_bytes(b"GGUF\3\0\0\0")
    assert said in plan(triforce, tmp_path if where.endswith(".gguf") else tmp_path / where)


def test_file_in_a_model_is_not_the_model(triforce, model):
    said = plan(triforce, model / "model.safetensors")
    assert said.startswith(f"error: model {model / 'model.safetensors'} is a file; give the folder of the model")


def test_open_standard_input_is_said_even_if_quiet(monkeypatch, capfd):
    from triforce_cli.screen.output import Output

    monkeypatch.setattr(inputs, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(inputs, "LONG_SECONDS", 0.01)
    reader, writer = os.pipe()
    output = Output(quiet=True)

    def note(line: str, *, urgent: bool = False) -> None:
        output.note(line, urgent=urgent)
        if urgent:
            os.close(writer)

    with open(reader, encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        assert read_prompt(Named(), "Hi", note=note, on_read=unread).text == "Hi"
    assert capfd.readouterr().err == (
        "still waiting for the prompt: standard input is open, and nothing comes; </dev/null where there is none\n"
    )


SPEAKING = """
import os, sys, warnings, logging
from triforce_cli import __main__ as entry
import triforce_cli.app as app
def main():
    warnings.warn("a library's warning")
    logging.getLogger("library").warning("another")
    import torch, transformers
    transformers.utils.logging.get_logger("transformers.models").warning("a third")
    torch.zeros(1).numpy()
    print(os.environ["TORCH_CPP_LOG_LEVEL"])
    return 0
app.main = main
sys.exit(entry.run())
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("asked_for", [False, True])
def test_libraries_say_nothing_unless_asked(asked_for):
    """In a process of its own: what libraries say is set up once."""
    command = [sys.executable, *(["-W", "always"] if asked_for else []), "-c", SPEAKING]
    variables = {**os.environ, **({"TRANSFORMERS_VERBOSITY": "warning"} if asked_for else {})}
    done = subprocess.run(command, capture_output=True, env=variables, text=True)
    assert (done.returncode, done.stdout) == (0, "ERROR\n")
    assert ("a library's warning" in done.stderr, "a third" in done.stderr) == (asked_for, asked_for)
    assert asked_for or done.stderr == ""


def test_errors_with_paths_that_are_not_utf8_are_json(triforce, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    exit_code, _, said = triforce("plan", "--model", str(folder), "--json")
    assert exit_code == 4
    assert json.loads(said)["error"]["kind"] == "model"
