"""Measurements on a CUDA machine: its checks, prefill, decoding, link efficiency, peak memory and bits, under a cap.

usage: python benchmarks/gpu.py --out gpu.json [--like llama2-7b,llama-3.1-8b] [--lengths 4000,32000,120000]
                                [--device-memory 24] [--minutes 8] [--work DIR]

First the GPU tests, the small cases of the GPU kernels and the checks of `triforce doctor` run. Targets are the demo
model widened to the bytes of the named models (scripts/widen.py), so acceptance is that of a trained model and traffic
that of a 7B or 13B model; with -q4_0 after the name as a GGUF file of 4 bits, without a draft, since it has no
vocabulary. Beyond 32K positions their YaRN factor is raised, which makes acceptance unrealistic. The smallest run
first, until the minutes are used up. With everything on the GPU also "published", retrieval of 4,096 tokens with exact
weights and cache, as arXiv 2404.11912 has it, batches of six texts, and transformers' own decoding of one with a static
cache, compiled.

The results are one JSON object, written again after every step: a run that was cut off loses its current step only,
and the next run with the same file measures the missing ones. `--device cpu --like tiny` runs everything without a GPU.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gguf_file import write_gguf
from report import about, say, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import widen

from offload.bench.checks import check_device
from offload.bench.measure import copy_rate, link_copies, product_rate, read_rates
from offload.config.gguf_header import is_gguf
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.engine.sequences import Sequences
from offload.errors import DoesNotFit
from offload.machine import machine_name
from offload.plan.planner import Options, Plan
from offload.plan.request import Request
from offload.speed.hardware import probe, rates_key
from offload.speed.rates import TWO_CORES, Rates, save_rates
from offload.transfer.link import make_link
from offload.worker.curve_timer import timed

ROOT = Path(__file__).resolve().parents[1]
COPY_BYTES = 256 * 2**20
MODELS = Path(str(resources.files("triforce_cli"))) / "models"
TEXT = ROOT / "examples" / "persuasion.txt"
TINY = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 640}  # fmt: skip
FOUR_BITS = "-q4_0"
TRAINED_POSITIONS = 32768
BITS_TOKENS = 4000
MODES = ("bits", "triforce", "plain", "published", "batch", "plain batch", "compiled", "transformers")
WAYS: dict[str, dict[str, Any]] = {
    "triforce": {},
    "plain": {"speculation": False},
    "published": {"budget": 4096, "weight_bits": 16, "kv_bits": 16},
}
ON_CHIP_ONLY = {"published", "batch", "plain batch", "compiled"}  # everything is on the GPU
BATCH, BATCH_LENGTH = 6, 19_000
COMPILED_TOKENS = 24
TEST_SECONDS = 150
STREAMING_SHARE = 0.8  # of the cap, so that more is streamed

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One model at one length on one device."""

    model: Path
    draft: Path | None
    prompt: list[int]
    device: str
    device_memory: float | None
    max_tokens: int

    def plan(self, **options: Any) -> Plan:
        freed(self.device)
        asked = {"device": self.device, "device_memory": self.device_memory} | options
        return plan_request(
            self.model, self.draft, Options(**asked), num_prompt_tokens=len(self.prompt), max_tokens=self.max_tokens
        )

    def engine(self, plan: Plan) -> Engine:
        tokenizer = load_tokenizer(MODELS / "demo-target" if self.draft is None else self.model, self.draft)
        return Engine.load(plan, self.model, self.draft, tokenizer)

    def run(self, plan: Plan, sampling: SamplingParams) -> tuple[list[int], Row]:
        """(tokens, measurements) of a new engine."""
        cuda = self.device != "cpu"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        with self.engine(plan) as engine:
            tokens, steps, began = list[int](), list[tuple[int, float]](), time.perf_counter()
            for step in engine.generate(GenerationRequest(self.prompt, sampling, max_tokens=self.max_tokens)):
                tokens += step.tokens
                steps.append((len(step.tokens), round(1000 * (time.perf_counter() - began), 2)))
                began = time.perf_counter()
            stats, ledger = engine.stats, engine.worker.memory.allocated()
        target = stats.levels[0]
        return tokens, {
            "stats": stats.as_dict(),
            "steps": steps,  # tokens and milliseconds of each, the first with the prefill
            "plan": plan.as_dict(),
            "ledger": ledger,
            "peak_device_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            "full_pass_bytes_per_second": target.link_bytes / target.seconds if target.seconds else None,
        }


