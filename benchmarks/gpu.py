"""What a CUDA machine shows: link efficiency, prefill, decoding, peak memory and bits, with the device capped.

usage: python benchmarks/gpu.py [--like llama2-7b,llama-3.1-8b] [--lengths 32000,120000] [--device-memory 24]
                                [--minutes 8] [--work DIR]

Targets are the demo model widened to the bytes of the models named (scripts/widen.py): acceptance is a trained model's,
traffic is that of a 7B or 13B. Past 32K positions their YaRN factor is raised, so that acceptance there is not real and
says so. Cases run until the minutes are used up; what did not run is listed. `--device cpu --like tiny` is a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from report import emit, environment, say

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import widen

from offload.decode.sampling import SamplingParams
from offload.engine import Engine, load_tokenizer, plan_request
from offload.errors import DoesNotFit
from offload.measure import copy_rate, link_copies
from offload.plan.planner import Options, Plan
from offload.transfer.link import CudaLink, PacedLink

MODELS = Path(str(resources.files("triforce_cli"))) / "models"
TEXT = Path(__file__).resolve().parents[1] / "examples" / "persuasion.txt"
TINY = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 640}  # fmt: skip
TRAINED_POSITIONS = 32768
COPY_BYTES = 256 * 2**20
BITS_TOKENS = 4000

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One model at one length on one device."""

    model: Path
    draft: Path
    prompt: list[int]
    device: str
    device_memory: float | None
    max_tokens: int

    def plan(self, **options: Any) -> Plan:
        asked = {"device": self.device, "device_memory": self.device_memory} | options
        return plan_request(
            self.model, self.draft, Options(**asked), num_prompt_tokens=len(self.prompt), max_tokens=self.max_tokens
        )

    def run(self, plan: Plan, sampling: SamplingParams) -> tuple[list[int], Row]:
        """(tokens, what was measured) on a fresh engine."""
        cuda = self.device != "cpu"
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with Engine.load(plan, self.model, self.draft, load_tokenizer(self.model, self.draft)) as engine:
            steps = engine.generate(self.prompt, sampling, max_tokens=self.max_tokens)
            tokens = [token for step in steps for token in step.tokens]
            stats, ledger = engine.stats, engine.memory.allocated()
        target = stats.levels[0]
        return tokens, {
            "stats": stats.as_dict(),
            "plan": plan.as_dict(),
            "ledger": ledger,
            "peak_device_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            "full_pass_bytes_per_second": target.link_bytes / target.seconds if target.seconds else None,
        }


def widened(like: str, work: Path, num_positions: int) -> Path:
    """The demo target with the sizes of `like`, for that many positions; written once."""
    folder = work / f"{like}-{num_positions}"
    if not folder.exists():
        say(f"writing {folder.name}")
        sizes = TINY if like == "tiny" else widen.LIKE[like]
        widen.widen(MODELS / "demo-target", folder, sizes, torch.bfloat16)
        if num_positions > TRAINED_POSITIONS:
            stretch(folder / "config.json", num_positions)
    return folder


def stretch(file: Path, num_positions: int) -> None:
    """Room for more positions than the model was trained for."""
    config = json.loads(file.read_text())
    factor = num_positions / TRAINED_POSITIONS
    config["max_position_embeddings"] = num_positions
    for key in ("rope_parameters", "rope_scaling"):
        if key in config:
            config[key]["factor"] *= factor
    file.write_text(json.dumps(config))


def bare_copy_rate(device: str) -> float:
    """Bytes per second of pinned memory to the device, nothing else going on."""
    where = torch.device(device)
    link = PacedLink(None) if device == "cpu" else CudaLink(where)
    try:
        copies = link_copies(link, where, COPY_BYTES)
        return copy_rate([copies.to_device], copies.num_bytes)
    finally:
        link.close()


def decoding(case: Case, bare: float) -> Iterator[Row]:
    """Plain and TriForce, offloaded under the cap and on chip without it; prefill of both."""
    sampling = SamplingParams(seed=0)
    resident_prefill = None
    for placement, changes in (("on chip", {"device_memory": None, "offload": frozenset()}), ("capped", {})):
        for mode in ("plain", "triforce"):
            try:
                plan = case.plan(speculation=mode == "triforce", **changes)
            except DoesNotFit as error:
                yield {"placement": placement, "mode": mode, "skipped": str(error)}
                continue
            _, row = case.run(plan if mode == "triforce" else replace(plan, rows=1), sampling)
            stats = row["stats"]
            if placement == "on chip":
                resident_prefill = resident_prefill or stats["prefill_seconds"]
            ratio = stats["prefill_seconds"] / resident_prefill if resident_prefill else None
            rate = row["full_pass_bytes_per_second"]
            yield row | {
                "placement": placement,
                "mode": mode,
                "milliseconds_per_token": stats["milliseconds_per_token"],
                "prefill_over_resident": ratio,
                "link_efficiency": rate / bare if plan.offload and rate else None,
                "peak_over_plan": peak_over_plan(row, plan),
            }


