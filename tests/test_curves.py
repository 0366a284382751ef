"""Curves of a CPU's kernels: the values between rows, a pass by its bytes, the file, and when they are measured."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.forked import said_in_a_fork
from kit.models import CURVES
from offload.config.encodings import encoded
from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.config.rope import Rope
from offload.engine.engine import plan_request
from offload.fields import record
from offload.formats.encodings import ENCODINGS
from offload.kernels import cpu
from offload.machine import machine_name
from offload.plan.model_key import key_of
from offload.plan.options import Options
from offload.plan.request import Request
from offload.speed import rates
from offload.speed.cpu_pass import CpuPass, matrix_bytes
from offload.speed.curve_file import load_curves, save_curves
from offload.speed.curves import FAR_BYTES, NEAR_BYTES, ROWS, Curve, Curves, at, typical
from offload.speed.hardware import TWO_CORES, rates_key
from offload.speed.rates import FOLDER_VARIABLE, load_rates, rates_file, save_rates
from offload.worker import curve_timer, timed_runs
from offload.worker.curve_timer import time_again, time_curves, time_weights, timed
from offload.worker.trial import LARGE, SMALL, Trial, in_form
from triforce_cli.setup.choice import choose_models

MODELS = choose_models(None, None)
TARGET, DRAFT = (read_config(folder) for folder in (MODELS.target, MODELS.draft) if folder)
HERE = machine_name(), rates_key("cpu")
HALF = replace(CURVES, mass_share=0.25)
CODES = ["4 bits", "6 bits"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, real in (("time_curves", time_curves), ("time_weights", time_weights)):  # see conftest.py
        monkeypatch.setattr(curve_timer, name, real)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("limit", "enough", "turns", "found"), [(1.0, 0.1, 3, True), (1.0, 0.2, 4, True), (0.06, 0.0, 1, False)]
)
def test_of_each_points_runs_the_median_counts(
    limit: float, enough: float, turns: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points take turns, until that was long enough. Nothing is known where the least number of turns took too long."""
    seconds = {("a", 1): [0.03, 0.01, 0.02, 0.05], ("b", 2): [0.02, 0.04, 0.06, 0.03]}
    taken = {point: iter(each) for point, each in seconds.items()}
    now = [0.0]

    def run(point: timed_runs.Point) -> None:
        now[0] += next(taken[point])

    monkeypatch.setattr(timed_runs, "ENOUGH_SECONDS", enough)
    monkeypatch.setattr(timed_runs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    points = {point: partial(run, point) for point in taken}
    expected = {point: pytest.approx(median(each[:turns])) for point, each in seconds.items()}
    assert timed_runs.median_seconds(points, limit) == (expected if found else None)


@pytest.mark.parametrize(("a_second", "found"), [(119, True), (121, False)])
def test_nothing_is_known_where_other_programs_take_the_cores(
    a_second: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside two busy programs a pass took 155 ms, and 978 were predicted, at every later start, too."""
    now, runs = [0.0], []

    def run() -> None:
        now[0] += 0.2
        runs.append(now[0])

    monkeypatch.setattr(timed_runs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(timed_runs, "_preemptions", lambda: 1000 + a_second * now[0])
    monkeypatch.setattr(timed_runs, "MOST_PREEMPTIONS", 60.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    seconds = timed_runs.median_seconds({("a", 1): run}, 100.0)
    assert seconds == ({("a", 1): pytest.approx(0.2)} if found else None)
    assert len(runs) == (8 if found else 2)  # it is seen soon


def test_a_thread_that_others_disturb_is_counted() -> None:
    """By the kernel: two threads on one core take it from each other."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("threads cannot be put on a core")
    program = (
        "import os, threading, time\n"
        "from offload.worker.timed_runs import _preemptions\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "child = os.fork()\n"
        "end = time.perf_counter() + 0.5\n"
        "while time.perf_counter() < end: pass\n"
        "if not child: os._exit(0)\n"
        "print(_preemptions())\n"
    )
    assert int(said_in_a_fork(program)) > 30


def on_this_machine(**options: Any) -> Request:
    return Request.on_this_machine(MODELS.target, MODELS.draft, Options(device="cpu", **options))


class TestACurve:
    def test_has_the_measured_values_at_the_measured_rows(self) -> None:
        assert [at(CURVES.calls, rows) for rows in ROWS] == [*CURVES.calls]

    def test_is_straight_between_them_and_goes_on_in_proportion(self) -> None:
        assert at(CURVES.layer, 6) == pytest.approx(1.5e-5)
        assert at(CURVES.layer, 20) == pytest.approx(5e-5)
        assert at(CURVES.layer, 96) == pytest.approx(24e-5)
        assert at(CURVES.layer, 5.5) == pytest.approx(1.375e-5)

    def test_that_others_disturbed_is_put_right_by_what_took_more_rows_less_time(self) -> None:
        least = curve_timer._LEAST
        assert curve_timer._rising([3.0, 1.0, 2.0, -1.0, 5.0]) == (least, least, least, least, 5.0)
        assert curve_timer._rising([1.0, 9.0, 2.0]) == (1.0, 2.0, 2.0)

    @pytest.mark.parametrize("name", ENCODINGS)
    def test_of_an_encoding_that_was_not_measured_follows_from_plain_weights(self, name: str) -> None:
        """A number takes at least as long as a byte, the first row of 4 bits half of 16 bits' time; more rows take
        more than plain ones."""
        plain, found, size = CURVES.weights[""], CURVES.weights_of(name), ENCODINGS[name].bits / 8
        assert found[0] * size == pytest.approx(max(size, 1.0) * plain[0])
        assert found[-1] / found[0] > 16
        assert replace(CURVES, weights=CURVES.weights | {name: plain}).weights_of(name) == plain
        assert CURVES.weights_of("4 bits") == plain


class TestAPass:
    """Its seconds; test_planner.py has sums of all parts."""

    def seconds(self, num_bytes: float, rows: int = 1, curves: Curves = CURVES, **more: Any) -> float:
        return CpuPass(TARGET, 2, curves).seconds(rows, num_bytes, **more)

    def test_over_fewer_tokens_than_the_processors_caches_keep_costs_less_each(self) -> None:
        curves = replace(CURVES, cache=(4e-10,) * 7, near_cache=(1e-10,) * 7)

        def byte(num_bytes: float) -> float:
            return (self.seconds(num_bytes, curves=curves) - self.seconds(0, curves=curves)) / num_bytes

        between = (NEAR_BYTES + FAR_BYTES) / 2
        found = [byte(size) for size in (1e6, NEAR_BYTES, between, FAR_BYTES, 3 * FAR_BYTES)]
        assert found == pytest.approx([1e-10, 1e-10, 2.5e-10, 4e-10, 4e-10])

    @pytest.mark.parametrize("curves", [CURVES, typical(TWO_CORES.device_read, TWO_CORES.flops)], ids=["some", "rates"])
    def test_never_takes_less_with_more_rows_or_tokens(self, curves: Curves) -> None:
        by_rows = [self.seconds(1e8, rows, curves) for rows in range(1, 200)]
        assert by_rows == sorted(by_rows)
        assert self.seconds(2e8, 4, curves) > self.seconds(1e8, 4, curves)

    def test_attends_with_the_query_rows_of_each_head(self) -> None:
        """As many as 4 rows of a model with one query head for each KV head."""
        shared = TARGET.changed(num_kv_heads=TARGET.num_kv_heads // 2)
        more = [CpuPass(shared, 2, CURVES).seconds(2, size) for size in (1e8, 0.0)]
        assert more[0] - more[1] == pytest.approx(1e8 * at(CURVES.cache, 4))

    def test_records_masses_for_a_share_of_attention_alone(self) -> None:
        own = self.seconds(1e8) - self.seconds(0)
        assert self.seconds(1e8, masses=True) - self.seconds(1e8) == pytest.approx(own / 2)
        assert self.seconds(0, masses=True) == self.seconds(0)

    def test_over_a_window_is_never_over_codes(self) -> None:
        coded = replace(CURVES, coded_cache=(1e-13,) * 7)
        own = self.seconds(1e8, curves=coded, windows=1e7, coded=True) - self.seconds(0, curves=coded)
        assert own == pytest.approx(1e8 * 1e-13 + 1e7 * CURVES.cache[0])

    def test_of_several_sequences_shares_the_weights_and_nothing_else(self) -> None:
        one, two = self.seconds(1e8, 2), self.seconds(1e8, 1, sequences=2)
        weights = at(CURVES.weights[""], 2) * sum(matrix_bytes(TARGET, 2).values())
        assert two - weights > 2 * 1e8 * CURVES.cache[0]
        assert two > one - 1e8 * at(CURVES.cache, 2) + 2e8 * CURVES.cache[0]

    def test_reads_each_matrix_in_its_form(self) -> None:
        stored = encoded(TARGET, lambda name: "Q6_K" if "down_proj" in name else "Q8_0" if "embed" in name else "")
        found = matrix_bytes(stored, 2)
        assert found["Q6_K"] == 8 * sum(each.nbytes(2) for each in stored.layer_matrices()["down"])
        assert found["Q8_0"] == stored.head.nbytes(2)
        assert sum(found.values()) < sum(matrix_bytes(TARGET, 2).values())
        assert {*matrix_bytes(stored, 2, 4)} == {"4 bits", "Q8_0"}
        assert {*matrix_bytes(TARGET, 2, 6)} == {"6 bits"}


class TestTheKeyOfAModel:
    def test_tells_kernels_from_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        on = key_of(TARGET, "bf16")
        monkeypatch.setenv("TRIFORCE_KERNELS", "on")
        assert key_of(TARGET, "bf16") == on
        monkeypatch.setenv("TRIFORCE_KERNELS", "off")
        assert key_of(TARGET, "bf16") != on

    def test_is_of_its_shapes_alone(self) -> None:
        key = key_of(TARGET, "bf16")
        assert key_of(replace(TARGET.changed(rope=Rope(theta=5.0)), bos_token_id=None), "bf16") == key
        for name in ("vocab_size", "hidden_size", "num_layers", "num_kv_heads", "head_dim"):
            assert key_of(TARGET.changed(**{name: getattr(TARGET, name) + 2}), "bf16") != key

    def test_has_the_form_of_each_of_its_matrices(self) -> None:
        """With few and with many matrices in 6 bits, two had one key."""
        forms = ("v_proj",), ("v_proj", "down_proj"), ("o_proj",), ()

        def stored(six: tuple[str, ...]) -> ModelConfig:
            head = "embed_tokens", "lm_head"
            return encoded(TARGET, lambda name: "Q6_K" if any(part in name for part in six + head) else "Q4_K")

        assert len({key_of(config, "bf16") for config in (TARGET, *map(stored, forms))}) == 1 + len(forms)


class TestTheFile:
    def test_gives_back_what_was_kept_by_machine_device_dtype_and_kernels(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save_curves("here", "CPU, 2 threads", "bf16", CURVES)
        assert load_curves("here", "CPU, 2 threads", "bf16") == CURVES
        assert load_curves("there", "CPU, 2 threads", "bf16") is None
        assert load_curves("here", "CPU, 1 threads", "bf16") is None
        assert load_curves("here", "CPU, 2 threads", "fp32") is None
        monkeypatch.setenv("TRIFORCE_KERNELS", "off")
        assert load_curves("here", "CPU, 2 threads", "bf16") is None

    def test_keeps_rates_and_other_dtypes(self) -> None:
        save_rates("here", {"CPU": replace(TWO_CORES, measured=True)})
        save_curves("here", "CPU", "bf16", CURVES)
        save_curves("here", "CPU", "fp32", HALF)
        save_rates("here", {"gpu": replace(TWO_CORES, measured=True)})
        assert load_curves("here", "CPU", "bf16") == CURVES
        assert load_curves("here", "CPU", "fp32") == HALF
        assert load_rates("here", "CPU") == replace(TWO_CORES, measured=True)
        save_curves("here", "CPU", "fp32", CURVES, anew=True)
        assert load_curves("here", "CPU", "bf16") is None
        assert load_curves("here", "CPU", "fp32") == CURVES

    def test_loses_nothing_of_what_two_write_at_the_same_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both had read the file before either wrote it: two first starts lost what one had measured."""
        read, others = rates._read, list[threading.Thread]()

        def read_slowly(path: Path) -> dict[str, Any]:
            found = read(path)
            if not others:
                others.append(threading.Thread(target=save_curves, args=("here", "CPU", "fp32", CURVES)))
                others[0].start()
                others[0].join(0.05)
            return found

        monkeypatch.setattr(rates, "_read", read_slowly)
        save_curves("here", "CPU", "bf16", CURVES)
        others[0].join()
        assert load_curves("here", "CPU", "bf16") == load_curves("here", "CPU", "fp32") == CURVES

    def test_keeps_what_another_has_measured_of_the_same_kernels_and_adds_forms(self) -> None:
        third = replace(CURVES, kernels="others")
        for curves, expected in ((CURVES, CURVES), (HALF, CURVES), (third, third)):
            save_curves("here", "CPU", "bf16", curves)
            assert load_curves("here", "CPU", "bf16") == expected
        more = replace(third, mass_share=0.25, weights={"": (1.0,) * 7, "Q4_K": (2.0,) * 7})
        save_curves("here", "CPU", "bf16", more)
        joined = replace(third, weights={"": third.weights[""], "Q4_K": (2.0,) * 7})
        assert load_curves("here", "CPU", "bf16") == joined
        save_curves("here", "CPU", "bf16", more, anew=True)
        assert load_curves("here", "CPU", "bf16") == more

    @pytest.mark.parametrize(
        "damage",
        [
            {"layer": [1e-3] * 6}, {"layer": 1e-3}, {"cache": [1e-7] * 6 + ["x"]}, {"calls": [0.0] * 7},
            {"near_cache": [1e-7] * 6}, {"weights": {}}, {"weights": {"": [1e-9] * 6}}, {"weights": None},
            {"weights": {"": [1e-9] * 7, "Q4_K": [0.0] * 7}}, {"calls": [True] * 7}, {"calls": [1e300] * 7},
            {"product": None}, {"pair": -1.0}, {"mass_share": -0.1}, {"mass_share": None}, {"kernels": ""},
            {"kernels": 3}, {"more": 1}, {"calls": []}, {"cache": None}, {"coded_cache": []},
        ],
    )  # fmt: skip
    def test_that_is_damaged_counts_as_not_measured(self, damage: dict[str, Any]) -> None:
        dtype = on_this_machine().dtype
        path = save_curves(*HERE, dtype, CURVES)
        assert load_curves(*HERE, dtype) == CURVES
        known = json.loads(path.read_text())
        known[HERE[0]][f"{HERE[1]}, curves"][f"{dtype} kernels=on"].update(damage)
        path.write_text(json.dumps(known))
        assert load_curves(*HERE, dtype) is None
        assert on_this_machine().plan(num_prompt_tokens=100, max_tokens=9)

    @pytest.mark.parametrize("records", [[], {"CPU, curves": []}, {"CPU, curves": {"bf16 kernels=on": []}}, None])
    def test_of_another_kind_counts_as_not_measured(self, records: Any, folder: Path) -> None:
        folder.mkdir()
        rates_file().write_text(json.dumps({"here": records}))
        assert load_curves("here", "CPU", "bf16") is None
        save_curves("here", "CPU", "bf16", CURVES)
        assert load_curves("here", "CPU", "bf16") == CURVES


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dtypes and forms that are measured, which takes no time here."""
    found: list[str] = []

    def curves(dtype: str) -> Curves:
        found.append(dtype)
        return replace(CURVES, kernels=cpu.kernels().name)

    def weights(dtype: str, form: str, known: Curves) -> Curve:
        found.append(form)
        return CURVES.weights[""]

    monkeypatch.setattr(curve_timer, "time_curves", curves)
    monkeypatch.setattr(curve_timer, "time_weights", weights)
    return found


def codes() -> list[str]:
    """The forms in which the embedded target may be its own draft: where there are kernels."""
    return CODES if cpu.kernels().usable else []


class TestMeasuring:
    def test_happens_once_and_then_every_plan_has_it(self, asked: list[str]) -> None:
        untimed = on_this_machine()
        assert untimed.curves is None
        request = timed(untimed)
        assert asked == [request.dtype, *codes()]
        assert request.curves is not None
        assert timed(request).curves == on_this_machine().curves == request.curves
        assert asked == [request.dtype, *codes()]
        made = plan_request(
            MODELS.target, MODELS.draft, Options(device="cpu"), num_prompt_tokens=9, max_tokens=9
        ).predicted
        size = {"bf16": 2, "fp32": 4}[request.dtype]
        pass_of_one = CpuPass(TARGET, size, request.curves).seconds(1, 18 * TARGET.kv_bytes_per_token(size))
        assert made.full_pass_seconds == pytest.approx(pass_of_one)

    def test_happens_again_where_other_kernels_run(self, asked: list[str]) -> None:
        dtype = on_this_machine().dtype
        save_curves(*HERE, dtype, replace(CURVES, kernels="older ones"))
        found = timed(on_this_machine()).curves
        assert found is not None
        assert found.kernels == cpu.kernels().name
        assert asked == [dtype, *codes()]

    def test_of_kernels_that_are_gone_is_not_used(self, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        save_curves(*HERE, on_this_machine().dtype, replace(CURVES, kernels="older ones"))
        monkeypatch.setattr(curve_timer, "time_curves", lambda dtype: None)
        assert on_this_machine().curves is not None
        assert timed(on_this_machine()).curves is None

    def test_adds_the_forms_of_another_model(self, asked: list[str]) -> None:
        request = timed(on_this_machine())
        del asked[:]
        stored = replace(request, target=encoded(TARGET, lambda name: "Q5_0" if "down" in name else "Q4_0"))
        found = timed(stored).curves
        assert found is not None
        assert asked == ["Q4_0", "Q5_0"]
        assert {*found.weights} == {"", *codes(), "Q4_0", "Q5_0"}

    def test_again_by_doctor_forgets_the_rest(self, asked: list[str]) -> None:
        dtype = on_this_machine().dtype
        save_curves(*HERE, "fp16", HALF)
        save_curves(*HERE, dtype, replace(HALF, kernels=cpu.kernels().name))
        time_again(MODELS.target, MODELS.draft)
        assert asked == [dtype, *codes()]
        assert load_curves(*HERE, "fp16") is None
        found = load_curves(*HERE, dtype)
        assert found is not None
        assert found.mass_share == CURVES.mass_share

    def test_at_two_first_starts_gives_both_one_plan(self, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """A seed's text at the start that had written first was another at all later ones."""
        request, time_none = on_this_machine(), curve_timer.time_curves

        def time_slowly(dtype: str) -> Curves | None:
            curves = time_none(dtype)
            assert curves is not None
            save_curves(*HERE, dtype, replace(curves, mass_share=0.25))  # the other start
            return curves

        monkeypatch.setattr(curve_timer, "time_curves", time_slowly)
        found = timed(request).curves
        assert found is not None
        assert found.mass_share == 0.25
        assert found == on_this_machine().curves

    def test_only_of_the_forms_that_run(self, asked: list[str]) -> None:
        request = timed(on_this_machine(speculation=False))
        timed(on_this_machine(weight_bits=16))
        assert asked == [request.dtype]

    def test_what_cannot_be_kept_is_not_used_or_the_next_plan_would_be_another(
        self, asked: list[str], folder: Path
    ) -> None:
        folder.write_text("a file where the folder would be")
        request = on_this_machine()
        assert timed(request) == request

    @pytest.mark.usefixtures("sized")
    def test_of_a_busy_processor_is_given_up_and_nothing_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(curve_timer, "LIMIT_SECONDS", 0.0)
        assert time_curves("fp32") is None
        assert time_weights("fp32", "Q4_K", CURVES) is None
        request = on_this_machine()
        assert timed(request) == request
        assert not rates_file().exists()

    def test_a_plan_reads_what_was_measured_and_measures_nothing(
        self, asked: list[str], triforce: Callable[..., tuple[int, str, str]]
    ) -> None:
        def predicted() -> float:
            code, out, _ = triforce("plan", "--device", "cpu", "--context", "4000", "--json")
            assert code == 0
            return float(json.loads(out)["plan"]["predicted"]["full_pass_seconds"])

        before = predicted()
        assert asked == []
        save_curves(*HERE, on_this_machine().dtype, CURVES)
        assert predicted() != before


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small trial models, in few turns."""
    for name in ("NEAR_BYTES", "FAR_BYTES"):
        monkeypatch.setattr(curve_timer, name, 2**20)
    monkeypatch.setattr(curve_timer, "VOCABULARY", 2048)
    large = LARGE.changed(num_layers=1)
    monkeypatch.setattr(curve_timer, "LARGE", large)
    return iter(())


class TestATrial:
    @pytest.mark.few(2)
    @pytest.mark.parametrize("name", ["", *ENCODINGS])
    def test_runs_in_every_form(self, name: str) -> None:
        if not cpu.kernels().usable:
            pytest.skip(cpu.kernels().reason)
        config = in_form(LARGE.changed(num_layers=1), name)
        trial = Trial(config, torch.float32, cpu.kernels(), 32)
        assert [*matrix_bytes(config, 4)] == [name, ""][: 1 + bool(name)]
        with torch.inference_mode():
            trial.run(3, 32, masses=True)
            trial.run(3, num_layers=0)

    @pytest.mark.usefixtures("sized")
    def test_over_weights_in_few_bits_takes_less(self) -> None:
        if not cpu.kernels().usable:
            pytest.skip(cpu.kernels().reason)
        assert time_weights("fp32", "4 bits", CURVES) is not None

    @pytest.mark.few(1)
    @pytest.mark.parametrize("kernels", ["on", "off"])
    def test_gives_curves_that_a_pass_can_take(self, kernels: str) -> None:
        """In a process of its own: it has its kernels for good."""
        program = (
            "import json, dataclasses\n"
            "from offload.worker import curve_timer, timed_runs\n"
            "curve_timer.LIMIT_SECONDS = 1e3\n"
            "timed_runs.MOST_PREEMPTIONS = float('inf')\n"
            "timed_runs.ENOUGH_SECONDS = 0.0\n"
            "print(json.dumps(dataclasses.asdict(curve_timer.time_curves('fp32'))))\n"
        )
        said = said_in_a_fork(program, TRIFORCE_KERNELS=kernels)
        found = record(Curves, json.loads(said), "")
        assert found.kernels.startswith("torch") >= (kernels == "off")
        assert bool(found.coded_cache) is (kernels == "on")
        for curve in (found.calls, found.layer, found.weights[""], found.cache):
            assert list(curve) == sorted(curve)
        model = CpuPass(DRAFT, 4, found)
        assert 1e-5 < model.seconds(1, 1e6) < 1.0
        assert model.seconds(64, 1e6) > 1.5 * model.seconds(1, 1e6)
        assert model.prefill(2000, 512) > model.prefill(1000, 512)


def test_a_record_is_json_and_back() -> None:
    assert record(Curves, json.loads(json.dumps(asdict(CURVES))), "") == CURVES


def test_trial_models_are_mostly_calls_and_mostly_bytes() -> None:
    small, large = (sum(matrix_bytes(config, 2).values()) / config.num_layers for config in (SMALL, LARGE))
    assert large > 50 * small
