"""The table of samplers: what each of its rows is offered as, its range, and that it does something.

tests/test_cli_options.py tries the options.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from kit.sampler_values import others
from kit.sampling_reference import Letters
from offload.decode.distribution import distribution_of
from offload.decode.sampling import SETTINGS, Row, SamplingParams
from offload.errors import UsageError
from triforce_cli.answering.request import Wanted
from triforce_cli.app import app
from triforce_cli.batch.records import read_records
from triforce_cli.chat.settings import Settings
from triforce_cli.options.control import BASIC
from triforce_cli.settings import tree

DEFAULTS = SamplingParams()
OFF = replace(DEFAULTS, temperature=1.0, **{row.name: row.off for row in SETTINGS.values() if row.off is not None})
SOME_ON = replace(OFF, repetition_penalty=1.5, dry_multiplier=0.5, dry_allowed_length=1, xtc_probability=0.5)
TOKENS = [0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 1]
SIZE, END, NUM_PROMPT = 6, 5, 9
COMMANDS = tree.commands(typer.main.get_command(app))
SAMPLING_PAGE = Path(__file__).resolve().parents[1] / "docs" / "sampling.md"

each_row = pytest.mark.parametrize("row", SETTINGS.values(), ids=SETTINGS)


def probs(sampling: SamplingParams) -> torch.Tensor:
    """At the last three places of TOKENS."""
    letters: Any = Letters(SIZE)
    made = distribution_of(sampling, letters, num_prompt=NUM_PROMPT, vocab_size=SIZE, end_tokens=(END,))
    return made.probs(logits(), TOKENS)


def logits() -> torch.Tensor:
    return torch.tensor(
        [[2.0, 1.5, 1.0, 0.5, 0.0, -0.5], [0.3, 2.0, 1.0, 0.0, 0.6, 1.2], [-1.0, 0.0, 3.0, 2.5, 2.0, 1.0]]
    )


def parsed(*args: str) -> SamplingParams:
    return app(["generate", *args], standalone_mode=False).arguments["wanted"].sampling


@pytest.mark.parametrize("row", [row for row in SETTINGS.values() if row.kind is not bool], ids=lambda row: row.name)
def test_its_limits_are_allowed_and_nothing_beyond(row: Row) -> None:
    limits = ([] if row.above else [row.low]) + ([] if row.high == math.inf else [row.high])
    beyond = [row.low - 1, *([row.low] if row.above else []), *([] if row.high == math.inf else [row.high + 1])]
    for value in limits:
        assert getattr(replace(DEFAULTS, **{row.name: value}), row.name) == value
    for value in (*beyond, *([math.nan, math.inf] if row.kind is float else [])):
        with pytest.raises(UsageError) as caught:
            replace(DEFAULTS, **{row.name: value})
        assert str(caught.value) == f"{row.label} is {value}, it must be {row.wanted}"


def test_where_all_are_off_the_distribution_is_that_of_the_logits() -> None:
    assert torch.equal(probs(OFF), logits().softmax(-1))


@pytest.mark.parametrize("row", [row for row in SETTINGS.values() if row.name != "seed"], ids=lambda row: row.name)
def test_each_changes_the_distribution(row: Row) -> None:
    """By itself, or beside the samplers that it is about."""
    base = OFF if row.off is not None else SOME_ON
    assert any(not torch.equal(probs(replace(base, **{row.name: value})), probs(base)) for value in others(row))


def test_what_is_not_given_is_as_the_table_says(tmp_path: Path) -> None:
    assert parsed("--model", str(tmp_path)) == DEFAULTS


@pytest.mark.parametrize("command", ["generate", "ask", "chat", "verify", "bench"])
def test_commands_that_sample_have_all_in_order_and_bench_those_of_other_programs(command: str) -> None:
    labels = [SETTINGS[name].label for name in (BASIC if command == "bench" else SETTINGS)]
    labels.sort(key=lambda label: not SETTINGS[label.replace("-", "_")].common)  # hidden ones come last
    assert [label for label in tree.options(COMMANDS[command,]) if label.replace("-", "_") in SETTINGS] == labels


@each_row
def test_help_says_what_the_table_says(row: Row) -> None:
    option = tree.options(COMMANDS["generate",])[row.label]
    shown = "" if row.optional or row.kind is bool else f" \\[default: {row.default}]"
    assert option.help == f"{row.help}{shown}"
    assert option.hidden is not row.common


@each_row
def test_each_is_a_key_of_a_configuration_file(row: Row, tmp_path: Path) -> None:
    value, file = others(row)[0], tmp_path / "config.toml"
    file.write_text(f"[generate]\n{row.label} = {json.dumps(value)}\n")
    assert parsed("--model", str(tmp_path), "--config", str(file)) == replace(DEFAULTS, **{row.name: value})


@each_row
def test_each_is_a_field_of_a_line_of_a_batch(row: Row) -> None:
    defaults = Wanted(max_tokens=7, sampling=DEFAULTS)
    for value in others(row):
        [record] = read_records(json.dumps({"prompt": "x", row.name: value}), "lines", defaults)
        assert record.wanted.sampling == replace(DEFAULTS, **{row.name: value})
    with pytest.raises(UsageError, match=f'line 1: {row.name} is "much"; it must be '):
        read_records(json.dumps({"prompt": "x", row.name: "much"}), "lines", defaults)


@each_row
def test_each_can_be_set_in_a_chat(row: Row) -> None:
    settings = Settings(sampling=DEFAULTS, max_tokens=9)
    for value in others(row):
        said = "on" if value is True else str(value)
        changed = settings.changed(row.label, said)
        assert changed.sampling == replace(DEFAULTS, **{row.name: value})
        assert f"{row.label} {said}" in str(changed)
    with pytest.raises(UsageError, match=f"{row.label} is 'much', it must be "):
        settings.changed(row.label, "much")


def test_the_page_on_sampling_names_each() -> None:
    page = SAMPLING_PAGE.read_text(encoding="utf-8")
    assert [row.name for row in SETTINGS.values() if f"`--{row.label}" not in page] == ["seed"]
