"""The cost of starting, in loaded modules and in CPU seconds, which a busy machine hardly changes."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from test_cli_fake import ROOT, environment

HELPS = [[name, "--help"] for name in ("generate", "chat", "plan", "doctor", "sessions", "pull", "bench", "launch")]


def run_after(code: str, *args: str, epilogue: str) -> subprocess.CompletedProcess[str]:
    """`triforce ARGS` in a process of its own, then `epilogue`, which says something on standard error."""
    program = f"import sys\nfrom triforce_cli.app import main\n{code}\nassert main(sys.argv[1:]) == 0\n{epilogue}"
    return subprocess.run(
        [sys.executable, "-c", program, *args],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )


def test_help_and_the_text_of_a_document_import_few_modules(tmp_path: Path) -> None:
    """601 with 22 commands, a module each, for all helps together; torch alone would be a thousand."""
    pytest.importorskip("lxml")
    (page := tmp_path / "page.html").write_text("<main><h1>Title</h1><p>Text.</main>")
    told = "sys.stderr.write(' '.join(sys.modules))"
    loaded = run_after(f"for args in {HELPS}: assert main(args) == 0", "--help", epilogue=told).stderr.split()
    assert len(loaded) < 610
    text = run_after("", "text", str(page), "--places", epilogue=told).stderr.split()
    assert not {"torch", "transformers", "huggingface_hub", "numpy"} & {*loaded, *text}


def test_generating_with_the_embedded_model_imports_no_models_of_transformers() -> None:
    """To ask AutoTokenizer for the class took as long as all else up to the first token."""
    epilogue = "sys.stderr.write('\\n'.join(name for name in sys.modules if name.startswith('transformers.models.')))"
    untimed = "from offload.engine import engine; engine.timed = lambda request: request"
    loaded = run_after(untimed, "generate", "--prompt", "x", "--max-tokens", "1", "--quiet", epilogue=epilogue).stderr
    assert "transformers.models.auto" not in loaded.split()
    import_module("transformers").AutoTokenizer  # noqa: B018
    assert "transformers.models.auto" in sys.modules  # as it would be called


@pytest.mark.deep
def test_the_benchmark_of_it_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "startup.py"), "--repeats", "1"],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "first byte" in done.stderr
