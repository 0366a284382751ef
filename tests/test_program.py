"""Another program is compared in its fastest setting: which is found, what is tried for it, and how it is named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from offload.bench.comparison import Setting, Tried, fastest, name_of
from offload.bench.program import SHORT_PROMPT, TRIAL_TOKENS, Program, at_its_best, find_setting
from offload.decode.sampling import SamplingParams
from offload.errors import TriforceError

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

    def test_it_runs_in_the_setting_found_and_has_the_prompt_to_read(self):
        fake = Fake(lambda setting, num_tokens: (1.0, 5.0 if setting["flash"] == "on" else 10.0))
        with at_its_best(fake.program, SHORT, context=150, on_trial=lambda setting: None) as (other, tried):
            assert fake.started[-1] == (dict(fastest(tried).setting), 150)
            assert fake.started[-1][0]["flash"] == "on"
            _, seconds = other.generate(SHORT, SamplingParams(temperature=0.0), max_tokens=2, end_tokens=())
            assert seconds[0] == 1.0
        assert fake.running == 0


def test_a_setting_is_named_by_all_of_it_or_by_what_differs():
    setting = {"flash_attention": "off", "cache": "f16", "threads": 2}
    assert name_of(setting) == "flash attention off, cache f16, threads 2"
    assert name_of(setting | {"cache": "f32"}, setting) == "cache f32"
    assert name_of(setting, setting) == ""