def decoding_of_a_batch(case: Case, mode: str) -> Row:
    """Decoding of texts that begin at different places, all on the GPU: milliseconds for a token of any of them."""
    freed(case.device)
    options = Options(device=case.device, offload=frozenset(), speculation=mode == "batch")
    request = timed(Request.on_this_machine(case.model, case.draft, options))
    plan = request.plan(num_prompt_tokens=len(case.prompt), max_tokens=case.max_tokens)
    plan = request.together(plan, BATCH, most=BATCH)
    with case.engine(plan) as engine, Sequences[int](engine) as sequences:
        for key in range(BATCH):
            prompt = case.prompt[key * 997 :] + case.prompt[: key * 997]
            sequences.join(key, GenerationRequest(prompt, SamplingParams(seed=key), max_tokens=case.max_tokens))
        began, spent, counted = time.perf_counter(), list[float](), list[int]()
        while len(sequences):
            for key, step in sequences.steps():
                counted.append(len(step.tokens))
                spent.append(time.perf_counter() - began)
                if step.finish is not None:
                    sequences.leave(key)
    half = next(at for at, _ in enumerate(counted) if 2 * sum(counted[: at + 1]) >= sum(counted))
    return {
        "plan": plan.as_dict(),
        "steps": list(zip(counted, [round(1000 * each, 2) for each in spent], strict=True)),
        "milliseconds_per_token": 1000 * spent[-1] / sum(counted),
        "later_milliseconds_per_token": 1000 * (spent[-1] - spent[half]) / max(sum(counted[half + 1 :]), 1),
        "predicted_milliseconds_per_token": 1000 * plan.predicted.seconds_per_token / BATCH,
    }


def freed(device: str) -> None:
    """Free the last engine's memory for the next one, before it is planned."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def widened(like: str, work: Path, num_positions: int) -> Path:
    """The demo target with the sizes of `like` and `num_positions`, a folder or a GGUF file; written once."""
    if like.endswith(FOUR_BITS):
        file = work / f"{like}-{num_positions}.gguf"
        if not file.exists():
            write_gguf(widened(like.removesuffix(FOUR_BITS), work, num_positions), file, dtype="q4_0")
        return file
    folder = work / like
    if not folder.exists():
        say(f"writing {like}")
        sizes = TINY if like == "tiny" else widen.LIKE[like]
        widen.widen(MODELS / "demo-target", folder, sizes, torch.bfloat16)
    if num_positions <= TRAINED_POSITIONS:
        return folder
    longer = work / f"{like}-{num_positions}"
    if not longer.exists():
        longer.mkdir()
        for file in folder.iterdir():
            (longer / file.name).hardlink_to(file)
        stretch(longer / "config.json", num_positions)
    return longer


def stretch(file: Path, num_positions: int) -> None:
    """Raise the context limit in config.json to `num_positions`, and the YaRN factor with it."""
    config = json.loads(file.read_text())
    factor = num_positions / TRAINED_POSITIONS
    config["max_position_embeddings"] = num_positions
    for key in ("rope_parameters", "rope_scaling"):
        if key in config:
            config[key]["factor"] *= factor
    file.unlink()  # a symbolic link to the shorter model's
    file.write_text(json.dumps(config))


def decoding(case: Case, rates: Rates, placement: str, mode: str) -> Row:
    """Decoding and prefill in one of WAYS: "capped", so that it streams, or "on chip" without the cap."""
    changes: dict[str, Any] = {"device_memory": None, "offload": frozenset()} if placement == "on chip" else {}
    plan = case.plan(**WAYS[mode], **changes)
    if mode == "plain":
        plan = replace(plan, placement=replace(plan.placement, rows=1))
    _, row = case.run(plan, SamplingParams())
    rate = row["full_pass_bytes_per_second"]
    return row | {
        "milliseconds_per_token": row["stats"]["milliseconds_per_token"],
        "later_milliseconds_per_token": of_later_tokens(row["steps"]),
        "bytes_milliseconds": 1000 * bytes_of_a_pass(row, case) / rates.device_read,
        "predicted_milliseconds_per_token": 1000 * plan.predicted.seconds_per_token,
        "prefill_seconds": row["stats"]["prefill_seconds"],
        "predicted_prefill_seconds": plan.predicted.prefill_seconds,
        "link_efficiency": rate / rates.to_device if plan.placement.offload and rate else None,
        "peak_over_plan": peak_over_plan(row, plan),
    }


def of_later_tokens(steps: list[tuple[int, float]]) -> float | None:
    """Milliseconds per token of the later half of the steps: the first ones compile kernels and record graphs."""
    later = steps[1 + len(steps) // 2 :]
    return sum(each for _, each in later) / sum(count for count, _ in later) if later else None


def bytes_of_a_pass(row: Row, case: Case) -> float:
    """Bytes of weights and of the prompt's cache, which a pass of the target reads, on the GPU."""
    held, capacity = row["ledger"]["device"], len(case.prompt) + case.max_tokens
    cache = held.get("kv cache", 0) * len(case.prompt) / capacity
    return held.get("target layers", 0) + held.get("target embeddings", 0) / 2 + cache


