"""The house rules, walked with `ast`: who imports whom, who pins, who makes threads, who writes, who catches.

Each rule is a function from a module's name and source to its violations. Every rule is shown a violating source too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Ground to roof: a storey imports from itself and from those before it.
STOREYS = (
    *(
        "ground",
        "config",
        "speed",
        "plan",
        "native",
        "formats",
        "kernels",
        "transfer",
        "weights",
        "pages",
        "kv",
        "model",
    ),
    *("text", "grammar", "decode", "session", "worker", "ranks", "engine", "bench", "hub"),
)
CLI_STOREYS = (
    *(
        "ground",
        "screen",
        "setup",
        "documents",
        "settings",
        "tools",
        "agents",
        "render",
        "answering",
        "prompts",
        "apis",
        "options",
    ),
    *("batch", "serve", "chat", "commands", "app", "__main__"),
)
GROUND = tuple(
    f"offload.{name}"
    for name in (
        *("errors", "fields", "files", "formats.encodings", "formats.layout", "interrupts", "machine", "metrics"),
        "progress",
        *("seeds", "strict_json", "units"),
    )
)
CLI_MAY_IMPORT = (
    *("offload.engine", "offload.ranks.follower", "offload.config", "offload.plan", "offload.session"),
    "offload.bench",
    "offload.hub",
    *GROUND,
    *("offload.speed", "offload.text.tokenizer", "offload.grammar.constraint"),
    *(f"offload.decode.{name}" for name in ("logprobs", "sampling")),
)
WITHOUT_TORCH = ("offload.config", "offload.speed", "offload.plan", *GROUND)
BROAD = ("Exception", "BaseException")

Rule = Callable[[str, str], list[str]]


@cache
def sources() -> list[tuple[str, str]]:
    """(module name, source) of the program."""
    return [
        (_module(path), path.read_text())
        for package in ("offload", "triforce_cli")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parsed(source: str) -> ast.Module:
    """The tree of a module, read once for all rules."""
    return ast.parse(source)


@cache
def walked(source: str) -> list[ast.AST]:
    """All nodes of a module, in the order of `ast.walk`."""
    return list(ast.walk(parsed(source)))


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything imported anywhere; `from a import b` counts as a and as a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not read by these rules"
            assert node.module is not None
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def within(name: str, *modules: str) -> bool:
    """Is `name` one of the modules, or inside one?"""
    return any(name == module or name.startswith(module + ".") for module in modules)


def dotted(node: ast.AST) -> str:
    """`a.b.c` as written, "" for anything else."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def storey(module: str) -> int:
    """The number of the module's storey in its package, from the ground up."""
    if within(module, *GROUND) or module == "triforce_cli":
        return 0
    package, room = module.split(".")[:2]
    return (STOREYS if package == "offload" else CLI_STOREYS).index(room)


def imports_downwards(module: str, source: str) -> list[str]:
    found = []
    for name, line in imports(walked(source)):
        if within(name, "triforce_cli"):
            wrong = within(module, "offload") or storey(_existing(name)) > storey(module)
        elif not within(name, "offload") or name == "offload":
            wrong = False
        elif within(module, "triforce_cli"):
            wrong = not within(name, *CLI_MAY_IMPORT)
        else:
            wrong = module == "offload" or storey(name) > storey(module)
        if wrong:
            found.append(f"{module}:{line} imports {name}")
    return found


def _existing(name: str) -> str:
    """The module of the program that `name` is, or is defined in."""
    path = ROOT / name.replace(".", "/")
    return name if path.is_dir() or path.with_suffix(".py").exists() else name.rpartition(".")[0]


def only_memory_pins(module: str, source: str) -> list[str]:
    if module == "offload.transfer.memory":
        return []
    found = []
    for node in walked(source):
        name = node.arg if isinstance(node, ast.keyword) else getattr(node, "attr", getattr(node, "id", ""))
        if name in ("pin_memory", "cudaHostRegister", "cudaHostAlloc"):
            found.append(f"{module} uses {name}")
    return found


