"""The rules that the command line's modules keep, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import triforce_cli

PACKAGE = Path(triforce_cli.__file__).parent
MODULES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
HEAVY = {
    *("torch", "transformers", "safetensors", "numpy", "huggingface_hub", "pypdf", "lxml"),
    *(
        "offload.engine.engine",
        "offload.engine.step",
        "offload.text",
        "offload.grammar",
        "offload.decode",
        "offload.model",
    ),
    *(f"offload.bench.{name}" for name in ("diagnosis", "environment", "exactness", "measure", "trial")),
}
LIGHT = ("offload.decode.sampling", "offload.grammar.constraint")


def names(tree: ast.AST) -> Iterator[str]:
    """Every dotted name in `tree`, whole: sys.stdout.write."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            yield ast.unparse(node)


def handlers(tree: ast.AST) -> list[ast.ExceptHandler]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]


GOING_ON = (
    "settings/aliases.py",
    "settings/configuration_file.py",
    "ground/answer_log.py",
    "answering/recorder.py",
    "batch/runner.py",
    "chat/background.py",
    "chat/dialogue.py",
    "chat/mentions.py",
    "chat/reader.py",
    "prompts/script.py",
    "commands/chat.py",
    "commands/plan.py",
    "commands/sessions.py",
    "commands/start.py",
    "documents/epub.py",
    "documents/pdf.py",
    "documents/walk.py",
    "serve/guard.py",
    "serve/loop.py",
    "serve/scheduler.py",
)
GONE_ON_AFTER = {
    "ModelError",
    "FileNotFoundError",
    *("typer", "typer.TyperException"),
    "TimedOut",
    "SessionError",
    "DamagedLog",
    "TriforceError",
    "UsageError",
    "DoesNotFit",
    "Stopped",
    "Over",
    "_BrokenOff",
    "EOFError",
    "KeyboardInterrupt",
    "OSError",
    *("pypdf", "pypdf.errors", "pypdf.errors.PyPdfError"),
    "_FAULTS",
    *("ApiError", "MemoryError"),  # of a request to the server
}


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def imported_at_start(tree: ast.Module) -> Iterator[str]:
    """Modules that importing this one imports; those for the type checker alone do not count."""
    for node in tree.body:
        yield from imported(node)


def test_only_output_writes():
    streams = ("sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__", "typer.echo", "typer.secho", "os.write")
    writes = {
        module: [name for name in names(tree) if name == "print" or name.startswith(streams)]
        for module, tree in MODULES.items()
    }
    assert [module for module, found in writes.items() if found] == ["screen/output.py"], writes


def test_output_is_seen_to_write():
    assert "sys.stdout" in set(names(MODULES["screen/output.py"]))


def test_only_app_main_catches_for_good():
    """Elsewhere a handler may translate one error into another, and must raise. Conversations, batches, documents,
    the answer log, the list of aliases and the server go on after errors that they name."""
    for module, tree in MODULES.items():
        for handler in handlers(tree):
            if isinstance(handler.body[-1], ast.Raise) or module == "app.py":
                continue
            caught = set(names(handler.type)) if handler.type else {"BaseException"}
            assert caught <= (GONE_ON_AFTER if module in GOING_ON else set()), f"{module}:{handler.lineno}"


def test_app_catches_in_main_alone():
    everything = handlers(MODULES["app.py"])
    (main,) = (node for node in MODULES["app.py"].body if isinstance(node, ast.FunctionDef) and node.name == "main")
    assert everything == handlers(main) != []


def test_heavy_modules_are_imported_inside_functions_only():
    for module, tree in MODULES.items():
        for name in imported_at_start(tree):
            if not name.startswith(LIGHT):
                assert not any(name == heavy or name.startswith(heavy + ".") for heavy in HEAVY), (module, name)


def test_click_is_never_imported():
    for module, tree in MODULES.items():
        every = [name for node in ast.walk(tree) for name in imported(node)]
        assert not [name for name in every if name.split(".")[0] == "click" or "_click" in name], module
