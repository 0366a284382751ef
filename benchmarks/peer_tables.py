"""The tables of docs/measured.md that compare this program with others, from the files in benchmarks/results/.

usage: python benchmarks/peer_tables.py

A machine has a file for each length, `peers-demo-MACHINE-2k.jsonl`, written by `python benchmarks/peers.py --lengths
2048 ...`. Its tables replace the text between two comments in the page, `<!-- peers-demo-MACHINE -->` and `<!-- end
-->`: seconds to the first token, ms/token, peak memory; and for each other program the times of all settings tried,
with the chosen one marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from program import Tried, fastest, name_of
from report import Document, read

from offload.metrics import Spread

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "measured.md"
REGION = re.compile(r"(<!-- (peers-demo\S*) -->\n).*?(<!-- end -->)", re.DOTALL)
LENGTHS = ("2k", "8k", "16k", "30k")
LABELS = {
    "ours, plain": "this program, plain",
    "ours, default": "this program, default",
    "transformers": "transformers",
    "transformers, draft": "transformers, assisted by the draft",
    "transformers, lookups": "transformers, prompt lookup",
    "llama.cpp": "llama.cpp",
    "llama.cpp, draft": "llama.cpp, draft",
    "llama.cpp, n-grams": "llama.cpp, n-gram lookups",
}


def page(text: str) -> str:
    """The page with all tables updated from the results."""
    return REGION.sub(lambda found: found[1] + "\n".join(tables(found[2])) + "\n" + found[3], text)


def tables(machine: str) -> Iterator[str]:
    """Yield the lines of one machine's tables, two lengths per table."""
    files = [file for length in LENGTHS if (file := RESULTS / f"{machine}-{length}.jsonl").exists()]
    found = [read(file.read_text(encoding="utf-8"))[1] for file in files]
    if not found:
        yield "No run is recorded yet."
    for first in range(0, len(found), 2):
        yield from ([""] if first else [])
        yield from table(found[first : first + 2])
    for way in ("llama.cpp", "transformers"):
        yield from tried(way, [row for rows in found for row in rows if row["way"] == way and row.get("tried")])


def table(lengths: Sequence[Sequence[Document]]) -> Iterator[str]:
    titles = [f"{rows[0]['length']:,} tokens: first token | a token | peak" for rows in lengths]
    yield f"| | {' | '.join(titles)} |"
    yield "|---" * (1 + 3 * len(lengths)) + "|"
    for way, label in LABELS.items():
        cells = [next((measured(row) for row in rows if row["way"] == way), " | | ") for rows in lengths]
        if any(cell.strip("| ") for cell in cells):
            yield f"| {label} | {' | '.join(cells)} |"


def measured(row: Document) -> str:
    """The three cells of a row: seconds to the first token, ms/token, peak memory."""
    if "absent" in row:
        return " | | "
    seconds = row["first_token_seconds"]
    first = "" if seconds is None else f"{seconds:.2f} s"
    milliseconds = Spread.of(row["milliseconds_per_token"]).median
    return f"{first} | {milliseconds:.2f} ms | {row['peak_bytes'] / 1e9:.2f} GB"


def tried(way: str, rows: Sequence[Document]) -> Iterator[str]:
    """Yield the times of each setting of another program, by the tokens of the prompt; the chosen one is in bold."""
    trials = [[Tried(**trial) for trial in row["tried"]] for row in rows if "setting" in row["tried"][0]]
    if not trials:
        return
    best = [fastest(at) for at in trials]
    every = [trial for at in trials for trial in at]
    lengths = sorted({trial.num_prompt_tokens for trial in every})
    yield f"\n| {way}, tried | {' | '.join(f'{length:,} tokens' for length in lengths)} |"
    yield "|---" * (1 + len(lengths)) + "|"
    times: dict[str, dict[int, str]] = {}
    for trial in every:  # the later of two trials of a setting counts
        times.setdefault(name_of(trial.setting), {})[trial.num_prompt_tokens] = cell(trial, trial in best)
    for name, by_length in times.items():
        yield f"| {name} | {' | '.join(by_length.get(length, '') for length in lengths)} |"


def cell(trial: Tried, bold: bool) -> str:
    if trial.error is not None:
        return "does not run"
    times = f"{trial.first_token_seconds:.2f} s, {trial.milliseconds_per_token:.2f} ms"
    return f"**{times}**" if bold else times


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