def peak_over_plan(row: Row, plan: Plan) -> float | None:
    """Peak of the allocator over the planned device bytes, without the reserve for memory outside the allocator."""
    planned = sum(size for name, size in plan.placement.device_bytes.items() if name != "reserve")
    return row["peak_device_bytes"] / planned if row["peak_device_bytes"] else None


def bits(case: Case, dtype: str) -> Row:
    """Greedy tokens with and without speculation, on chip and streaming."""
    streams = {"offload": frozenset({"weights", "kv"}), "device_memory": STREAMING_SHARE * (case.device_memory or 24.0)}
    runs = []
    for options in (
        {"speculation": False, "offload": frozenset(), "device_memory": None},
        {"gamma": 7, "draft_gamma": 2, "offload": frozenset(), "device_memory": None},
        {"gamma": 31, "draft_gamma": 0, "budget": 256, **streams},
        {"speculation": False, **streams},
    ):
        tokens, _ = case.run(case.plan(dtype=dtype, **options), SamplingParams(temperature=0.0, seed=0))
        runs.append(tokens)
    return {"equal": all(tokens == runs[0] for tokens in runs), "tokens": runs}


def transformers_offloaded(case: Case) -> Row:
    """transformers' own decoding with its offloaded cache, on the same weights, two tokens after the first."""
    from transformers import AutoModelForCausalLM

    freed(case.device)
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.bfloat16).to(case.device).eval()
    times = []
    for length, count in ((64, 1), (len(case.prompt), 1), (len(case.prompt), 3)):  # the first is a warm-up
        ids = torch.tensor([case.prompt[:length]], device=case.device)
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            cache_implementation="dynamic" if case.device == "cpu" else "offloaded",
        )  # fmt: skip
        times.append(time.perf_counter() - began)
    return {"prefill_seconds": times[1], "milliseconds_per_token": 1000 * (times[2] - times[1]) / 2}


def transformers_compiled(case: Case) -> Row:
    """transformers' own decoding of the prompt with a static cache, for which it compiles the model's pass."""
    from transformers import AutoModelForCausalLM

    freed(case.device)
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.bfloat16).to(case.device).eval()
    ids, times = torch.tensor([case.prompt], device=case.device), []
    for count in (COMPILED_TOKENS, 1, COMPILED_TOKENS):  # the first is a warm-up
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            cache_implementation="static",
        )  # fmt: skip
        times.append(time.perf_counter() - began)
    return {"prefill_seconds": times[1], "milliseconds_per_token": 1000 * (times[2] - times[1]) / (COMPILED_TOKENS - 1)}


