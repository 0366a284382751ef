"""A stand-in for the engine, so that the command line is tested in fractions of a second and at will.

`python tests/test_cli_fake.py generate ...` is `triforce generate ...` on it, and so is a fork of the tests' process,
which has loaded the libraries. FAKE holds a JSON object:
pieces: the text, one piece a step; plain_pieces: the same without speculation; piece_seconds: after each; finish: of
the last step; hang: after the pieces, run until interrupted; endless: repeat the last piece very often; fail: raise
this error ("DoesNotFit", ...) after the pieces;
load_fail: raise it at load; ticks: progress calls of each stage, load_ticks and prefill_ticks of one; tick_seconds:
between two of them; pretended: time passes in these pauses alone, and they take none (in a fork); line_seconds: before
a stage's first line of progress where there is no terminal; tells: lines on standard error where a stage begins and is
done, and "decode" once all pieces were taken.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from kit.hearing import hear_signals  # noqa: E402
from offload import errors  # noqa: E402
from offload.engine.request import GenerationRequest  # noqa: E402
from offload.interrupts import poll  # noqa: E402
from offload.metrics import LevelStats, Stats  # noqa: E402
from offload.plan import request  # noqa: E402
from offload.plan.composition import Composition  # noqa: E402
from offload.plan.cost import Prediction  # noqa: E402
from offload.plan.placement import Placement  # noqa: E402
from offload.plan.planner import Options, Plan, PlannedRequest  # noqa: E402
from offload.progress import Progress  # noqa: E402
from triforce_cli.ground.deadline import Deadline  # noqa: E402
from triforce_cli.screen import progress  # noqa: E402
from triforce_cli.screen.busy import OtherPrograms  # noqa: E402

Key = TypeVar("Key")
_MOMENT = [0.0]  # of pretended time
SCRIPT: dict[str, Any] = json.loads(os.environ.get("FAKE", "{}"))


@dataclass(frozen=True)
class Step:
    text: str
    tokens: list[int]
    finish: str | None
    scores: tuple[Any, ...] = ()
    passages: tuple[Any, ...] = ()
    named: tuple[int, ...] = ()
    stop: str = ""


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def limited(self, most: int) -> Tokenizer:
        return self


def load_tokenizer(model: Path, draft: Path | None) -> Tokenizer:
    return Tokenizer()


@dataclass(frozen=True)
class Request:
    options: Options
    hardware = types.SimpleNamespace(is_cpu=True)
    target = types.SimpleNamespace()
    draft = None
    context = 1 << 20
    curves = None

    @classmethod
    def on_this_machine(cls, model: Path, draft: Path | None, options: Options) -> Request:
        return cls(options)

    def plan(self, *, num_prompt_tokens: int, max_tokens: int) -> Plan:
        return make_plan(self.options, num_prompt_tokens, max_tokens)

    def together(self, plan: Plan, num_sequences: int | None, *, most: int) -> Plan:
        number = min(num_sequences or 1, most)
        return replace(plan, request=replace(plan.request, num_sequences=number))


def make_plan(options: Options, num_prompt_tokens: int = 1000, max_tokens: int = 100) -> Plan:
    return Plan(
        request=PlannedRequest(
            target="a target",
            draft="a draft",
            device="cpu",
            device_name="CPU",
            num_devices=1,
            dtype="bf16",
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
        ),
        composition=Composition(
            gamma=options.gamma or 15,
            draft_gamma=options.draft_gamma or 2,
            adaptive=("target",),
            budget=options.budget or 1024,
            chunk=options.chunk or 16,
            draft=True,
            sinks=options.sinks,
            window=options.window,
            lookup=options.lookup,
        ),
        placement=Placement(
            offload=tuple(sorted(options.offload or ())),
            resident_layers=8,
            resident_tiles=16,
            device_bytes={"embeddings": 1},
            other_device_bytes={},
            host_bytes={},
            page_tokens=512,
            tile_tokens=512,
            rows=16,
            prefill_block=512,
            fused_prefill=True,
            link_bytes_per_second=None,
        ),
        predicted=Prediction(
            prefill_seconds=40.0,
            first_token_seconds=40.1,
            full_pass_seconds=0.1,
            full_sum_seconds=0.0,
            full_link_bytes=0,
            full_row_seconds=0.01,
            full_block_rows=16,
            mass_share=0.1,
            retrieval_pass_seconds=0.005,
            retrieval_sum_seconds=0.0,
            retrieval_row_seconds=0.0001,
            retrieval_token_seconds=0.004,
            draft_pass_seconds=0.002,
            refresh_seconds=0.003,
            acceptance=0.9,
            tokens_drafted=12,
            tokens_per_round=5.7,
            seconds_per_token=0.0142,
            plain_seconds_per_token=0.0423,
        ),
        notes=tuple(SCRIPT.get("notes", ())),
    )


class Engine:
    def __init__(self, prompt_echo: dict[str, Any], plan: Plan) -> None:
        self.stats = Stats(load_seconds=0.5)
        self.plan = plan
        self._echo = prompt_echo

    @classmethod
    def load(
        cls,
        plan: Plan,
        model: Path,
        draft: Path | None,
        tokenizer: Tokenizer,
        *,
        open_store: object,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> Engine:
        if "load_fail" in SCRIPT:
            raise _error(SCRIPT["load_fail"])
        _tick("load", 64 * 2**20, "bytes", on_progress)
        return cls({"model": str(model), "draft": str(draft) if draft else None, "plan": plan.as_dict()}, plan)

    def generate(
        self,
        request: GenerationRequest,
        *,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> Iterator[Step]:
        prompt, sampling = request.prompt, request.sampling
        _tick("prefill", len(prompt), "tokens", on_progress)
        asked = {"prompt": bytes(prompt).decode(), "sampling": asdict(sampling), "max_tokens": request.max_tokens}
        name = "pieces" if request.speculation or "plain_pieces" not in SCRIPT else "plain_pieces"
        pieces = SCRIPT.get(name, [json.dumps(self._echo | asked | {"stop": list(request.stop)})])
        self.stats = make_stats(num_prompt_tokens=len(prompt), output_tokens=len(pieces))
        last = len(pieces) - 1 if not {"hang", "endless", "fail"} & SCRIPT.keys() else None
        for index, piece in enumerate(pieces):
            yield Step(piece, list(piece.encode()), SCRIPT.get("finish", "length") if index == last else None)
            _pause(SCRIPT.get("piece_seconds", 0.0))
        for _ in range(100_000 if "endless" in SCRIPT else 0):
            yield Step(pieces[-1], list(pieces[-1].encode()), None)
        if "fail" in SCRIPT:
            raise _error(SCRIPT["fail"])
        if "hang" in SCRIPT:
            _tell("decode")
            _pause(3600)

    def keep(
        self, *, on_progress: Callable[[Progress], None] = lambda progress: None, documents: Sequence[str] = ()
    ) -> int:
        return 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None


class Sequences(Generic[Key]):
    """Of one engine, which takes turns."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[Key, tuple[list[Step], Iterator[Step]]] = {}

    @property
    def has_room(self) -> bool:
        return len(self._running) < self._engine.plan.request.num_sequences

    def join(
        self,
        key: Key,
        request: GenerationRequest,
        *,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._running[key] = ([], iter(()))
        steps = self._engine.generate(request, on_progress=on_progress)
        self._running[key] = ([next(steps)], steps)  # the prefill comes before it

    def steps(self) -> list[tuple[Key, Step]]:
        return [(key, first.pop() if first else next(steps)) for key, (first, steps) in self._running.items()]

    def leave(self, key: Key, *, on_end: Callable[[Stats], None] | None = None) -> Stats:
        del self._running[key]
        if on_end is not None:
            on_end(self._engine.stats)
        return self._engine.stats

    def drop(self, key: Key) -> None:
        self._running.pop(key, None)

    def close(self) -> None:
        self._running.clear()


def make_stats(*, num_prompt_tokens: int = 32_768, output_tokens: int = 200) -> Stats:
    return Stats(
        prompt_tokens=num_prompt_tokens,
        output_tokens=output_tokens,
        load_seconds=0.5,
        prefill_seconds=40.0,
        first_token_seconds=41.5,
        decode_seconds=8.0,
        refresh_seconds=0.25,
        levels=[
            LevelStats("target", passes=20, rows=320, seconds=2.0, rounds=20, drafted=200, accepted=180),
            LevelStats("retrieval", passes=100, rows=300, seconds=4.0, rounds=100, drafted=200, accepted=100),
            LevelStats("draft", passes=200, rows=1200, seconds=1.0),
        ],
    )


def _tick(stage: str, total: int, unit: str, on_progress: Callable[[Progress], None]) -> None:
    ticks = SCRIPT.get(f"{stage}_ticks", SCRIPT.get("ticks", 2))
    for tick in range(ticks + 1 if ticks else 0):
        on_progress(Progress(stage, total * tick // ticks, total, unit))
        _tell(stage if tick == 0 else f"{stage} done" if tick == ticks else "")
        if tick < ticks:
            _pause(SCRIPT.get("tick_seconds", 0.0))


def _tell(line: str) -> None:
    if line and SCRIPT.get("tells"):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _pause(seconds: float) -> None:
    if SCRIPT.get("pretended"):
        _MOMENT[0] += seconds
        return
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        poll()  # as each pass and each block of a prefill does
        time.sleep(min(left, 0.01))


def _error(name: str) -> Exception:
    if name == "RuntimeError":
        return RuntimeError("lost\nand more")
    return getattr(errors, name)(f"{name} happened; do something else")


def install() -> None:
    """Put the stand-ins where the command line imports from."""
    progress.LINE_SECONDS = SCRIPT.get("line_seconds", progress.LINE_SECONDS)
    engine = types.ModuleType("offload.engine.engine")
    engine.__dict__.update(
        Engine=Engine,
        load_tokenizer=load_tokenizer,
        kernels_problem=lambda device, model: "",
        prefill_problem=lambda device: "",
        timed=lambda request: request,
        disk_timed=lambda request, model: request,
    )
    asked = importlib.import_module("offload.engine.request")
    asked.__dict__.update(check_sampling=lambda sampling, model, tokenizer: None)
    together = types.ModuleType("offload.engine.sequences")
    together.__dict__.update(Sequences=Sequences)
    stand_ins = {
        "offload.engine.engine": engine,
        "offload.engine.sequences": together,
    }
    sys.modules.update(stand_ins)
    request.Request = Request
    OtherPrograms.share = lambda self: 0.0  # no note of what else this machine does


def environment(script: Mapping[str, Any] | None = None, **variables: str) -> dict[str, str]:
    """This process's environment in a terminal like any other; conftest.py removes the developer's own settings."""
    others = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if name not in others}
    return kept | {"FAKE": json.dumps(script or {}), "TERM": "xterm-256color"} | variables


def command(*args: str) -> list[str]:
    return [sys.executable, __file__, "generate", *args]


def start(
    *args: str, script: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, **settings: Any
) -> subprocess.Popen[bytes]:
    """`triforce generate ARGS` on the stand-in. An interrupt reaches it, also where the tests run in the background."""
    return subprocess.Popen(
        command(*args),
        env=environment(script, **(env or {})),
        preexec_fn=hear_signals,
        **settings,
    )


def fork(
    *args: str, script: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, **settings: Any
) -> subprocess.Popen[bytes]:
    """The same in a fork of this process, which has its own standard streams and loads nothing. Not for how the
    interpreter begins and ends: its locale, a stream that is closed."""
    load()
    variables = environment(script, **(env or {}))
    return subprocess.Popen(["true"], preexec_fn=lambda: play(["generate", *args], variables), **settings)


@cache
def load() -> None:
    """What every run imports, parsing included."""
    from triforce_cli.app import app

    app(["generate", "--prompt", "x"], standalone_mode=False)


def play(args: Sequence[str], variables: Mapping[str, str], *, stand_in: bool = True) -> None:
    """In a fork: be `triforce ARGS`, and end."""
    code = 1
    try:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # who waits for an exec is told that there was one
        os.environ.clear()
        os.environ.update(variables)
        forget_the_tests()
        SCRIPT.clear()
        SCRIPT.update(json.loads(variables["FAKE"]))
        if stand_in:
            install()
        if SCRIPT.get("pretended"):
            Deadline.__init__.__defaults__ = (lambda: _MOMENT[0],)
        from triforce_cli.app import main

        sys.argv = ["triforce", *args]
        code = main()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def forget_the_tests() -> None:
    """Streams, hooks and signals are those of a program that was just started."""
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(fd, "rw"[fd > 0], encoding="utf-8", closefd=False) for fd in range(3)
    )
    sys.excepthook, sys.unraisablehook, threading.excepthook = (
        sys.__excepthook__,
        sys.__unraisablehook__,
        threading.__excepthook__,
    )
    hear_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    globals()["__name__"] = "__main__"  # the program's own code may be interrupted anywhere


def run(
    *args: str,
    stdin: bytes = b"",
    script: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    how: Callable[..., subprocess.Popen[bytes]] = fork,
) -> subprocess.CompletedProcess[bytes]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with how(*args, script=script, env=env, **pipes) as process:
        out, err = process.communicate(stdin)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_stand_in_has_the_names_and_signatures_of_the_engine():
    from offload.engine import engine as real_engine
    from offload.engine import sequences as real_sequences

    for ours, real in (
        (load_tokenizer, real_engine.load_tokenizer),
        (Request.on_this_machine, request.Request.on_this_machine),
        (Request.plan, request.Request.plan),
        (Request.together, request.Request.together),
        (Sequences.join, real_sequences.Sequences.join),
        (Sequences.steps, real_sequences.Sequences.steps),
        (Sequences.leave, real_sequences.Sequences.leave),
        (Sequences.drop, real_sequences.Sequences.drop),
        (Sequences.close, real_sequences.Sequences.close),
        (Engine.load, real_engine.Engine.load),
        (Engine.generate, real_engine.Engine.generate),
        (Tokenizer.encode, real_engine.Tokenizer.encode),
    ):
        assert _parameters(ours) == _parameters(real)
    for our_class, real_class in ((Step, real_engine.Step),):
        assert [field.name for field in fields(our_class)] == [field.name for field in fields(real_class)]


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(parameter.name, parameter.kind) for parameter in inspect.signature(function).parameters.values()]


if __name__ == "__main__":
    install()
    from triforce_cli.app import main

    sys.exit(main())