def peak_over_plan(row: Row, plan: Plan) -> float | None:
    """Peak of the allocator over the planned device bytes, without the reserve for what it does not see."""
    planned = sum(size for name, size in plan.device_bytes.items() if name != "reserve")
    return row["peak_device_bytes"] / planned if row["peak_device_bytes"] else None


def bits(case: Case) -> Iterator[Row]:
    """Greedy tokens with and without speculation, in both 16-bit types."""
    for dtype in ("bf16", "fp16") if case.device != "cpu" else ("bf16",):
        said = []
        for options in ({"speculation": False}, {"gamma": 7}, {"gamma": 15, "draft_gamma": 0, "budget": 256}):
            tokens, _ = case.run(case.plan(dtype=dtype, **options), SamplingParams(temperature=0.0, seed=0))
            said.append(tokens)
        yield {"mode": f"bits, {dtype}", "equal": said[0] == said[1] == said[2], "tokens": said}


def transformers_offloaded(case: Case) -> Iterator[Row]:
    """transformers' own decoding with its offloaded cache, on the same weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.bfloat16).to(case.device).eval()
    ids = torch.tensor([case.prompt], device=case.device)
    times = []
    for count in (1, 9):
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            cache_implementation="dynamic" if case.device == "cpu" else "offloaded",
        )  # fmt: skip
        times.append(time.perf_counter() - began)
    yield {
        "placement": "offloaded cache",
        "mode": "transformers",
        "milliseconds_per_token": 1000 * (times[1] - times[0]) / 8,
    }


def table_row(row: Row) -> list[str]:
    def number(key: str) -> str:
        value = row.get(key)
        return "" if value is None else f"{value:.2f}"

    result = "skipped" if "skipped" in row else {True: "equal", False: "DIFFERENT"}.get(row.get("equal"), "")
    return [
        row["model"], f"{row['length']}", row.get("placement", ""), row["mode"], number("milliseconds_per_token"),
        number("prefill_over_resident"), number("link_efficiency"), number("peak_over_plan"), result,
    ]  # fmt: skip


def wanted(args: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    """(model, length, what to measure), most wanted first."""
    for length in map(int, args.lengths.split(",")):
        for like in args.like.split(","):
            yield like, length, "decoding"
            yield like, length, "transformers"
            yield like, min(length, BITS_TOKENS), "bits"


def measure(args: argparse.Namespace, like: str, length: int, what: str, bare: float) -> Iterator[Row]:
    text = load_tokenizer(MODELS / "demo-target", None).encode(TEXT.read_text(encoding="utf-8"))
    prompt = (text * (length // len(text) + 1))[:length]
    positions = max(TRAINED_POSITIONS, 1 << (length + args.max_tokens - 1).bit_length())
    model = widened(like, args.work, positions)
    case = Case(model, MODELS / "demo-draft", prompt, args.device, args.device_memory, args.max_tokens)
    if what == "decoding":
        yield from decoding(case, bare)
    elif what == "transformers":
        yield from transformers_offloaded(case)
    else:
        yield from bits(case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--like", default="llama2-7b,llama-3.1-8b")
    parser.add_argument("--lengths", default="32000,120000")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--device-memory", type=float, default=24.0, help="10^9 bytes")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--work", type=Path, default=Path("wide-models"), help="where the widened models are written")
    args = parser.parse_args()
    began, bare = time.perf_counter(), bare_copy_rate(args.device)
    say(f"bare pinned copy to the device: {bare / 1e9:.1f} GB/s")
    rows: list[Row] = []
    for model, length, what in wanted(args):
        about = {"model": model, "length": length}
        if time.perf_counter() - began > 60 * args.minutes:
            rows.append(about | {"mode": what, "skipped": "no time left"})
            continue
        try:
            for row in measure(args, model, length, what, bare):
                rows.append(about | row)
                say("  ".join(table_row(rows[-1])))
        except Exception as error:  # one case must not cost the others
            rows.append(about | {"mode": what, "skipped": f"{type(error).__name__}: {error}"})
            say(f"{model}, {length}: {error}")
    columns = ["model", "prompt", "placement", "mode", "ms/token", "prefill/resident", "link", "peak/plan", ""]
    title = f"{args.device}, capped to {args.device_memory:g} GB, link {bare / 1e9:.1f} GB/s"
    document = {"environment": environment(0), "title": title, "bare_copy_bytes_per_second": bare, "results": rows}
    emit(title, columns, [table_row(row) for row in rows], document)


if __name__ == "__main__":
    main()