def only_link_makes_threads_and_streams(module: str, source: str) -> list[str]:
    # One copies, one reads files, one times, one pins, one packs, one works while a person types, the ranks watch each
    # other and meet.
    transfer = tuple(f"offload.transfer.{name}" for name in ("link", "disk", "timing", "prepinned", "background"))
    # What the thread that pins reads is locked. A poll asks on which thread it is. A server talks to its clients on
    # a thread of its own, which no pass waits for.
    allowed = (
        *transfer,
        "offload.interrupts",
        "offload.transfer.memory",
        "triforce_cli.chat.background",
        "offload.ranks",
        "triforce_cli.serve",
    )
    if within(module, *allowed):
        return []
    concurrent = ("threading", "_thread", "concurrent", "multiprocessing", "asyncio", "queue", "torch.multiprocessing")
    gpu = ("torch.cuda.Stream", "torch.cuda.Event", "torch.cuda.stream", "torch.Stream", "torch.Event")
    found = [
        f"{module}:{line} imports {name}" for name, line in imports(walked(source)) if within(name, *concurrent, *gpu)
    ]
    for node in walked(source):
        if dotted(node) in (*gpu, "cuda.Stream", "cuda.Event", "cuda.stream"):
            found.append(f"{module} uses {dotted(node)}")
    return found


def only_output_writes(module: str, source: str) -> list[str]:
    if module == "triforce_cli.screen.output":
        return []
    streams = ("sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__")
    writers = ("print", "typer.echo", "typer.secho", "rich.print", "Console", "rich.console.Console")
    names = ("sys.stdout", "sys.stderr", "typer.echo", "typer.secho", "rich.print")
    found = [f"{module}:{line} imports {name}" for name, line in imports(walked(source)) if name in names]
    for node in walked(source):
        if isinstance(node, ast.Call) and dotted(node.func) in writers:
            found.append(f"{module}:{node.lineno} calls {dotted(node.func)}")
        elif isinstance(node, ast.Call) and dotted(node.func) == "os.write":
            found.append(f"{module}:{node.lineno} calls os.write")
        elif dotted(node) in streams:
            found.append(f"{module} uses {dotted(node)}")
    return found


def only_app_catches_broadly(module: str, source: str) -> list[str]:
    """A handler that always raises again, as an error that says more, catches nothing; nor do the link's worker, those
    of the disk, the thread that pins and the other ranks, as their errors are raised in whoever waits."""
    transfer = ("offload.transfer.link", "offload.transfer.disk", "offload.transfer.prepinned")
    waited_for = (*transfer, "offload.ranks.sums", "offload.ranks.follower")
    if module in ("triforce_cli.app", *waited_for):
        return []
    found = []
    for node in walked(source):
        if isinstance(node, ast.Call) and dotted(node.func) in ("suppress", "contextlib.suppress"):
            kinds: list[ast.expr] = list(node.args)
        elif isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type or ast.Name("BaseException")]
            returns = any(isinstance(part, ast.Return) for part in ast.walk(node))
            if isinstance(node.body[-1], ast.Raise) and not returns:
                continue
        else:
            continue
        found += [f"{module}:{node.lineno} catches {dotted(kind)}" for kind in kinds if dotted(kind) in BROAD]
    return found


def only_interrupts_hears_signals(module: str, source: str) -> list[str]:
    """The other ranks ignore what is for rank 0, which blocks signals while it starts them; a terminal's modes are
    changed back when it is left; before the program is imported a signal ends it."""
    ranks = ("offload.ranks.follower", "offload.ranks.rendezvous")
    if module in ("offload.interrupts", *ranks, "triforce_cli.chat.keys", "triforce_cli.__main__"):
        return []
    return [f"{module}:{line} imports {name}" for name, line in imports(walked(source)) if within(name, "signal")]


