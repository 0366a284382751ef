"""Times of passes on a CPU: the curve over rows, the file that keeps them, and when they are measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.models import PASS_TIMES
from offload.config.encodings import encoded
from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.config.rope import Rope
from offload.engine.engine import plan_request
from offload.kernels import cpu
from offload.kernels.device import NONE
from offload.machine import machine_name
from offload.plan.options import Options
from offload.plan.request import Request
from offload.speed import pass_times, rates
from offload.speed.hardware import TWO_CORES, rates_key
from offload.speed.pass_times import ROWS, PassTimes, estimated, key_of, load_times, save_times
from offload.speed.rates import FOLDER_VARIABLE, load_rates, rates_file, save_rates
from offload.worker import pass_timer, timed_runs
from offload.worker.pass_timer import time_again, time_passes, timed
from triforce_cli.setup.choice import choose_models

MODELS = choose_models(None, None)
PAIRS = 2_000_000  # of a row and a token that it sees
TARGET, DRAFT = (read_config(folder) for folder in (MODELS.target, MODELS.draft) if folder)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pass_timer, "time_passes", time_passes)  # the real one: see conftest.py
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(("limit", "found"), [(1.0, {("a", 1): 0.01, ("b", 2): 0.02}), (0.06, None)])
def test_of_each_points_runs_the_shortest_counts(limit: float, found: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points take turns, until that was long enough. No two turns of all within the limit: nothing is known."""
    taken = {("a", 1): iter((0.03, 0.01, 0.02, 0.05)), ("b", 2): iter((0.02, 0.04, 0.06, 0.03))}
    now = [0.0]

    def run(point: timed_runs.Point) -> None:
        now[0] += next(taken[point])

    monkeypatch.setattr(timed_runs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    points = {point: partial(run, point) for point in taken}
    assert timed_runs.least_seconds(points, limit) == (found and pytest.approx(found))
    assert [*taken["a", 1]] == ([0.02, 0.05] if found is None else [])


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of what is measured, which takes no time here."""
    keys: list[str] = []

    def time_none(config: ModelConfig, dtype: str, weight_bits: int) -> PassTimes:
        keys.append(key_of(config, dtype, weight_bits))
        return replace(PASS_TIMES, kernels=pass_timer._kernels_name(config))

    monkeypatch.setattr(pass_timer, "time_passes", time_none)
    return keys


def on_this_machine(**options: Any) -> Request:
    return Request.on_this_machine(MODELS.target, MODELS.draft, Options(device="cpu", **options))


class TestTheCurve:
    def test_has_the_measured_values_at_the_measured_rows(self) -> None:
        for index, rows in enumerate(ROWS):
            expected = PASS_TIMES.fixed[index] + 3 * (PASS_TIMES.layer[index] + 100 * PASS_TIMES.token[index])
            assert PASS_TIMES.seconds(3, 100, rows) == pytest.approx(expected)

    def test_is_straight_between_them_and_goes_on_in_proportion(self) -> None:
        def layer(rows: int) -> float:
            return PASS_TIMES.seconds(1, 0, rows) - PASS_TIMES.seconds(0, 0, rows)

        assert layer(6) == pytest.approx(1.5e-3)
        assert layer(20) == pytest.approx(5e-3)
        assert layer(96) == pytest.approx(24e-3)

    def test_fewer_tokens_than_the_processors_caches_keep_cost_less_each(self) -> None:
        times = replace(PASS_TIMES, token=(4e-7,) * 7, near_token=(1e-7,) * 7, num_near=1000, num_tokens=3000)

        def token(num_tokens: int) -> float:
            return (times.seconds(1, num_tokens, 1) - times.seconds(1, 0, 1)) / num_tokens

        assert [token(n) for n in (10, 1000, 2000, 3000, 9000)] == pytest.approx([1e-7, 1e-7, 2.5e-7, 4e-7, 4e-7])

    def test_never_falls_with_more_rows_or_tokens(self) -> None:
        for times in (PASS_TIMES, estimated(TARGET, 2, TWO_CORES)):
            by_rows = [times.seconds(8, 1000, rows) for rows in range(1, 200)]
            assert by_rows == sorted(by_rows)
            assert times.seconds(8, 2000, 4) > times.seconds(8, 1000, 4)

    def test_masses_are_a_share_of_attention_alone(self) -> None:
        assert PASS_TIMES.seconds(2, 1000, 1, masses=True) - PASS_TIMES.seconds(2, 1000, 1) == pytest.approx(
            2 * 1000 * 0.5e-7
        )
        assert PASS_TIMES.seconds(2, 0, 1, masses=True) == PASS_TIMES.seconds(2, 0, 1)

    def test_that_others_disturbed_is_put_right_by_what_took_more_rows_less_time(self) -> None:
        assert pass_timer._rising([3.0, 1.0, 2.0, -1.0, 5.0]) == (1e-13, 1e-13, 1e-13, 1e-13, 5.0)
        assert pass_timer._rising([1.0, 9.0, 2.0]) == (1.0, 2.0, 2.0)


class TestTheFile:
    def test_gives_back_what_was_kept_by_machine_device_and_model(self) -> None:
        key, other = key_of(TARGET, "bf16"), key_of(TARGET, "fp32")
        save_times("here", "CPU, 2 threads", {key: PASS_TIMES})
        assert load_times("here", "CPU, 2 threads", key) == PASS_TIMES
        assert load_times("there", "CPU, 2 threads", key) is None
        assert load_times("here", "CPU, 1 threads", key) is None
        assert load_times("here", "CPU, 2 threads", other) is None
        assert load_times("here", "CPU, 2 threads", key_of(DRAFT, "bf16")) is None

    def test_tells_kernels_from_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        on = key_of(TARGET, "bf16")
        monkeypatch.setenv("TRIFORCE_KERNELS", "on")
        assert key_of(TARGET, "bf16") == on
        monkeypatch.setenv("TRIFORCE_KERNELS", "off")
        assert key_of(TARGET, "bf16") != on

    def test_a_model_is_known_by_its_shapes_alone(self) -> None:
        key = key_of(TARGET, "bf16")
        assert key_of(replace(TARGET.changed(rope=Rope(theta=5.0)), bos_token_id=None), "bf16") == key
        for name in ("vocab_size", "hidden_size", "num_layers", "num_kv_heads", "head_dim"):
            assert key_of(TARGET.changed(**{name: getattr(TARGET, name) + 2}), "bf16") != key

    def test_a_model_is_known_by_how_each_of_its_matrices_is_stored(self) -> None:
        """With few and with many matrices in 6 bits, two had one record."""
        forms = ("v_proj",), ("v_proj", "down_proj"), ("o_proj",), ()

        def stored(six: tuple[str, ...]) -> ModelConfig:
            head = "embed_tokens", "lm_head"
            return encoded(TARGET, lambda name: "Q6_K" if any(part in name for part in six + head) else "Q4_K")

        assert len({key_of(config, "bf16") for config in (TARGET, *map(stored, forms))}) == 1 + len(forms)

    def test_stored_matrices_take_longer_than_their_bytes_and_by_the_row(self) -> None:
        """They were thought to be read, by a factor of four too fast; the first row takes half of 16 bits' time."""
        stored = encoded(TARGET, lambda name: "Q4_0")
        plain, found = (estimated(config, 2, TWO_CORES) for config in (TARGET, stored))
        calls = pass_times._LAYER_SECONDS
        assert 0.5 <= (found.layer[0] - calls) / (plain.layer[0] - calls) < 0.51
        assert found.fixed[0] < plain.fixed[0]
        assert found.layer[-1] > plain.layer[-1]

    def test_keeps_rates_and_other_models(self) -> None:
        save_rates("here", {"CPU": replace(TWO_CORES, measured=True)})
        save_times("here", "CPU", {"one": PASS_TIMES})
        save_times("here", "CPU", {"two": replace(PASS_TIMES, mass_share=0.25)})
        save_rates("here", {"gpu": replace(TWO_CORES, measured=True)})
        assert load_times("here", "CPU", "one") == PASS_TIMES
        assert load_times("here", "CPU", "two") == replace(PASS_TIMES, mass_share=0.25)
        assert load_rates("here", "CPU") == replace(TWO_CORES, measured=True)
        save_times("here", "CPU", {"two": PASS_TIMES}, anew=True)
        assert load_times("here", "CPU", "one") is None
        assert load_times("here", "CPU", "two") == PASS_TIMES

    def test_loses_nothing_of_what_two_write_at_the_same_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both had read the file before either wrote it: two first starts lost what one had measured."""
        read, others = rates._read, list[threading.Thread]()

        def read_slowly(path: Path) -> dict[str, Any]:
            found = read(path)
            if not others:
                others.append(threading.Thread(target=save_times, args=("here", "CPU", {"two": PASS_TIMES})))
                others[0].start()
                others[0].join(0.05)
            return found

        monkeypatch.setattr(rates, "_read", read_slowly)
        save_times("here", "CPU", {"one": PASS_TIMES})
        others[0].join()
        assert load_times("here", "CPU", "one") == load_times("here", "CPU", "two") == PASS_TIMES

    def test_keeps_what_another_has_measured_of_the_same_kernels(self) -> None:
        other, third = replace(PASS_TIMES, mass_share=0.25), replace(PASS_TIMES, kernels="others")
        for times, expected in ((PASS_TIMES, PASS_TIMES), (other, PASS_TIMES), (third, third)):
            save_times("here", "CPU", {"one": times})
            assert load_times("here", "CPU", "one") == expected
        save_times("here", "CPU", {"one": replace(other, kernels="others")}, anew=True)
        assert load_times("here", "CPU", "one") == replace(other, kernels="others")

    @pytest.mark.parametrize(
        "damage",
        [
            {"layer": [1e-3] * 6}, {"layer": 1e-3}, {"token": [1e-7] * 6 + ["x"]}, {"fixed": [0.0] * 7},
            {"near_token": [1e-7] * 6}, {"num_near": -1}, {"num_tokens": 2.5}, {"num_tokens": None},
            {"fixed": [True] * 7}, {"fixed": [1e300] * 7}, {"prefill_row": None}, {"prefill_pair": -1.0},
            {"mass_share": -0.1}, {"mass_share": None}, {"kernels": ""}, {"kernels": 3},
        ],
    )  # fmt: skip
    def test_that_is_damaged_counts_as_not_measured(self, damage: dict[str, Any]) -> None:
        key = key_of(TARGET, "bf16")
        path = save_times(machine_name(), rates_key("cpu"), {key: PASS_TIMES})
        assert load_times(machine_name(), rates_key("cpu"), key) == PASS_TIMES
        known = json.loads(path.read_text())
        known[machine_name()][f"{rates_key('cpu')}, passes"][key].update(damage)
        path.write_text(json.dumps(known))
        assert load_times(machine_name(), rates_key("cpu"), key) is None
        assert on_this_machine().plan(num_prompt_tokens=100, max_tokens=9)

    @pytest.mark.parametrize("records", [[], {"CPU, passes": []}, {"CPU, passes": {"one": []}}, None])
    def test_of_another_kind_counts_as_not_measured(self, records: Any, folder: Path) -> None:
        folder.mkdir()
        rates_file().write_text(json.dumps({"here": records}))
        assert load_times("here", "CPU", "one") is None
        save_times("here", "CPU", {"one": PASS_TIMES})
        assert load_times("here", "CPU", "one") == PASS_TIMES


def measured(dtype: str) -> list[str]:
    """The keys of the models' passes; where there are kernels, of the target over weights in 4 and 6 bits, too."""
    coded = [key_of(TARGET, dtype, bits) for bits in (4, 6)] if cpu.kernels().usable else []
    return [key_of(TARGET, dtype), key_of(DRAFT, dtype), *coded]


class TestMeasuring:
    def test_happens_once_and_then_every_plan_has_it(self, measurements: list[str]) -> None:
        untimed = on_this_machine()
        assert untimed.times.target is None
        request = timed(untimed)
        dtype = request.dtype
        assert measurements == measured(dtype)
        assert request.times.target is not None
        assert len(measurements) == 2 + len(request.times.coded)
        assert timed(request).times == on_this_machine().times == request.times
        assert measurements == measured(dtype)
        made = plan_request(
            MODELS.target, MODELS.draft, Options(device="cpu"), num_prompt_tokens=9, max_tokens=9
        ).predicted
        assert made.full_pass_seconds == pytest.approx(request.times.target.seconds(TARGET.num_layers, 18, 1))

    def test_happens_again_where_other_kernels_run(
        self, measurements: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        timed(on_this_machine())
        monkeypatch.setattr(pass_timer, "_kernels_name", lambda config: "newer ones")
        assert timed(on_this_machine()).times.target == replace(PASS_TIMES, kernels="newer ones")
        assert measurements == 2 * measured(on_this_machine().dtype)

    def test_of_kernels_that_are_gone_is_not_used(
        self, measurements: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not cpu.kernels().usable:
            pytest.skip(cpu.kernels().reason)
        assert timed(on_this_machine()).times.coded
        monkeypatch.setattr(pass_timer, "_kernels", lambda config: NONE)
        assert not timed(on_this_machine()).times.coded

    def test_again_by_doctor_forgets_the_models_that_it_does_not_measure(self, measurements: list[str]) -> None:
        dtype = on_this_machine().dtype
        save_times(machine_name(), rates_key("cpu"), {"another": PASS_TIMES, key_of(TARGET, dtype): PASS_TIMES})
        time_again(MODELS.target, MODELS.draft)
        assert measurements == measured(dtype)
        assert load_times(machine_name(), rates_key("cpu"), "another") is None
        assert load_times(machine_name(), rates_key("cpu"), key_of(TARGET, dtype)) is not None

    def test_at_two_first_starts_gives_both_one_plan(
        self, measurements: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A seed's text at the start that had written first was another at all later ones."""
        request, time_none = on_this_machine(), pass_timer.time_passes

        def time_slowly(*model: Any) -> PassTimes | None:
            key, times = key_of(*model), time_none(*model)
            assert times is not None
            save_times(machine_name(), rates_key("cpu"), {key: replace(times, mass_share=0.25)})  # the other start
            return times

        monkeypatch.setattr(pass_timer, "time_passes", time_slowly)
        found = timed(request).times
        assert found.target is not None
        assert found.target.mass_share == 0.25
        assert found == on_this_machine().times

    def test_only_of_the_models_that_run(self, measurements: list[str]) -> None:
        request = timed(on_this_machine(speculation=False))
        assert measurements == [key_of(TARGET, request.dtype)]
        timed(on_this_machine(weight_bits=16))
        assert measurements == measured(request.dtype)[:2]

    def test_what_cannot_be_kept_is_not_used_or_the_next_plan_would_be_another(
        self, measurements: list[str], folder: Path
    ) -> None:
        folder.write_text("a file where the folder would be")
        request = on_this_machine()
        assert timed(request) == request

    def test_of_a_busy_processor_is_given_up_and_nothing_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pass_timer, "LIMIT_SECONDS", 0.0)
        monkeypatch.setattr(pass_timer, "LIMIT_RATE", 1e18)
        assert time_passes(DRAFT, "bf16") is None
        request = on_this_machine()
        assert timed(request) == request
        assert not rates_file().exists()

    def test_needs_no_more_tokens_than_there_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(timed_runs, "ENOUGH_SECONDS", 0.0)
        monkeypatch.setattr(pass_timer, "CACHE_BYTES", 2**20)
        assert time_passes(DRAFT.changed(vocab_size=20), "fp32") is not None

    @pytest.mark.deep
    def test_over_weights_in_few_bits_leaves_out_the_prefill(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if not cpu.kernels().usable:
            pytest.skip(cpu.kernels().reason)
        monkeypatch.setattr(pass_timer, "LIMIT_SECONDS", 1e3)
        exact, *coded = (time_passes(TARGET, "bf16", bits) for bits in (16, 4, 6))
        assert exact is not None
        for fewer in coded:
            assert fewer is not None
            assert fewer.layer[0] < exact.layer[0]
            assert fewer.prefill(1, 2000, PAIRS) < 1e-3 * exact.prefill(1, 2000, PAIRS)

    @pytest.mark.few(1)
    @pytest.mark.parametrize("kernels", ["on", "off"])
    def test_gives_times_that_a_pass_can_take(self, kernels: str) -> None:
        """In a process of its own: it has its kernels for good."""
        program = (
            "import json, dataclasses\n"
            "from offload.worker import pass_timer\n"
            "from offload.config.reading import read_config\n"
            "pass_timer.LIMIT_SECONDS = 1e3\n"
            f"found = pass_timer.time_passes(read_config({str(MODELS.draft)!r}), 'fp32')\n"
            "print(json.dumps(dataclasses.asdict(found)))\n"
        )
        env = os.environ | {"TRIFORCE_KERNELS": kernels, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        record = json.loads(done.stdout)
        assert record["kernels"].startswith("torch") >= (kernels == "off")
        found = pass_times._times(record)
        assert found is not None
        for curve in (found.fixed, found.layer, found.token):
            assert list(curve) == sorted(curve)
        assert 1e-5 < found.seconds(DRAFT.num_layers, 1000, 1) < 1.0
        assert found.seconds(DRAFT.num_layers, 1000, 64) > 1.5 * found.seconds(DRAFT.num_layers, 1000, 1)
        assert found.prefill(DRAFT.num_layers, 2000, PAIRS) > found.prefill(DRAFT.num_layers, 1000, PAIRS // 4)

    def test_a_plan_reads_what_was_measured_and_measures_nothing(
        self, measurements: list[str], triforce: Callable[..., tuple[int, str, str]]
    ) -> None:
        def predicted() -> float:
            code, out, _ = triforce("plan", "--device", "cpu", "--context", "4000", "--json")
            assert code == 0
            return float(json.loads(out)["plan"]["predicted"]["full_pass_seconds"])

        before = predicted()
        assert measurements == []
        request = on_this_machine()
        save_times(machine_name(), rates_key("cpu"), {key_of(TARGET, request.dtype): PASS_TIMES})
        assert predicted() == pytest.approx(PASS_TIMES.seconds(TARGET.num_layers, 4000, 1)) != before


def test_a_record_is_json_and_back() -> None:
    assert pass_times._times(json.loads(json.dumps(asdict(PASS_TIMES)))) == PASS_TIMES
