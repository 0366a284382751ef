"""`triforce generate`: continue a long prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import UsageError
from triforce_cli import __version__, options
from triforce_cli.answer import Answer
from triforce_cli.options import Models
from triforce_cli.output import Output
from triforce_cli.prompt import decode_argument, read_prompt

if TYPE_CHECKING:
    from offload.decode.sampling import SamplingParams
    from offload.engine import Engine
    from offload.plan.planner import Options, Plan
    from offload.session.store import Store


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """`SamplingParams`, before the import of torch."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None

    def params(self) -> SamplingParams:
        from offload.decode.sampling import SamplingParams

        return SamplingParams(**vars(self))


@dataclass(frozen=True, kw_only=True)
class Generate:
    """One `triforce generate`, parsed."""

    prompt_file: Path | None
    prompt: str | None
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    options: Options
    models: Models
    session: Path | None
    read_only: bool
    show_stats: bool
    as_json: bool
    quiet: bool

    def run(self) -> None:
        """Read the prompt, plan, load, generate. Text appears as it is accepted."""
        output = Output(quiet=self.quiet)
        with self._answer(output) as answer, output:
            prompt = read_prompt(self.prompt_file, self.prompt, note=output.note)
            if self.models.embedded:
                output.note(f"no --model given: using the embedded demo model ({self.models.target})")
            output.wait("starting")
            self._generate(prompt, answer, output)

    def _generate(self, prompt: str, answer: Answer, output: Output) -> None:
        sampling = self.sampling.params()
        from offload.engine import Engine, load_tokenizer, plan_request

        target, draft = self.models.target, self.models.draft
        tokenizer = load_tokenizer(target, draft)
        tokens = tokenizer.encode(prompt)
        plan = plan_request(target, draft, self.options, num_prompt_tokens=len(tokens), max_tokens=self.max_tokens)
        for line in plan.notes:
            output.note(line)
        with ExitStack() as stack:
            store = self._open_session(plan, stack)
            engine = stack.enter_context(Engine.load(plan, target, draft, tokenizer, on_progress=output.progress))
            answer.begin(plan, engine)
            if store is not None:
                stack.enter_context(self._kept(store, engine, tokens, output))
            for step in engine.generate(
                tokens,
                sampling,
                max_tokens=plan.max_tokens,
                stop=self.stops,
                reuse=store is not None,
                on_progress=output.progress,
            ):
                answer.add(step)

    def _open_session(self, plan: Plan, stack: ExitStack) -> Store | None:
        if self.session is None:
            return None
        from offload.plan.config import ModelConfig
        from offload.session.fingerprints import identify
        from offload.session.store import Store

        target = self.models.target
        identity = identify(
            target,
            ModelConfig.from_folder(target),
            dtype=plan.dtype,
            capacity=plan.capacity,
            page_tokens=plan.page_tokens,
        )
        store = Store.open(self.session, identity, read_only=self.read_only, writer=__version__)
        stack.enter_context(store)
        if store.tokens and not self.read_only and store.extra.get("kind") != "text":
            raise UsageError(f"{self.session} is kept by a chat; name another session, or add --read-only")
        return store

    @contextmanager
    def _kept(self, store: Store, engine: Engine, tokens: Sequence[int], output: Output) -> Iterator[None]:
        """Begin with what the session holds of the prompt; at the end, an interrupted one too, keep what is held, where
        that is more."""
        common = engine.restore(store, tokens, on_progress=output.progress)
        replaced = len(store.tokens) - common
        try:
            yield
        finally:
            output.end_shown_line()
            if not self.read_only and engine.num_held > common:
                engine.save(store, {"kind": "text"}, on_progress=output.progress)
                if replaced > common:
                    output.note(
                        f"session: {replaced:,} tokens of what was kept did not begin this prompt and are replaced"
                    )
            output.note(f"session: {common:,} of {len(tokens):,} prompt tokens were there")

    def _answer(self, output: Output) -> Answer:
        target, draft = self.models.target, self.models.draft
        model = {"target": str(target), "draft": None if draft is None else str(draft)}
        return Answer(output, model=model, as_json=self.as_json, show_stats=self.show_stats)


def generate(
    *,
    model: options.Model = None,
    draft: options.Draft = None,
    prompt_file: options.PromptFile = None,
    prompt: options.Prompt = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.6,
    top_p: options.TopP = 0.9,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    context: options.Context = None,
    budget: options.Budget = None,
    chunk: options.Chunk = None,
    gamma: options.Gamma = None,
    draft_gamma: options.DraftGamma = None,
    no_lookup: options.NoLookup = False,
    pace: options.Pace = "auto",
    sinks: options.Sinks = 16,
    window: options.Window = 240,
    no_speculation: options.NoSpeculation = False,
    selection: options.Selection = "mass",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    offload: options.Offload = "auto",
    device_memory: options.DeviceMemory = None,
    link_gbps: options.LinkGbps = None,
    session: options.Session = None,
    cache: options.CacheFile = None,
    read_only: options.ReadOnly = False,
    stats: options.ShowStats = False,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> Generate:
    """Continue a long prompt: exactly what the target model would write, in fewer passes over its cache.

    Only generated text goes to standard output, as soon as it is accepted; at a terminal a newline ends it.

    Example: triforce generate --prompt-file book.txt --max-tokens 200 --stats
    """
    from offload.plan.planner import Options

    stops = [decode_argument("--stop", text) for text in stop or ()]
    options.check_stops(stops)
    options.check_max_tokens(max_tokens)
    return Generate(
        prompt_file=prompt_file,
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed),
        stops=tuple(stops),
        options=Options(
            context=context,
            budget=budget,
            chunk=chunk,
            gamma=gamma,
            draft_gamma=draft_gamma,
            lookup=not no_lookup,
            pace=pace,
            sinks=sinks,
            window=window,
            device=device,
            dtype=dtype,
            offload=options.offloaded(offload),
            device_memory=device_memory,
            link_gbps=link_gbps,
            speculation=not no_speculation,
            selection=selection,
        ),
        models=options.choose_models(model, draft),
        session=options.session_path(session, cache, read_only=read_only),
        read_only=read_only,
        show_stats=stats,
        as_json=json,
        quiet=quiet,
    )
