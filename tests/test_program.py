"""Other programs of benchmarks/: their fastest setting, how it is found and named; and transformers itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch import Tensor
from torch.nn import Module
from transformers.models.llama import modeling_llama

from kit.models import random_tokens, save_pair
from offload.decode.sampling import SamplingParams
from offload.errors import TriforceError

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # last: one of them is called as one here

from program import (
    GREEDY,
    SHORT_PROMPT,
    TRIAL_TOKENS,
    Program,
    Setting,
    Tried,
    fastest,
    find_setting,
    milliseconds_after_first,
    name_of,
)
from reference import Reference

CHOICES = {"flash": ("off", "on"), "cache": ("f16", "f32"), "block": (512, 128)}
SHORT, LONG = [1] * 100, [1] * (2 * SHORT_PROMPT)
Times = Callable[[Setting, int], tuple[float, float]]


@dataclass
class Fake:
    """times: (seconds to the first token, milliseconds a token) of a setting after so many tokens; or an error."""

    times: Times
    started: list[tuple[dict[str, str | int], int]] = field(default_factory=list)
    running: int = 0

    @property
    def program(self) -> Program:
        return Program(name="fake", choices=CHOICES, by_length=frozenset({"flash", "cache"}), start=self.start)

    @contextmanager
    def start(self, setting: Setting, context: int) -> Iterator[Running]:
        assert self.running == 0, "two at a time share the cores"
        self.started.append((dict(setting), context))
        self.running += 1
        try:
            yield Running(setting, self.times)
        finally:
            self.running -= 1

    def find(self, prompt: Sequence[int]) -> list[Tried]:
        return find_setting(self.program, prompt, on_trial=lambda setting: None)


@dataclass
class Running:
    setting: Setting
    times: Times
    runs: int = 0

    def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, *, max_tokens: int, end_tokens: Collection[int]
    ) -> tuple[list[int], list[float]]:
        first, milliseconds = self.times(self.setting, len(prompt))
        self.runs += 1
        if self.runs == 1:
            milliseconds *= 3  # a slow moment
        else:
            first = 0.0  # the prompt has been read
        return [0] * max_tokens, [first + place * milliseconds / 1000 for place in range(max_tokens)]


def flat(setting: Setting, num_tokens: int) -> tuple[float, float]:
    return 1.0, 10.0


class TestSearch:
    @pytest.mark.parametrize("best", [{"flash": "on", "cache": "f16"}, {"flash": "off", "cache": "f32"}])
    def test_the_fastest_is_found_whichever_it_is(self, best):
        """Bug: llama.cpp was compared with flash attention on, where off took 11.8 ms for 28.5."""
        fake = Fake(lambda setting, num_tokens: (1.0, 20.0 - 5 * sum(setting[part] == best[part] for part in best)))
        found = fastest(fake.find(SHORT))
        assert found.setting == best | {"block": 512}
        assert (found.milliseconds_per_token, found.first_token_seconds) == (pytest.approx(10), 1.0)

    def test_where_tokens_take_as_long_the_reading_of_the_prompt_decides(self):
        def times(setting: Setting, num_tokens: int) -> tuple[float, float]:
            return (0.5, 10.1) if setting["block"] == 128 else (1.0, 10.0)

        assert fastest(Fake(times).find(SHORT)).setting["block"] == 128

    def test_the_first_values_stay_where_nothing_is_faster(self):
        fake = Fake(flat)
        tried = fake.find(SHORT)
        assert fastest(tried).setting == {"flash": "off", "cache": "f16", "block": 512}
        assert len(tried) == 4
        assert {context for _, context in fake.started} == {len(SHORT) + TRIAL_TOKENS}

    def test_a_setting_that_does_not_run_is_kept_with_its_error(self):
        def times(setting: Setting, num_tokens: int) -> tuple[float, float]:
            if setting["flash"] == "on":
                raise TriforceError("no flash attention here")
            return 1.0, 10.0

        tried = Fake(times).find(SHORT)
        assert [trial.setting["flash"] for trial in tried if trial.error == "no flash attention here"] == ["on"]
        assert fastest(tried).setting["flash"] == "off"

    def test_a_program_that_does_not_run_at_all_says_why(self):
        def times(setting: Setting, num_tokens: int) -> tuple[float, float]:
            raise TriforceError("no room")

        with pytest.raises(TriforceError, match="no setting ran; the first ended with: no room"):
            Fake(times).find(SHORT)

    def test_a_long_prompt_is_tried_with_what_was_not_far_behind_over_a_short_one(self):
        """An f32 cache is a little slower over a short prompt and faster over the whole one; flash attention is far
        behind, and its long prompt is not read. How prompts are cut does not depend on their length."""

        def times(setting: Setting, num_tokens: int) -> tuple[float, float]:
            price = {"off": 10.0, "on": 30.0}[str(setting["flash"])]
            wide = setting["cache"] == "f32"
            if num_tokens == SHORT_PROMPT:
                return 1.0, price + wide
            return 4.0, 2 * price - wide

        tried = Fake(times).find(LONG)
        whole = [trial for trial in tried if trial.num_prompt_tokens == len(LONG)]
        assert [trial.num_prompt_tokens for trial in tried[:-2]] == [SHORT_PROMPT] * 4
        assert [(trial.setting["flash"], trial.setting["cache"]) for trial in whole] == [("off", "f16"), ("off", "f32")]
        assert fastest(tried) == whole[1]


def test_a_setting_is_named_by_all_of_it():
    assert (
        name_of({"flash_attention": "off", "cache": "f16", "threads": 2}) == "flash attention off, cache f16, threads 2"
    )


def test_tokens_that_come_together_are_timed_after_the_first_moment():
    assert milliseconds_after_first([1.0, 1.5, 1.5, 2.0]) == pytest.approx(1000 / 3)
    assert milliseconds_after_first([1.0, 1.0, 2.0]) == pytest.approx(1000)
    assert milliseconds_after_first([1.0]) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder, context=512)
    return folder


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_tokens(90, vocabulary=256) * 2


class TestReference:
    def test_a_prompt_that_it_has_read_gives_the_same_text(self, folder, prompt):
        reference = Reference(folder / "target", dtype="fp32", device="cpu")
        fresh, moments = reference.generate(prompt, GREEDY, max_tokens=6, end_tokens=())
        assert moments == sorted(moments)
        assert len(moments) == 6
        again, _ = reference.generate(prompt, GREEDY, max_tokens=6, end_tokens=())
        assert again == fresh
        stopped, _ = reference.generate(prompt, GREEDY, max_tokens=6, end_tokens={fresh[2]})
        assert stopped == fresh[: fresh.index(fresh[2]) + 1]

    def test_eager_attention_decodes_what_sdpa_has_read(self, folder, prompt, monkeypatch):
        """All of the prompt at once in eager attention is a matrix of the prompt with itself."""
        texts, rows, eager = dict[str, list[int]](), set[int](), modeling_llama.eager_attention_forward

        def spy(layer: Module, query: Tensor, *others: object, **named: object) -> object:
            rows.add(query.shape[2])
            return eager(layer, query, *others, **named)

        monkeypatch.setattr(modeling_llama, "eager_attention_forward", spy)
        for attention in ("sdpa", "eager"):
            reference = Reference(folder / "target", dtype="fp32", device="cpu", attention=attention)
            texts[attention] = []
            for asked in (prompt, prompt, prompt[::-1]):
                text, moments = reference.generate(asked, GREEDY, max_tokens=8, end_tokens=())
                texts[attention] += text
                assert len(moments) == 8
        assert texts["sdpa"] == texts["eager"]
        assert rows == {1}

    def test_settings_that_a_folder_brings_do_not_count(self, folder, tmp_path, prompt):
        """Bug: a repetition penalty in generation_config.json made transformers sample from another distribution."""
        for file in (folder / "target").iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 5.0}')
        texts = [
            Reference(where, dtype="fp32", device="cpu").generate(prompt, GREEDY, max_tokens=8, end_tokens=())[0]
            for where in (folder / "target", tmp_path)
        ]
        assert texts[0] == texts[1]

    def test_a_folder_that_transformers_cannot_load_is_named(self, tmp_path):
        with pytest.raises(TriforceError, match=str(tmp_path)):
            Reference(tmp_path, dtype="fp32", device="cpu")

    @pytest.mark.parametrize("speculation", ["draft", "lookup"])
    def test_with_speculation_it_writes_the_same_text_in_every_turn(self, folder, speculation):
        """Bug of its: with the prompt's rows kept, speculation writes another text."""
        model = folder / "target"
        prompt = random_tokens(20, vocabulary=256) * 3
        kind = {"draft": {"draft": model}, "lookup": {"lookup": 10}}[speculation]
        plain, other = (Reference(model, dtype="fp32", device="cpu", **options) for options in ({}, kind))
        text, _ = plain.generate(prompt, GREEDY, max_tokens=12, end_tokens=())
        for _ in range(2):
            tokens, seconds = other.generate(prompt, GREEDY, max_tokens=12, end_tokens=())
            assert tokens == text
            assert len(seconds) == 12
            assert seconds == sorted(seconds)
