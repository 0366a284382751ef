"""scripts/process_replay.py: what it records is the same again, and a change shows."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import process_replay  # noqa: E402


def test_there_are_forty_configurations_with_names_of_their_own(tmp_path: Path) -> None:
    names = [name for name, _ in process_replay.Configurations(tmp_path).all()]
    assert len(set(names)) == len(names) >= 40
    assert not list(tmp_path.iterdir())  # a model is made when its configuration is reached


def test_differences_have_their_places() -> None:
    before = {"a": [1, {"b": 2, "c": 3}], "d": [1, 2]}
    after = {"a": [1, {"b": 4, "c": 3}], "d": [1], "e": 5}
    assert list(process_replay.differences(before, after)) == ["/a/1/b: 2 -> 4", "/d: [1, 2] -> [1]", "/e: null -> 5"]
    assert list(process_replay.differences(before, before)) == []


def test_times_and_names_are_left_out_and_predictions_of_plans_are_not() -> None:
    said = {"tokens": [1], "decode_seconds": 0.1, "levels": [], "id": "x", "predicted": {"prefill_seconds": 2.0}}
    assert process_replay.stable(said) == {"tokens": [1]}
    plan = process_replay.stable(said, is_timed=False)
    assert plan["predicted"] == {"prefill_seconds": 2.0}
    assert "id" not in plan


def test_a_command_line_is_recorded_the_same_again_and_a_change_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_replay, "_import_libraries", lambda: None)
    monkeypatch.setattr(process_replay, "served", lambda target: {})
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def done(what: str) -> int:
        monkeypatch.setattr(sys, "argv", ["process_replay.py", what, str(tmp_path), "--only", "128K, 1"])
        return process_replay.main()

    assert done("record") == 0
    assert done("compare") == 0
    assert "equal in 1 configurations" in capsys.readouterr().out
    record = json.loads((file := tmp_path / "record.json").read_text())
    plan = record["plan of Llama2-13B-128K, 1 GPUs"][0]["said"][0]
    assert plan["plan"]["predicted"]["seconds_per_token"] > 0
    plan["plan"]["placement"]["rows"] += 1
    file.write_text(json.dumps(record))
    assert done("compare") == 1
    assert "/plan of Llama2-13B-128K, 1 GPUs/0/said/0/plan/placement/rows: " in capsys.readouterr().out
