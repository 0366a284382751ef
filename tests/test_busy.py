"""How much of the CPU others use, from counters of the system and of this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from models import random_model, save
from triforce_cli import busy
from triforce_cli.busy import OtherPrograms

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


@pytest.mark.parametrize(("share", "said"), [(0.5, True), (0.1, False)])
def test_a_command_says_at_its_start_that_others_compute(
    monkeypatch: pytest.MonkeyPatch,
    triforce: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    share: float,
    said: bool,
) -> None:
    (tmp_path / "prompt.txt").write_text("Anne")
    monkeypatch.setattr(OtherPrograms, "share", lambda self: share)
    model = save(random_model(vocab_size=264), tmp_path / "model", tokenizer=True)
    asked = ("--model", str(model), "--prompt-file", str(tmp_path / "prompt.txt"), "--max-tokens", "1")
    code, _, err = triforce("generate", *asked, "--device", "cpu")
    assert code == 0
    assert ("other programs use 50% of the CPU: passes take longer than planned" in err) == said