def waits_are_interruptible(module: str, source: str) -> list[str]:
    """A system call that may last for ever is within `waiting`; a loop of short waits polls."""
    # A rank takes part in a sum, or in its own end, whatever happens. The watch, a copy's pace and the program that
    # runs llama.cpp are other threads and processes. `Prepinned.wait` reports progress, which polls.
    ranks = ("offload.ranks.follower", "offload.ranks.shared", "offload.ranks.watch")
    if within(module, "offload.interrupts", *ranks, "offload.transfer.pace", "offload.bench.llama_cpp"):
        return []
    whole = ("Sums._wait", "Sums._hear_why", "Prepinned.wait")
    found: list[str] = []

    def look(node: ast.AST, owner: str, waits: bool) -> None:
        if isinstance(node, ast.With):
            waits = waits or any(_calls(item, "waiting") for item in node.items)
        if isinstance(node, ast.Call) and not waits and _lasts(node):
            found.append(f"{module}:{node.lineno} calls {dotted(node.func)} outside of waiting")
        if isinstance(node, ast.While) and _calls(node, *_SHORT_WAITS) and not _calls(node, "poll", "waiting"):
            found.append(f"{module}:{node.lineno} waits in a loop that does not poll")
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            owner = f"{owner}.{node.name}".strip(".")
        for child in ast.iter_child_nodes(node) if owner not in whole else ():
            look(child, owner, waits)

    look(parsed(source), "", False)
    return found


_LAST = (
    "select.select",
    "readline",
    "flock",
    "self._session.prompt",
    "typer.prompt",
    "http_get",
    "model_info",
    "http_stream_backoff",
)
_SHORT_WAITS = ("wait", "join", "sleep", "get", "select", "await_count")


