"""Command lines whose output is kept in tests/golden, and what they find. No tests in here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.stage import NOW, TEXT, Prepare, Scene, fake_engine
from kit.terminals import CTRL_U

_KEPT = ExitStack()  # to the end of the process


def some_requests() -> None:
    lines = ('{"id": "a", "prompt": "Once"}', '{"prompt": "Twice", "max_tokens": 5}')
    Path("questions.jsonl").write_text("".join(f"{line}\n" for line in lines))
    fake_engine()()


def a_bad_request() -> None:
    fake_engine()()
    Path("questions.jsonl").write_text('{"id": "a", "prompt": "Once"}\n{"id": "b", "promt": "Twice"}\n')


def a_verification(*, holds: bool) -> Prepare:
    def prepare() -> None:
        from offload.bench import exactness

        tokens = [400, 500, 600]
        replayed = [exactness.Replayed(i, t, t, True, True, 0.0, 1.25) for i, t in enumerate(tokens)]
        recomputed = [exactness.Recomputed(i, tokens[i], tokens[i], 0.0125, 0.5) for i in (0, 2)]
        if not holds:
            replayed[1] = replace(replayed[1], best=501, possible=False, same_bits=False, difference=0.031)
            recomputed[1] = replace(recomputed[1], difference=0.75)
        fake_engine()()
        found = exactness.ExactnessReport(1200, tokens, replayed, recomputed, 0.25)
        exactness.check_exactness = lambda *args, **settings: found

    return prepare


def a_scoring() -> None:
    """Of two texts, the second of which has a surprise."""
    import torch

    from offload.engine import engine
    from offload.engine.scores import Reference, Scores

    def score(self: object, tokens: Sequence[int], *, reference: Reference | None, **settings: object) -> Scores:
        count = len(tokens) - 1
        own = -2 - 0.5 * torch.arange(count).remainder(3)
        own[min(count, 12) - 1] -= 8
        likeliest = torch.tensor(tokens[1:])
        likeliest[::4] = 261
        head: Any = None  # of nothing
        found = None if reference is None else 0.25 * torch.arange(count).remainder(2)
        return Scores(tuple(tokens), own, likeliest, own / 2, found, Reference(head, torch.empty(0)))

    Path("book.txt").write_text(TEXT * 2)
    Path("notes.txt").write_text("Sé, naïve:\n\nDipped in ink.\n")
    fake_engine()()
    engine.Engine.score = score


def some_documents() -> None:
    Path("papers", ".git").mkdir(parents=True)
    Path("papers/book.txt").write_text(TEXT * 2)
    Path("papers/page.html").write_text("<nav>Home</nav><main><p>Sé, naïve:<h2>Ink</h2><p>Dipped in ink.</main>")
    Path("papers/photo.png").write_bytes(b"\x89PNG\0")
    Path("scan.pdf").write_bytes(b"%PDF-1.7\n")


def a_comparison() -> None:
    from offload.bench.trial import Trial
    from test_cli_bench import comparison

    def run(trial: Trial, engine: object, **callbacks: object) -> object:
        context = len(trial.prompt) + trial.max_tokens
        return comparison(context, seconds=context / 10_000)

    Path("book.txt").write_text(TEXT * 100)
    fake_engine(plans=False)()
    Trial.run = run


def a_diagnosis(name: str) -> Prepare:
    def prepare() -> None:
        import test_doctor
        from offload.bench import checks, diagnosis

        checks.check_device = lambda hardware, target, draft, on_step: [
            replace(check, device=hardware.device) for check in test_doctor.CHECKS
        ]
        found = getattr(test_doctor, name)
        diagnosis.diagnose = lambda on_step: found
        diagnosis.remember = lambda found: diagnosis.Record("cache/hardware.json", "")

    return prepare


def some_configs() -> None:
    """Folders 13b and 68m with nothing but a config.json."""
    from test_cli_plan import DRAFT, TARGET, json

    for name, config in (("13b", TARGET), ("68m", DRAFT)):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config))


def some_models() -> None:
    from test_cli_models import LARGE, LLAMA_13B, put

    put(Path("models", LARGE))
    put(Path("models/some/config"), {**LLAMA_13B, "num_hidden_layers": 60}, weights=False)
    put(Path("models/some/mamba"), {**LLAMA_13B, "model_type": "mamba"})
    Path("config.toml").write_text('[aliases]\nlong = "yarn-llama-2-13b-128k"\nlost = "llama-68m"\n')


def a_disk() -> None:
    """With 412 GB free."""
    from offload.hub import disk

    disk.free_bytes = lambda folder: 412 * 10**9


def a_hub() -> None:
    from huggingface_hub import constants

    from kit import hub

    there = _KEPT.enter_context(hub.running())
    there.put("owner/model", {path.name: path.read_bytes() for path in Path("demo-draft").iterdir()}, license="llama2")
    constants.ENDPOINT, constants.HF_HUB_OFFLINE = there.url, False


def a_repository() -> None:
    """Of the demo draft in two mixtures of kinds."""
    from huggingface_hub import constants

    from kit import hub

    gguf_files()
    there = _KEPT.enter_context(hub.running())
    there.put("owner/demo-GGUF", {path.name: path.read_bytes() for path in Path().glob("demo-*.gguf")})
    constants.ENDPOINT, constants.HF_HUB_OFFLINE = there.url, False
    a_disk()


def gguf_files() -> None:
    from kit.gguf_models import write_gguf

    write_gguf(Path("demo-draft"), Path("demo-Q8_0.gguf"), kind="Q8_0")
    write_gguf(Path("demo-draft"), Path("demo-Q4_K_M.gguf"), kind=lambda name: "Q4_0" if "mlp" in name else "Q8_0")


def pickled_weights() -> None:
    import torch
    from safetensors.torch import load_file

    shutil.copytree("demo-draft", "old-llama", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file("demo-draft/model.safetensors"), "old-llama/pytorch_model.bin")


def some_sessions() -> None:
    from test_cli_sessions import DAY, damage, put

    root = Path("sessions")
    put(root / "book-club", tokens=90, updated=NOW - 60, model="SmolLM2-135M")
    put(root / "notes", updated=NOW - 3 * DAY)
    put(root / "torn", updated=NOW - 40 * DAY)
    damage(root / "torn")


def a_store() -> None:
    """Pages of two models, one of a moment ago."""
    from offload.session.store_files import PageName, make_folder, store_folder

    os.environ["TRIFORCE_CACHE_DIR"] = str(Path.cwd())
    for number, name in enumerate(("SmolLM2-135M", "llama-2-7b")):
        make_folder(store_folder(), folder := store_folder() / f"{number:032}", model_name=name, dtype="bf16")
        for page in range(3 - number):
            file = folder / str(PageName(f"{page:032}", "rows", "0" * 32, ""))
            file.write_bytes(bytes(100_000))
            os.utime(file, (NOW - 1000 * number, NOW - 1000 * number))


def a_log() -> None:
    """Of three answers."""
    from triforce_cli.ground.answer_log import AnswerLog, Entry

    asked = [
        ("generate", {"max-tokens": 20}, 7, "It was a bright cold day", (), "in April."),
        (
            "chat",
            {"temperature": 0.0},
            None,
            "Who is the tenant,\nand since when?",
            ("lease.pdf",),
            "Miller, since May.",
        ),
        ("ask", {"file": ["lease.pdf"], "stop": ["a b"]}, 3, "When does it end?", ("lease.pdf",), "Never.\n\n- Or so."),
    ]
    for number, (command, options, seed, question, documents, answer) in enumerate(asked):
        moment = NOW - 90000 * (2 - number)
        entry = Entry(moment, command, "demo-target", seed, options, 1200, question, documents, answer, "stop", 2.5)
        AnswerLog.of_user().add(entry)


def a_first_use() -> None:
    fake_engine()()
    Path("log/answers.db").unlink()


def a_configuration() -> None:
    Path("config.toml").write_text(
        "temperature = 0.8\n\n[generate]\nmax-tokens = 100\n\n[templates.letter]\n"
        'prompt = "A letter to {whom}, in {tone} words, which says:\\n\\n{input}"\n\n'
        "[templates.sum]\nprompt = 'Sum it up.'\nsystem = 'You are brief.'\n"
    )
    os.environ["TRIFORCE_SEED"] = "7"


def an_editor() -> None:
    a_configuration()
    os.environ["EDITOR"] = "sed -i s/temperature/temprature/"


def no_agents() -> None:
    """Nor variables of clouds, but two."""
    from triforce_cli.agents.agent import is_of_a_cloud

    for name in filter(is_of_a_cloud, tuple(os.environ)):
        del os.environ[name]
    os.environ |= {"PATH": "", "OPENAI_API_KEY": "sk", "ANTHROPIC_BASE_URL": "https://cloud"}


ASKED = "--prompt 'It was a bright cold day'"
PAIR = "--model 13b --draft 68m"
SCRIPTED = "Hello\n/tokens\nAnd then?\n"
SAID = (
    "Hello",
    "/copy",
    "/log",
    "/help",
    "/stats",
    "/tokens",
    "/set",
    "/set top-k many",
    "/file book.txt",
    "/undo",
    f"{CTRL_U}/exit",
)
TYPED = [("", line) for line in SAID]
OUTPUT_MODES = "terminal piped"
SCENES: dict[str, Scene] = {
    "generate": Scene(f"generate {ASKED}", fake_engine(notes=["offload: weights, since 12.0 GB are free"])),
    "generate-stats": Scene(f"generate {ASKED} --stats --echo", fake_engine(), modes=OUTPUT_MODES),
    "generate-file": Scene("generate --prompt-file book.txt -o out.txt", fake_engine()),
    "generate-stdin": Scene("generate --quiet", fake_engine(), stdin=TEXT, modes="piped"),
    "generate-jsonl": Scene(f"generate {ASKED} --jsonl --echo", fake_engine(), modes="piped"),
    "generate-batch": Scene("generate --input-jsonl questions.jsonl", some_requests, modes="piped"),
    "generate-batch-to-file": Scene(
        "generate --input-jsonl questions.jsonl --output-jsonl answers.jsonl", some_requests, modes=OUTPUT_MODES
    ),
    "generate-batch-refused": Scene("generate --input-jsonl questions.jsonl", a_bad_request, modes=OUTPUT_MODES),
    "ask-template-refused": Scene("ask -t letter Hello --config config.toml", a_configuration, modes=OUTPUT_MODES),
    "ask": Scene("ask --prompt-file book.txt", fake_engine()),
    "ask-first": Scene("ask 'Who is it?'", a_first_use, modes="terminal"),
    "ask-extract": Scene(
        "ask 'How?' -x", fake_engine(pieces=["Run:\n```sh\n", "ls -l\n", "```\n"]), modes=OUTPUT_MODES
    ),
    "ask-extract-none": Scene(
        "ask 'How?' -x", fake_engine(pieces=["I do ", "not know."], finish="stop"), modes="piped"
    ),
    "chat": Scene("chat --file book.txt", fake_engine(plans=False), stdin=SCRIPTED, modes="piped"),
    "chat-typed": Scene("chat --no-history", fake_engine(plans=False), typed=TYPED, modes="terminal"),
    "verify": Scene(f"verify {ASKED}", a_verification(holds=True)),
    "score": Scene("score book.txt notes.txt --worst 2", a_scoring),
    "score-against": Scene("score book.txt --worst 1 --against demo-draft", a_scoring, modes=OUTPUT_MODES),
    "tokens": Scene("tokens papers", some_documents),
    "text": Scene("text papers --places", some_documents, modes="terminal piped"),
    "bench": Scene("bench --prompt-file book.txt --contexts 512,1024 --repeats 3", a_comparison),
    "plan": Scene("plan"),
    "plan-two-gpus": Scene(f"plan {PAIR} --context 120000 --gpus 2", some_configs),
    "plan-what-if": Scene(
        f"plan {PAIR} --gpus 1 --gpu-memory 48 --link-gbps 50 --context 60000", some_configs, modes="terminal"
    ),
    "plan-fit": Scene(f"plan {PAIR} --fit --gpus 1", some_configs, modes="terminal json"),
    "start": Scene("start", a_disk, typed=[("leaves:", "q")]),
    "start-gpu": Scene("start --device cuda", a_disk, typed=[("leaves:", "q")], columns=60, modes="terminal"),
    "doctor": Scene("doctor", a_diagnosis("LAPTOP"), modes="terminal"),
    "doctor-two-gpus": Scene("doctor", a_diagnosis("TWO_ON_X8")),
    "pull": Scene("pull owner/model", a_hub),
    "pull-gguf": Scene("pull owner/demo-GGUF", a_repository, typed=[("leaves:", "q")]),
    "pull-label": Scene("pull owner/demo-GGUF:Q4_K_M", a_repository, modes=OUTPUT_MODES),
    "models-show": Scene("models show demo-Q4_K_M.gguf", gguf_files),
    "convert": Scene("convert old-llama", pickled_weights, modes=OUTPUT_MODES),
    "models": Scene("models --config config.toml", some_models),
    "models-rm": Scene("models rm some/config long --config config.toml --yes", some_models, modes=OUTPUT_MODES),
    "models-rm-asked": Scene("models rm some/mamba some/config", some_models, typed=[("?", "y")], modes="terminal"),
    "sessions-ls": Scene("sessions ls", some_sessions),
    "sessions-info": Scene("sessions info book-club", some_sessions),
    "sessions-rm": Scene("sessions rm notes --yes", some_sessions, modes=OUTPUT_MODES),
    "sessions-rm-asked": Scene("sessions rm notes book-club", some_sessions, typed=[("?", "y")], modes="terminal"),
    "sessions-prune": Scene("sessions prune --older-than 2 --dry-run", some_sessions, modes=OUTPUT_MODES),
    "serve-elsewhere": Scene("serve --host 192.0.2.1"),
    "launch": Scene("launch", no_agents, modes="piped"),
    **{
        f"launch-{name}": Scene(
            f"launch {name} --dry-run --port 1 --api-key secret --model m --context 65536 --batch 2 -- -p 'Which?'",
            no_agents,
            modes="piped",
        )
        for name in ("claude", "codex", "opencode", "pi", "aider", "qwen")
    },
    "launch-missing": Scene("launch pi --port 1", no_agents, modes=OUTPUT_MODES),
    "store-show": Scene("store show", a_store),
    "store-clear": Scene("store clear --yes", a_store, modes=OUTPUT_MODES),
    "store-clear-asked": Scene("store clear llama-2-7b", a_store, typed=[("?", "y")], modes="terminal"),
    "log-ls": Scene("log ls", a_log),
    "log-ls-searched": Scene("log ls --search lease -n 1", a_log, columns=60, modes="terminal"),
    "log-show": Scene("log show", a_log),
    "log-rm": Scene("log rm 1 3 --yes", a_log, modes=OUTPUT_MODES),
    "log-rm-asked": Scene("log rm --all", a_log, typed=[("?", "n")], modes="terminal"),
    "config-show": Scene("config show generate --config config.toml", a_configuration),
    "config-show-ask": Scene("config show ask --config config.toml", a_configuration, modes="terminal json"),
    "config-path": Scene("config path --config config.toml", modes=OUTPUT_MODES),
    "config-edit": Scene("config edit --config config.toml", an_editor, modes=OUTPUT_MODES),
    "version": Scene("version"),
    "version-alone": Scene("--version", modes=OUTPUT_MODES),
    "error-1-runtime": Scene(f"generate {ASKED}", fake_engine(fail="TriforceError"), modes=OUTPUT_MODES),
    "error-1-unexpected": Scene(f"generate {ASKED}", fake_engine(load_fail="RuntimeError")),
    "error-2-value": Scene("plan --gpus 3"),
    "error-2-option": Scene("generate --max-token 3"),
    "error-2-command": Scene("generat"),
    "error-2-document": Scene("tokens papers scan.pdf", some_documents),
    "error-3": Scene(
        f"plan {PAIR} --gpus 1 --host-memory 10 --context 120000 --gamma 7 --draft-gamma 2",
        some_configs,
        modes="terminal",
    ),
    "error-4-model": Scene("verify --model yarn-llama-2-13b-128k --prompt x"),
    "error-4-session": Scene("sessions info torn", some_sessions),
    "error-5": Scene(f"verify {ASKED}", a_verification(holds=False), modes=OUTPUT_MODES),
    "error-6": Scene(f"generate {ASKED} --regex '[a-z ]+'", fake_engine()),
    "error-124": Scene(f"generate {ASKED} --timeout 5", fake_engine(pieces=["again "] * 50), modes=OUTPUT_MODES),
}


def help_scenes(commands: Sequence[Sequence[str]]) -> dict[str, Scene]:
    return {"-".join(("help", *words)): Scene(" ".join([*words, "--help"]), modes=OUTPUT_MODES) for words in commands}
