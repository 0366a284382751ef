"""How much of the CPU others use, from counters of the system and of this process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.models import random_model, save
from offload.speed.rates import FOLDER_VARIABLE
from triforce_cli.screen import busy
from triforce_cli.screen.busy import OtherPrograms

SHARE = OtherPrograms.share  # as it is; within other tests nobody else computes


@pytest.mark.parametrize(
    ("used", "idle", "own", "share"),
    [
        (0.0, 4.0, 0.0, 0.0),
        (2.0, 2.0, 2.0, 0.0),
        (3.0, 1.0, 1.0, 0.5),
        (4.0, 0.0, 1.0, 0.75),
        (1.0, 3.0, 1.1, 0.0),
        (0.0, 0.0, 0.0, 0.0),
    ],
)
def test_what_others_used_is_what_was_used_less_our_own(
    monkeypatch: pytest.MonkeyPatch, used: float, idle: float, own: float, share: float
) -> None:
    readings = iter([(100.0, 50.0, 7.0), (100.0 + used, 50.0 + idle, 7.0 + own)])
    monkeypatch.setattr(busy, "_seconds", lambda: next(readings))
    assert SHARE(OtherPrograms()) == share


def test_the_systems_counters_are_read() -> None:
    assert 0 <= SHARE(OtherPrograms()) <= 1


Generate = Callable[..., str]


def model(folder: Path) -> str:
    return str(save(random_model(vocab_size=264), folder / "model", tokenizer=True))


@pytest.fixture
def generate(
    monkeypatch: pytest.MonkeyPatch, triforce: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> Generate:
    """generate(share, *args): what is said where others use so much of the CPU, in a home of its own."""
    (tmp_path / "prompt.txt").write_text("Anne")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    asked = ("--model", model(tmp_path), "--prompt-file", str(tmp_path / "prompt.txt"), "--max-tokens", "1")

    def run(share: float, *args: str) -> str:
        monkeypatch.setattr(OtherPrograms, "share", lambda self: share)
        return triforce("generate", *asked, "--device", "cpu", *args)[2]

    return run


NOTE = "other programs use 50% of the CPU: passes take longer than planned"


def test_others_are_named_when_a_model_is_timed_and_not_before_short_work(generate: Generate) -> None:
    """Nearly every command began with this note."""
    assert NOTE in generate(0.5)  # passes are timed
    assert NOTE not in generate(0.5)


def test_others_who_use_little_are_not_named(generate: Generate) -> None:
    assert "other programs" not in generate(0.1)


def test_others_are_named_before_long_work_once_a_day(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(0.0)
    monkeypatch.setattr(busy, "LONG_SECONDS", 0.0)
    assert NOTE in generate(0.5)
    assert NOTE not in generate(0.5)
    tomorrow = date.today() + timedelta(days=1)
    monkeypatch.setattr(busy, "date", SimpleNamespace(today=lambda: tomorrow))
    assert NOTE in generate(0.5)


def test_others_are_not_named_before_a_usage_error(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(0.0)
    monkeypatch.setattr(busy, "LONG_SECONDS", 0.0)
    assert generate(0.5, "--context", "3").splitlines()[-1].startswith("error: the prompt has")
    assert NOTE in generate(0.5)  # nobody had said it


def test_a_bench_always_names_others(
    monkeypatch: pytest.MonkeyPatch, triforce: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Also where nothing is timed for the first time, and what it measures is short."""
    monkeypatch.setattr(OtherPrograms, "share", lambda self: 0.5)
    (tmp_path / "prompt.txt").write_text("Anne was there. " * 4)
    asked = ("--model", model(tmp_path), "--prompt-file", str(tmp_path / "prompt.txt"), "--contexts", "40")
    for _ in range(2):
        code, _, err = triforce("bench", *asked, "--max-tokens", "2", "--repeats", "1", "--device", "cpu")
        assert (code, NOTE in err) == (0, True)