def _calls(node: ast.AST, *names: str) -> bool:
    """Whether functions or methods of these names are called in it. Those of texts and mappings are others."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    others = [
        call
        for call in calls
        if (f".{dotted(call.func)}".endswith(".get") and all(each.arg != "timeout" for each in call.keywords))
        or dotted(call.func) == "join"
        or (dotted(call.func).endswith(".join") and len(call.args) > 1)
    ]
    return any(dotted(call.func).rpartition(".")[2] in names for call in calls if call not in others)


def _lasts(call: ast.Call) -> bool:
    name = dotted(call.func)
    at_once = any(dotted(part) == "fcntl.LOCK_NB" for each in call.args for part in ast.walk(each))
    at_once |= bool(call.args) and isinstance(call.args[-1], ast.Constant) and call.args[-1].value == 0
    return not at_once and (name in _LAST or name.rpartition(".")[2] in _LAST)


def plans_without_torch(module: str, source: str) -> list[str]:
    """At module level; looking at the hardware may import it when it is called."""
    if not within(module, *WITHOUT_TORCH):
        return []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = []
    return [
        f"{module}:{line} imports {name}"
        for name, line in imports(ast.walk(tree))
        if within(name, "torch", "transformers")
    ]


RULES: list[Rule] = [
    imports_downwards,
    only_memory_pins,
    only_link_makes_threads_and_streams,
    only_output_writes,
    only_app_catches_broadly,
    only_interrupts_hears_signals,
    waits_are_interruptible,
    plans_without_torch,
]
VIOLATIONS: list[tuple[Rule, str, str]] = [
    (imports_downwards, "offload.kv.full", "from offload.model.decoder import Decoder"),
    (imports_downwards, "offload.kv.full", "import offload.decode.sampling"),
    (imports_downwards, "offload.model.decoder", "def f():\n    from offload.decode import sampling"),
    (imports_downwards, "offload.decode.verify", "from offload import engine"),
    (imports_downwards, "offload.speed.hardware", "from offload.bench.diagnosis import diagnose"),
    (imports_downwards, "triforce_cli.commands.doctor", "from offload.transfer.link import PacedLink"),
    (imports_downwards, "offload.config.model", "from offload.kernels import rope"),
    (imports_downwards, "offload.weights.layers", "from offload.kv import Cache"),
    (imports_downwards, "offload.errors", "from offload.config.model import ModelConfig"),
    (imports_downwards, "offload.engine.engine", "from triforce_cli.screen.output import Output"),
    (imports_downwards, "offload.engine.engine", "from offload.hub.library import locate"),
    (imports_downwards, "offload.engine.engine", "from offload.bench.trial import Trial"),
    (imports_downwards, "offload.bench.trial", "from offload.hub.library import locate"),
    (imports_downwards, "offload", "from offload.engine.engine import Engine"),
    (imports_downwards, "triforce_cli.commands.generate", "from offload.model.decoder import Decoder"),
    (imports_downwards, "triforce_cli.commands.generate", "from offload.decode.verify import verify"),
    (imports_downwards, "triforce_cli.answering.answer", "from triforce_cli.chat.dialogue import Dialogue"),
    (imports_downwards, "triforce_cli.ground.text", "from triforce_cli import app"),
    (imports_downwards, "triforce_cli.screen.output", "def f():\n    from triforce_cli.options import flags"),
    (only_memory_pins, "offload.pages.tiles", "x = torch.zeros(4, pin_memory=True)"),
    (only_memory_pins, "offload.weights.layers", "x = x.pin_memory()"),
    (only_link_makes_threads_and_streams, "offload.engine.engine", "import threading"),
    (only_link_makes_threads_and_streams, "offload.engine.engine", "from concurrent.futures import ThreadPoolExecutor"),
    (only_link_makes_threads_and_streams, "offload.pages.tiles", "s = torch.cuda.Stream()"),
    (only_link_makes_threads_and_streams, "offload.pages.tiles", "from torch import cuda\ne = cuda.Event()"),
    (only_link_makes_threads_and_streams, "offload.pages.tiles", "from torch.cuda import Event"),
    (only_output_writes, "offload.engine.engine", "print('loading')"),
    (only_output_writes, "offload.engine.engine", "import sys\nsys.stderr.write('x')"),
    (only_output_writes, "offload.engine.engine", "from sys import stdout"),
    (only_output_writes, "triforce_cli.ground.text", "import typer\ntyper.echo('x')"),
    (only_output_writes, "triforce_cli.ground.text", "from rich.console import Console\nc = Console()"),
    (only_output_writes, "triforce_cli.ground.text", "from rich import print"),
    (only_app_catches_broadly, "offload.engine.engine", "try:\n    f()\nexcept Exception:\n    pass"),
    (only_app_catches_broadly, "offload.engine.engine", "try:\n    f()\nexcept:\n    pass"),
    (only_app_catches_broadly, "offload.engine.engine", "try:\n    f()\nexcept (OSError, BaseException):\n    pass"),
    (only_app_catches_broadly, "triforce_cli.screen.output", "with suppress(Exception):\n    f()"),
    (
        only_app_catches_broadly,
        "offload.engine.engine",
        "def g():\n    try:\n        f()\n    except Exception:\n        if x:\n            return 1\n        raise",
    ),
    (only_interrupts_hears_signals, "triforce_cli.app", "import signal"),
    (only_interrupts_hears_signals, "offload.engine.engine", "def f():\n    from signal import SIGINT"),
    (waits_are_interruptible, "triforce_cli.ground.inputs", "select.select([stream], [], [], None)"),
    (waits_are_interruptible, "triforce_cli.ground.inputs", "with waiting():\n    pass\nsys.stdin.readline()"),
    (waits_are_interruptible, "offload.files", "fcntl.flock(file, fcntl.LOCK_EX)"),
    (waits_are_interruptible, "offload.bench.trial", "while True:\n    if done.wait(0.1):\n        break"),
    (waits_are_interruptible, "offload.ranks.team", "while True:\n    answers.get(timeout=0.1)"),
    (plans_without_torch, "offload.config.model", "import torch"),
    (plans_without_torch, "offload.plan.planner", "from torch import Tensor"),
    (plans_without_torch, "offload.metrics", "if True:\n    import torch.cuda"),
]
INNOCENT: list[tuple[Rule, str, str]] = [
    (imports_downwards, "offload.kernels.rope", "from offload.config.model import ModelConfig"),
    (imports_downwards, "offload.kv.full", "from offload.pages.tiles import Tile\nfrom offload.errors import E"),
    (imports_downwards, "offload.bench.diagnosis", "from offload.transfer.link import PacedLink"),
    (imports_downwards, "offload.hub.pull", "from offload.weights.checkpoint import Checkpoint"),
    (imports_downwards, "triforce_cli.app", "from offload.decode.sampling import SamplingParams"),
    (imports_downwards, "triforce_cli.serve.app", "from triforce_cli import __version__\nimport triforce_cli.apis"),
    (only_memory_pins, "offload.transfer.memory", "x = torch.zeros(4, pin_memory=True)"),
    (only_link_makes_threads_and_streams, "offload.pages.tiles", "from offload.transfer.link import Event, Link"),
    (only_output_writes, "triforce_cli.screen.progress", "from rich.console import Console\ndef f(c: Console): ..."),
    (only_output_writes, "triforce_cli.screen.utf8", "import sys\nsys.stdin.read()"),
    (
        only_app_catches_broadly,
        "offload.engine.engine",
        "try:\n    f()\nexcept Exception as e:\n    raise Mine() from e",
    ),
    (only_app_catches_broadly, "offload.engine.engine", "try:\n    f()\nexcept OSError:\n    pass"),
    (only_interrupts_hears_signals, "offload.interrupts", "import signal"),
    (waits_are_interruptible, "triforce_cli.ground.inputs", "with waiting():\n    sys.stdin.readline()"),
    (waits_are_interruptible, "triforce_cli.ground.outfile", "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
    (waits_are_interruptible, "offload.bench.trial", "while True:\n    poll()\n    done.wait(0.1)"),
    (waits_are_interruptible, "offload.bench.trial", "while names:\n    names = rest.get(names)"),
    (plans_without_torch, "offload.speed.hardware", "def probe():\n    import torch"),
    (plans_without_torch, "offload.engine.engine", "import torch"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_program_keeps_the_rule(rule: Rule) -> None:
    assert [violation for module, source in sources() for violation in rule(module, source)] == []


@pytest.mark.parametrize(("rule", "module", "source"), VIOLATIONS)
def test_the_rule_sees_a_violation(rule: Rule, module: str, source: str) -> None:
    assert rule(module, source)


@pytest.mark.parametrize(("rule", "module", "source"), INNOCENT)
def test_the_rule_lets_the_innocent_pass(rule: Rule, module: str, source: str) -> None:
    assert rule(module, source) == []


def test_every_rule_has_been_seen_to_fail_and_to_pass() -> None:
    assert {rule.__name__ for rule, _, _ in VIOLATIONS} == {rule.__name__ for rule in RULES}
    assert {rule.__name__ for rule, _, _ in INNOCENT} == {rule.__name__ for rule in RULES}


def test_the_walk_meets_every_storey() -> None:
    modules = [module for module, _ in sources()]
    for package, storeys in (("offload.", STOREYS), ("triforce_cli", CLI_STOREYS)):
        assert {storey(module) for module in modules if module.startswith(package)} == set(range(len(storeys)))


def circle(program: Iterable[tuple[str, str]]) -> list[str]:
    """Modules (name, source) that import each other in a circle, for types or late, too; [] where none do."""
    listed = dict(program)
    imported = {}
    for module, source in listed.items():
        names = {name for name, _ in imports(walked(source))}
        imported[module] = (names | {name.rpartition(".")[0] for name in names}) & (listed.keys() - {module})
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    packages = {module for module, _ in sources() if (ROOT / module.replace(".", "/")).is_dir()}
    assert circle(each for each in sources() if each[0] not in packages) == []


@pytest.mark.parametrize(
    "late", ["import a", "if TYPE_CHECKING:\n    from a import A", "def f():\n    from a import A"]
)
def test_a_circle_is_seen_for_types_and_late_imports_too(late: str) -> None:
    assert set(circle([("a", "import b"), ("b", "import c"), ("c", late), ("d", "import a")])) == {"a", "b", "c"}
    assert circle([("a", "import b"), ("b", "import c"), ("c", ""), ("d", "import a")]) == []


def heavy_modules_after(code: str) -> str:
    """The heavy libraries that a new interpreter has loaded after `code`, separated by commas."""
    heavy = {"torch", "transformers", "huggingface_hub"}
    listing = f"import sys; sys.stderr.write(','.join(sorted({heavy} & set(sys.modules))))"
    command = [sys.executable, "-c", f"{code}\n{listing}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stderr


def test_planning_loads_no_torch() -> None:
    assert heavy_modules_after("import offload.plan.planner, offload.config.reading") == ""


def test_what_is_loaded_is_noticed() -> None:
    assert heavy_modules_after("import huggingface_hub") == "huggingface_hub"
