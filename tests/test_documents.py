"""The README and the pages of docs/: links lead somewhere, the table of results is what was measured."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # last: one of them is called as one here

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import figure
import module_docs
import peer_tables
from program import Tried

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN_BY_HAND = [page for page in PAGES if page.name != "cli.md"]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", WRITTEN_BY_HAND, ids=lambda page: page.name)
def test_prose_is_wrapped(page: Path) -> None:
    """Tables and plain text that was recorded may be wider."""
    fenced = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    lines = fenced.sub("", page.read_text(encoding="utf-8")).splitlines()
    assert not [line for line in lines if len(line) > 100 and not line.startswith(("|", "    "))]


def test_the_readme_is_short_and_its_code_narrow() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") < 190
    code = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert code
    assert not [line for line in code.splitlines() if len(line) >= 90]


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in index + "(README.md)"]


def test_the_readmes_table_and_plot_are_what_was_measured(tmp_path: Path) -> None:
    panels = {title: figure.points(files) for title, files in figure.PANELS.items()}
    assert "\n".join(figure.table(panels)) in (ROOT / "README.md").read_text(encoding="utf-8")
    pytest.importorskip("matplotlib")
    figure.draw(panels, tmp_path / "plot.svg")
    ratios = re.compile(r">([\d.]+x)</text>")
    drawn = ratios.findall((tmp_path / "plot.svg").read_text(encoding="utf-8"))
    assert len(drawn) == sum(map(len, panels.values()))
    assert drawn == ratios.findall((ROOT / "docs" / "results.svg").read_text(encoding="utf-8"))


def test_the_tables_beside_other_programs_are_what_was_measured() -> None:
    text = peer_tables.PAGE.read_text(encoding="utf-8")
    assert peer_tables.page(text) == text, "run python benchmarks/peer_tables.py"
    assert "| llama.cpp | 1.59 s | 2.11 ms | 0.15 GB | 17.59 s |" in text


def test_settings_that_were_tried_stand_in_the_tables() -> None:
    setting = {"flash_attention": "off", "cache": "f16"}
    short = Tried(setting=setting, num_prompt_tokens=100, first_token_seconds=1.5, milliseconds_per_token=3.0)
    slow = replace(short, setting=setting | {"flash_attention": "on"}, milliseconds_per_token=9.0)
    none = Tried(setting=setting | {"cache": "f32"}, num_prompt_tokens=100, error="no room")
    whole = replace(short, num_prompt_tokens=900, milliseconds_per_token=7.0)
    lines = list(peer_tables.tried("llama.cpp", [{"tried": [asdict(trial) for trial in (short, slow, none, whole)]}]))
    assert lines[0].split() == ["|", "llama.cpp,", "tried", "|", "100", "tokens", "|", "900", "tokens", "|"]
    assert lines[2:] == [
        "| flash attention off, cache f16 | 1.50 s, 3.00 ms | **1.50 s, 7.00 ms** |",
        "| flash attention on, cache f16 | 1.50 s, 9.00 ms |  |",
        "| flash attention off, cache f32 | does not run |  |",
    ]


def test_every_module_says_what_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`python scripts/module_docs.py` prints a line for each."""
    paths = [path for package in module_docs.PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = dict(module_docs.modules())
    assert len(found) == sum(path.name != "__init__.py" or path.stat().st_size > 0 for path in paths)
    assert not [name for name, about in found.items() if not about]
    monkeypatch.setattr(module_docs, "modules", found.items)  # which reads them all again
    monkeypatch.setattr(sys, "argv", ["module_docs.py"])
    module_docs.main()
    assert capsys.readouterr().out.splitlines() == [f"{name}: {about}" for name, about in found.items()]
    monkeypatch.setattr(sys, "argv", ["module_docs.py", "Speculator"])
    module_docs.main()
    assert "offload/decode/speculation: " in capsys.readouterr().out


def test_every_docstring_names_a_thing() -> None:
    found = [f"{path}:{fault.line}" for path, source in module_docs.sources() for fault in module_docs.faults(source)]
    assert not found, "run python scripts/module_docs.py --check"


@pytest.mark.parametrize(
    "opening",
    [
        *("Those", "These", "What", "Of", "The same", "They", "It", "Its", "Whose", "Whom", "Where", "Their"),
        *("those", "It's"),
    ],
)
def test_a_docstring_that_names_no_thing_is_found(opening: str) -> None:
    docs = [f'"""{opening} of a model."""', f'"""{opening}\n    of a model, all of them."""']
    module, function = docs
    source = f"{module}\n\nclass Cache:\n    async def _rows(self):\n        def inner():\n            {function}\n"
    first = opening.split()
    assert list(module_docs.faults(source)) == [
        (1, "module", " ".join([*first, "of", "a", "model."])),
        (6, "Cache._rows.inner", " ".join([*first, "of", "a", "model,", "all", "of"][:6])),
    ]


@pytest.mark.parametrize("text", ["See `Cache`.", "See `kernels.runs.RunAttention`", "\n    See `Cache`.\n    "])
def test_a_docstring_that_only_refers_is_found(text: str) -> None:
    source = f'class Full:\n    """{text}"""\n'
    assert list(module_docs.faults(source)) == [(2, "Full", " ".join(text.split()))]


@pytest.mark.parametrize(
    "text",
    [
        *("What-if plans.", "Offloaded rows.", "Items.", "The samest rows.", "Whereabouts.", "`Its` name."),
        *("See `Cache`. Rows come in one call.", "See `Cache`: rows of a window.", ""),
    ],
)
def test_a_docstring_that_names_a_thing_is_no_fault(text: str) -> None:
    assert not list(module_docs.faults(f'def rows():\n    """{text}"""\n    "These are no docstring."\n'))


def test_the_check_prints_each_docstring_that_names_no_thing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for package in module_docs.PACKAGES:
        (tmp_path / package).mkdir()
    monkeypatch.setattr(module_docs, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["module_docs.py", "--check"])
    page = tmp_path / "offload" / "page.py"
    page.write_text('"""Pages."""\n', encoding="utf-8")
    assert (module_docs.main(), capsys.readouterr().out) == (0, "")
    page.write_text('"""Pages."""\n\ndef size():\n    """Of a page, in bytes."""\n', encoding="utf-8")
    assert (module_docs.main(), capsys.readouterr().out) == (1, "offload/page.py:4: size: Of a page, in bytes.\n")


def test_the_plan_that_is_shown_is_the_plan() -> None:
    """Shortened: all of its lines are there, in their order."""
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    shown = re.search(r"^\$ triforce plan [^\n]*--gpus 2\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert shown is not None
    lines = iter((ROOT / "tests" / "golden" / "plan-two-gpus.txt").read_text(encoding="utf-8").splitlines())
    assert not [line for line in shown[1].splitlines() if line not in lines]