def table_row(row: Row) -> list[str]:
    def number(key: str) -> str:
        value = row.get(key)
        return "" if value is None else f"{value:.2f}"

    result = "skipped" if "skipped" in row else {True: "equal", False: "DIFFERENT"}.get(row.get("equal"), "")
    names = "milliseconds_per_token", "later_milliseconds_per_token", "bytes_milliseconds"
    measured = map(number, (*names, "predicted_milliseconds_per_token", "prefill_seconds"))
    return [
        row["model"], f"{row['length']}", row["placement"], row["mode"], *measured, number("link_efficiency"),
        number("peak_over_plan"), result,
    ]  # fmt: skip


def wanted(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the names of the measurements: the smallest prompts first, and this program's before other programs'."""
    likes, lengths = args.like.split(","), sorted(int(length) for length in args.lengths.split(","))
    modes = args.modes.split(",")
    if "bits" in modes:
        for dtype in ("bf16", "fp16") if args.device != "cpu" else ("bf16",):
            named = {"model": likes[0], "length": min(lengths[0], BITS_TOKENS), "placement": dtype}
            yield named | {"mode": "bits"}
    for mode_of in (("triforce", "plain", "published"), ("batch", "plain batch"), ("compiled", "transformers")):
        for length in [min(BATCH_LENGTH, lengths[-1])] if "batch" in mode_of else lengths:
            for like in likes:
                for placement in (*args.placements.split(","), "offloaded cache"):
                    for mode in filter(modes.__contains__, mode_of):
                        if runs_there(mode, placement):
                            yield {"model": like, "length": length, "placement": placement, "mode": mode}


def runs_there(mode: str, placement: str) -> bool:
    """Whether a mode has a row of this placement."""
    if mode == "transformers" or placement == "offloaded cache":
        return (mode, placement) == ("transformers", "offloaded cache")
    return placement == "on chip" or mode not in ON_CHIP_ONLY


def measure(args: argparse.Namespace, named: Row, rates: Rates) -> Row:
    text = load_tokenizer(MODELS / "demo-target", None).encode(TEXT.read_text(encoding="utf-8"))
    length, placement, mode = named["length"], named["placement"], named["mode"]
    prompt = (text * (length // len(text) + 1))[:length]
    positions = max(TRAINED_POSITIONS, 1 << (length + args.max_tokens - 1).bit_length())
    model = widened(named["model"], args.work, positions)
    draft = None if is_gguf(model) else MODELS / "demo-draft"
    case = Case(model, draft, prompt, args.device, args.device_memory, args.max_tokens)
    if mode == "bits":
        return bits(case, placement)
    try:
        if mode in ("batch", "plain batch"):
            return decoding_of_a_batch(case, mode)
        if mode in WAYS:
            return decoding(case, rates, placement, mode)
    except DoesNotFit as error:
        return {"skipped": str(error)}
    return transformers_compiled(case) if mode == "compiled" else transformers_offloaded(case)


class Results:
    """The results as a JSON object in a file: `steps` by name, and `runs`. Results of the same program version are not
    measured again."""

    def __init__(self, file: Path, shared: Row) -> None:
        self._file, self._document = file, shared | {"steps": {}, "runs": []}
        if file.exists():
            found = json.loads(file.read_text())
            if found["environment"]["triforce"] == shared["environment"]["triforce"]:
                self._document |= {"steps": found["steps"], "runs": found["runs"]}

    @property
    def runs(self) -> list[Row]:
        return self._document["runs"]

    def step(self, name: str, run: Callable[[], Row]) -> Row:
        """The result of the step `name`, from this run or from an earlier one."""
        steps = self._document["steps"]
        if name not in steps:
            say(name)
            steps[name] = run()
            self._write()
        return steps[name]

    def has(self, named: Row) -> bool:
        return any(named.items() <= run.items() for run in self.runs)

    def keep(self, run: Row) -> None:
        self.runs.append(run)
        self._write()

    def _write(self) -> None:
        part = self._file.with_name(self._file.name + ".part")
        part.write_text(json.dumps(self._document, indent=1) + "\n")
        part.replace(self._file)


def cuda_tests() -> Row:
    """Exit code and output of the GPU tests: in parallel with pytest-xdist, otherwise of tests/test_cuda.py alone."""
    if find_spec("xdist") is None:
        return _output([sys.executable, "tests/test_cuda.py"])
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "8", "--dist", "worksteal"]
    files = ["test_cuda", "test_doctor", "test_session_packed", "test_session_store"]
    return _output([*pytest, "-m", "cuda", "--durations=20", *(f"tests/{file}.py" for file in files)])


def kernel_tests() -> Row:
    """Exit code and output of the small cases of the GPU kernels."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "on_gpu"]
    command += [] if find_spec("xdist") is None else ["-n", "8", "--dist", "worksteal"]
    return _output([*command, *sorted(map(str, Path(ROOT, "tests").glob("*_interpreted.py")))])


def _output(command: list[str]) -> Row:
    """Exit code and output of a command, which is killed after TEST_SECONDS."""
    paths = os.pathsep.join((str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as running:  # fmt: skip
        killed = threading.Timer(TEST_SECONDS, running.kill)
        killed.start()
        output, _ = running.communicate()
        killed.cancel()
    say(output)
    return {"exit_code": running.returncode, "output": output[-8000:]}


def measured_rates(device: str) -> Row:
    """The device's rates, by the names of `Rates`."""
    where = torch.device(device)
    with closing(make_link(where)) as link:
        copies = link_copies(link, where, COPY_BYTES)
        _, read = read_rates(where, torch.bfloat16, 4 * COPY_BYTES)
        rates = Rates(
            to_device=copy_rate([copies.to_device], copies.num_bytes),
            to_host=copy_rate([copies.to_host], copies.num_bytes),
            device_read=read,
            host_read=TWO_CORES.host_read,
            flops=product_rate(where, torch.bfloat16),
            measured=True,
        )
    return asdict(rates)


def checked(device: str) -> Row:
    """The checks of `triforce doctor`."""
    found = check_device(probe(device), MODELS / "demo-target", MODELS / "demo-draft", say)
    return {"failed": sum(not check.passed for check in found), "checks": [asdict(check) for check in found]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--like", default="llama2-7b,llama-3.1-8b")
    parser.add_argument("--lengths", default="4000,32000,120000")
    parser.add_argument("--modes", default=",".join(MODES), help="of %(default)s")
    parser.add_argument("--placements", default="capped,on chip", help="of %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--device-memory", type=float, default=24.0, help="10^9 bytes")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, perhaps of an earlier run")
    parser.add_argument("--no-tests", action="store_true", help="neither the CUDA tests nor the checks")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--work", type=Path, default=Path("wide-models"), help="where the widened models are written")
    args = parser.parse_args()
    deadline = time.perf_counter() + 60 * args.minutes
    args.work.mkdir(parents=True, exist_ok=True)
    title = f"{args.device}, capped to {args.device_memory:g} GB"
    results = Results(args.out, about(title, 0))
    if not args.no_tests:
        results.step("tests", cuda_tests)
        if args.device != "cpu":
            results.step("kernels", kernel_tests)
        results.step("checks", partial(checked, args.device))
    rates = Rates(**results.step("rates", partial(measured_rates, args.device)))
    save_rates(machine_name(), {rates_key(args.device): rates})  # plans use them
    for named in wanted(args):
        if results.has(named):
            continue
        if time.perf_counter() > deadline:
            say(f"no time left for {named}: run it again with the same file")
            break
        try:
            run = named | measure(args, named, rates)
        except Exception as error:  # a failed case must not end the others
            run = named | {"skipped": f"{type(error).__name__}: {error}"}
        results.keep(run)
        say("  ".join(table_row(run)))
    columns = ["model", "prompt", "placement", "mode", "ms/token", "later", "bytes", "predicted", "prefill s"]
    columns += ["link", "peak/plan", ""]
    table(title, columns, [table_row(run) for run in results.runs])


if __name__ == "__main__":
    main()
