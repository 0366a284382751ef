"""`triforce generate` from file to text on the real engine, with random models small enough for a second."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

from kit.models import byte_tokenizer, save_pair
from kit.programs import begin
from test_cli_fake import environment
from triforce_cli.setup import choice

CONTEXT = 1024
PROMPT = "".join(f"Line {i} of a long and rather dull text.\n" for i in range(15))  # about 600 tokens
SMALL_LEVELS = ("--gamma", "4", "--draft-gamma", "2", "--budget", "64", "--chunk", "8", "--window", "32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder, context=CONTEXT)
    (folder / "prompt.txt").write_text(PROMPT)
    return folder


class Shell:
    """Runs `triforce generate` in this process and keeps what it wrote."""

    def __init__(self, folder: Path, triforce: Callable[..., tuple[int, str, str]]) -> None:
        self._triforce = triforce
        self._common = (
            *("generate", "--model", str(folder / "target"), "--prompt-file", str(folder / "prompt.txt")),
            *("--dtype", "fp32", "--max-tokens", "24", "--quiet"),
        )

    def code(self, *args: str, file: Path | None = None) -> tuple[int, str, str]:
        """file: in place of the usual prompt."""
        common = list(self._common)
        if file is not None:
            common[common.index("--prompt-file") + 1] = str(file)
        return self._triforce(*common, *args)

    def text(self, *args: str) -> str:
        code, out, err = self.code(*args)
        assert (code, err) == (0, "")
        return out

    def document(self, *args: str) -> dict:
        return json.loads(self.text("--json", *args))


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """Documents that several tests compare theirs with."""
    return {}


@pytest.fixture
def shell(folder: Path, triforce: Callable[..., tuple[int, str, str]]) -> Shell:
    return Shell(folder, triforce)


def test_without_speculation_the_text_is_the_same(shell, folder):
    args = ("--draft", str(folder / "draft"), *SMALL_LEVELS, "--temperature", "0")
    code, out, err = shell.code(*args, "--compare", "--stats")
    assert (code, out) == (0, shell.text(*args))
    assert "times as long, and the text is the same" in err
    assert "draft -> retrieval -> target" in err  # the table is of the text that was shown


def test_same_seed_gives_the_same_bytes_and_another_seed_others(shell, folder):
    args = ("--draft", str(folder / "draft"), *SMALL_LEVELS, "--temperature", "1", "--top-p", "1")
    first = shell.text(*args, "--seed", "1")
    assert shell.text(*args, "--seed", "1") == first
    assert shell.text(*args, "--seed", "2") != first


@pytest.mark.parametrize(
    "args",
    [
        SMALL_LEVELS,
        (*SMALL_LEVELS, "--draft", "draft"),
        (*SMALL_LEVELS, "--draft", "draft", "--offload", "weights,kv", "--link-gbps", "2"),
        ("--draft", "draft", "--gamma", "7", "--draft-gamma", "1", "--budget", "128", "--chunk", "16"),
        ("--no-speculation", "--offload", "kv"),
        ("--context", "700"),
    ],
)
def test_greedy_text_is_that_of_plain_decoding(args, shell, folder, said):
    placed = [str(folder / "draft") if arg == "draft" else arg for arg in args]
    if "plainly" not in said:
        said["plainly"] = shell.document("--temperature", "0", "--no-speculation")
    plain = said["plainly"]
    assert plain["plan"]["composition"]["levels"] == ["target"]
    document = shell.document("--temperature", "0", *placed)
    assert document["tokens"] == plain["tokens"]
    assert document["text"] == plain["text"]


def test_json_agrees_with_the_text_and_with_itself(shell, folder):
    args = ("--draft", str(folder / "draft"), *SMALL_LEVELS, "--seed", "1")
    document = shell.document(*args)
    assert document["text"] == shell.text(*args)
    assert document["text"] == byte_tokenizer().decode(document["tokens"], skip_special_tokens=True)
    assert (document["finish_reason"], len(document["tokens"])) == ("length", 24)
    assert document["stats"]["output_tokens"] == 24
    assert document["stats"]["prompt_tokens"] == document["plan"]["request"]["num_prompt_tokens"] == len(PROMPT)
    assert document["plan"]["composition"]["levels"] == [
        level["name"] for level in reversed(document["stats"]["levels"])
    ]
    composition = document["plan"]["composition"]
    assert (composition["gamma"], composition["budget"]) == (4, 64)


def test_offloaded_bytes_are_in_the_stats(shell, folder):
    document = shell.document("--offload", "weights,kv", "--link-gbps", "2", *SMALL_LEVELS)
    assert document["stats"]["decode_link"]["bytes_to_device"] > 0
    assert document["stats"]["link_utilisation"] > 0
    code, _, table = shell.code("--offload", "kv", "--stats")
    assert code == 0
    assert "offload kv" in table
    assert "to device" in table


def test_text_ends_before_a_stop_string(shell):
    text = shell.text("--seed", "1")
    stop = text[5:7]
    document = shell.document("--seed", "1", "--stop", stop)
    assert document["text"] == text[: text.index(stop)]
    assert document["finish_reason"] == "stop"


def test_output_is_cut_at_the_context_with_a_note(folder, triforce):
    args = ("--model", str(folder / "target"), "--prompt-file", str(folder / "prompt.txt"), "--dtype", "fp32")
    limits = ("--context", str(len(PROMPT) + 5), "--max-tokens", "50")
    code, out, err = triforce("generate", *args, *limits, "--json")
    assert code == 0
    assert len(json.loads(out)["tokens"]) == 5
    assert "--max-tokens 50 cut to 5" in err


def test_embedded_pair_is_used_without_a_model_and_a_line_says_so(folder, triforce, monkeypatch):
    monkeypatch.setattr(choice, "embedded_model", lambda name: folder / name.removeprefix("demo-"))
    args = ("generate", "--prompt-file", str(folder / "prompt.txt"), "--dtype", "fp32", "--max-tokens", "3", "--json")
    code, out, err = triforce(*args)
    assert code == 0
    assert json.loads(out)["model"] == {"target": str(folder / "target"), "draft": str(folder / "draft")}
    assert f"no --model given: using the embedded demo model ({folder / 'target'})" in err.splitlines()
    assert triforce(*args, "--quiet")[::2] == (0, "")


def test_prompt_longer_than_the_context_ends_with_3_and_numbers(shell, tmp_path):
    long = tmp_path / "long.txt"
    long.write_text("x" * (CONTEXT + 1))
    code, out, err = shell.code(file=long)
    assert (code, out) == (3, "")
    assert str(CONTEXT + 1) in err
    assert str(CONTEXT) in err
    code, _, err = shell.code("--context", "100")
    assert code == 3
    assert "--context" in err


class TestUnusableModel:
    """Each ends with 4, names the culprit and writes nothing to standard output."""

    @pytest.fixture
    def broken(self, folder: Path, tmp_path: Path) -> Path:
        """A copy of the target, to be broken."""
        for file in (folder / "target").iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        return tmp_path

    @staticmethod
    def refused(shell: Shell, *args: str) -> str:
        code, out, err = shell.code(*args)
        assert (code, out) == (4, "")
        assert err.startswith("error: ")
        assert "unexpected" not in err.split(":")[1]
        return err

    def test_truncated_safetensors(self, broken, shell):
        file = broken / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
        assert "model.safetensors" in self.refused(shell, "--model", str(broken))

    def test_header_of_a_huge_length(self, broken, shell):
        file = broken / "model.safetensors"
        file.write_bytes(struct.pack("<Q", 2**62) + file.read_bytes()[8:])
        assert "model.safetensors" in self.refused(shell, "--model", str(broken))

    def test_index_that_leaves_the_folder(self, broken, shell):
        (broken / "model.safetensors").unlink()
        (broken / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"lm_head.weight": "../model.safetensors"}})
        )
        assert "../model.safetensors" in self.refused(shell, "--model", str(broken))

    def test_config_that_is_no_json(self, broken, shell):
        (broken / "config.json").write_text("{")
        assert "config.json" in self.refused(shell, "--model", str(broken))

    def test_folder_without_a_model(self, shell, tmp_path):
        assert str(tmp_path) in self.refused(shell, "--model", str(tmp_path))

    def test_draft_with_another_vocabulary(self, broken, shell, folder):
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens(["<another>"])
        tokenizer.save_pretrained(broken)
        error = self.refused(shell, "--draft", str(broken))
        assert str(broken) in error
        assert str(folder / "target") in error


def program(folder: Path, *args: str) -> list[str]:
    model = ("--model", str(folder / "target"), "--draft", str(folder / "draft"), *SMALL_LEVELS, "--dtype", "fp32")
    return ["generate", *model, "--quiet", *args]


def test_pipe_in_and_head_out(folder):
    reading, writing = os.pipe()
    with (folder / "prompt.txt").open() as prompt, open(reading, "rb", buffering=0) as out, TemporaryFile() as errors:
        args = program(folder, "--prompt", "In short:", "--seed", "1", "--max-tokens", "400")
        cat = subprocess.Popen(["cat"], stdin=prompt, stdout=subprocess.PIPE)
        assert cat.stdout is not None
        process = begin(args, env=environment(), streams=(cat.stdout.fileno(), writing, errors.fileno()))
        cat.stdout.close()
        os.close(writing)
        read = b""
        while len(read) < 20 and (data := out.read(20 - len(read))):
            read += data
        out.close()  # as head does
        process.join()
        assert cat.wait() == 0
        assert (process.exitcode, os.pread(errors.fileno(), 1 << 16, 0)) == (0, b"")
    assert len(read) == 20


def test_interrupt_keeps_the_text_so_far(folder):
    args = program(folder, "--prompt-file", str(folder / "prompt.txt"), "--max-tokens", "400")
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as out, open(os.devnull) as nothing, TemporaryFile() as errors:
        process = begin(
            [*args, "--temperature", "0", "--offload", "kv", "--link-gbps", "0.01"],
            env=environment(),
            streams=(nothing.fileno(), writing, errors.fileno()),
        )
        os.close(writing)
        first = out.read(1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        out.readall()
        process.join()
        assert (process.exitcode, os.pread(errors.fileno(), 1 << 16, 0)) == (130, b"")
    assert first
