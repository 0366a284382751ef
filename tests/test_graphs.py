"""Passes that run as CUDA graphs, on paper: the logits of the same passes launched one by one, and when a graph is
recorded anew; draws as part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.models import GREEDY, random_tokens, save_pair
from offload.bench import text_checks
from offload.bench.launches import launches
from offload.decode.gpu_draws import Beforehand, Draw, Judge
from offload.decode.random_source import SeededSource
from offload.decode.sampling import SamplingParams
from offload.decode.speculation import ModelProposer
from offload.decode.warp import Warping
from offload.engine.engine import Engine
from offload.errors import TriforceError, UsageError
from offload.kv.retrieval import RetrievalCache
from offload.model.graphs import MOST_GRAPHS, VARIABLE, Compute, GraphPool, Graphs, Tensors
from offload.model.passes import Pass, forward
from offload.speed.hardware import RTX_4090, Hardware
from paper import PaperGpu, on_paper
from paper.engines import CASES, DRAFTED, OTHER, PROMPT, Case, Pair, engine_on_paper, loaded, said
from paper.graphs import Graph
from test_paper_bugs import Bug, plant

STREAMED = CASES["draft, kv streamed"]
# Prefills and the target's rows over its tiles have no graphs: few of both.
CASE = replace(STREAMED, sizes=replace(STREAMED.sizes, prefill_block=64, pages=8), resident_tiles=0)
# Here the target's rows have, too: see also graphs_interpreted.py.
WHOLE = Case(replace(DRAFTED, prefill_block=64, pages=64, chunk=8))
Request = tuple[tuple[int, ...], SamplingParams]
Said = tuple[list[int], list[tuple[int, int]]]  # tokens, and how many each level drafted and accepted
GPU = Hardware("cuda:0", "a GPU on paper", 2**34, 2**34, True, RTX_4090)
TOKENS = random_tokens(400, seed=7)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"), context=256)


def texts(engine: Engine, gpu: PaperGpu, *requests: Request) -> tuple[list[Said], list[int]]:
    """The answer to each request in turn, and how often a graph was replayed for it."""
    found, replayed = [], []
    for prompt, sampling in requests:
        replays = gpu.launches["graph"]
        text = said(engine, prompt, sampling, num_new=6, reuse=True)
        found.append((text, [(level.drafted, level.accepted) for level in engine.stats.levels]))
        replayed.append(gpu.launches["graph"] - replays)
    return found, replayed


@cache
def one_by_one_said(pair: Pair, prompt: tuple[int, ...], sampling: SamplingParams) -> Said:
    """The answer of passes and draws without graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "off")
        with engine_on_paper(CASE, pair) as (engine, gpu):
            [text], replayed = texts(engine, gpu, (prompt, sampling))
    assert replayed == [0]
    assert gpu.problems == []
    return text


def draft_passes(engine: Engine) -> list[Tensor]:
    """One row and more, rows taken back, and more tokens than the window's buffer has room for."""
    level = engine.levels["draft"]
    logits = [forward(level, PROMPT, 1)]
    for number, count in enumerate([1, 1, 1, 2, 3, 4, 2, 1, 3] * 5):
        logits.append(forward(level, TOKENS[number : number + count], count))
        if number % 4 == 3:
            level.truncate(level.length - 1)
    return logits


def retrieval_passes(engine: Engine) -> list[Tensor]:
    """Between refreshes, and in a tail that outgrows its room."""
    level, target, logits = engine.levels["retrieval"], engine.levels["target"], []
    for count in (3, 20):
        forward(target, TOKENS[:count], 1)
        engine.worker.refresh(count)
        for number in range(3):
            logits += [forward(level, TOKENS[number : number + rows], rows) for rows in (1, 1, 2, 3)]
        level.truncate(target.length)
    return logits


def target_passes(engine: Engine, *, times: int = 3) -> list[Tensor]:
    """With masses: over more and more pages, of more and fewer rows, and again over fewer pages."""
    level, full, logits = engine.levels["target"], engine.worker.full, []
    for start in (len(PROMPT), len(PROMPT) - 9, len(PROMPT) + 3)[:times]:
        level.truncate(start)
        for number, count in enumerate([1, 1, 1, 3, 7, 2, 1, 20, 1]):
            logits += [forward(level, TOKENS[number : number + count], min(count, 2)), full.mass(count)]
    return logits


def test_a_pass_that_is_no_graph_yet_is_a_first_one(pair: Pair) -> None:
    """The first of a kind compiles kernels, the second is recorded: their seconds tell nothing of the next one's."""
    with engine_on_paper(CASE, pair) as (engine, _):
        asked = [Pass(engine.levels["draft"], [token], 1) for token in (*TOKENS[:4], *TOKENS[:4])]
        for each in asked:
            each.run()
    assert [each.is_first for each in asked[-3:]] == [False] * 3
    assert asked[0].is_first


def one_by_one(graphs: Graphs, key: object, given: Sequence[Tensor], compute: Compute, **_: object) -> list[Tensors]:
    """In place of `Graphs.run`: with the same padding, since a CPU's sums may depend on the number of rows."""
    return compute(*given)


@pytest.mark.few(2)
@pytest.mark.parametrize(("case", "passes"), [(WHOLE, target_passes), (CASE, retrieval_passes), (CASE, draft_passes)])
def test_logits_are_those_of_passes_launched_one_by_one(
    case: Case, passes: Callable[[Engine], list[Tensor]], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.kv.retrieval.TAIL_TOKENS", 16)  # less than the tail will have
    found, replays = [], []
    for run in (Graphs.run, one_by_one):
        monkeypatch.setattr(Graphs, "run", run)
        with engine_on_paper(case, pair) as (engine, gpu):
            engine.precompute(PROMPT)
            gpu.launches.clear()
            found.append([logits.cpu() for logits in passes(engine)])
            replays.append(gpu.launches["graph"])
        assert gpu.problems == []
    assert replays[0] > (len(found[0]) // 2 if case is CASE else 7)
    assert replays[1] == 0
    assert all(ours.equal(theirs) for ours, theirs in zip(*found, strict=True))


def after_prefills(engine: Engine, *seeds: int) -> list[Tensor]:
    """Passes of the retrieval level over one prompt after the other. A prefill has the buffer's bytes."""
    logits, level = [], engine.levels["retrieval"]
    for seed in seeds:
        engine.precompute(random_tokens(len(PROMPT), seed=seed))
        logits += [forward(level, [token], 1).cpu() for token in TOKENS[:4]]
    return logits


def nothing(cache: RetrievalCache, patch: pytest.MonkeyPatch) -> None: ...


def other_chunks(cache: RetrievalCache, patch: pytest.MonkeyPatch) -> None:
    """Twice as long, and so half as many."""
    cache.start_over(cache.selector, budget=cache.budget, chunk=2 * cache.chunk)


def another_size(cache: RetrievalCache, patch: pytest.MonkeyPatch) -> None:
    """At the same address."""
    cache.start_over(cache.selector, budget=cache.budget - cache.chunk, chunk=cache.chunk)


def another_place(cache: RetrievalCache, patch: pytest.MonkeyPatch) -> None:
    """The arena has no bytes left."""
    patch.setattr(cache.full.arena, "_block", cache.full.arena._block[:0])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "is_kept"), [(nothing, True), (other_chunks, True), (another_size, False), (another_place, False)]
)
def test_a_graph_is_kept_while_the_retrieval_caches_buffer_is_had_at_the_same_place(
    change: Callable[[RetrievalCache, pytest.MonkeyPatch], None],
    is_kept: bool,
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bug recorded graphs anew after every prefill."""
    found, given_up, give_up = [], [], RetrievalCache._give_up
    monkeypatch.setattr(RetrievalCache, "_give_up", lambda cache: (given_up.append(cache), give_up(cache)))
    for run in (Graphs.run, one_by_one):
        monkeypatch.setattr(Graphs, "run", run)
        with engine_on_paper(CASE, pair) as (engine, gpu), pytest.MonkeyPatch.context() as patch:
            cache = engine.worker.retrieval
            assert cache is not None
            logits = after_prefills(engine, 1, 2)
            recorded = gpu.num_graphs
            change(cache, patch)
            found.append([*logits, *after_prefills(engine, 3, 4)])
        assert gpu.problems == []
        if run is not one_by_one:
            assert recorded == 1
            assert (gpu.num_graphs == recorded) == is_kept
            assert len(given_up) >= 3
    assert all(ours.equal(theirs) for ours, theirs in zip(*found, strict=True))


def test_later_requests_replay_the_graphs_of_the_first(pair: Pair) -> None:
    """All that were ever recorded are there at the end: none was recorded twice."""
    requests = [(tuple(prompt), GREEDY) for prompt in (OTHER, PROMPT)]
    with engine_on_paper(CASE, pair) as (engine, gpu):
        found, replayed = texts(engine, gpu, *requests)
        kept = [graphs for level in engine.levels.values() if (graphs := level._graphs) is not None]
        assert gpu.num_graphs == sum(not isinstance(found, int) for graphs in kept for found in graphs._kinds.values())
    assert gpu.problems == []
    assert found == [one_by_one_said(pair, *request) for request in requests]
    assert min(replayed) >= 5


def test_a_replay_is_a_few_launches(pair: Pair) -> None:
    with engine_on_paper(CASE, pair) as (engine, gpu):
        said(engine)
        for level, most in (("draft", 8), ("retrieval", 8)):
            for _ in range(3):
                gpu.launches.clear()
                forward(engine.levels[level], [1], 1)
            assert gpu.launches["graph"] == 1
            assert gpu.launches.total() <= most


@pytest.mark.few(1)
@pytest.mark.parametrize("wrong", [True, False])
def test_the_doctor_compares_them(wrong: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_checks, "PROMPT", PROMPT)
    monkeypatch.setattr(text_checks, "NUM_TOKENS", 6)
    if wrong:
        monkeypatch.setattr(Graph, "replay", lambda graph: None)
    with on_paper():
        monkeypatch.setattr(text_checks, "_engine", lambda *_: loaded(CASE, pair))
        checks = text_checks.text_checks(GPU, *pair)
        [graphs] = [run for name, run, _ in checks if name == "graphs"]
        passed, shown = graphs()
    assert passed != wrong
    assert ("the same bits" in shown) != wrong


@pytest.fixture
def gpu_on_paper() -> Iterator[PaperGpu]:
    with on_paper() as gpu:
        yield gpu


def test_a_gpu_that_records_nothing_is_an_error_with_a_remedy(
    gpu_on_paper: PaperGpu, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fails(*_: object, **__: object) -> object:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    graphs, tokens = Graphs(GraphPool()), torch.zeros(2, device="cuda:0")
    assert graphs.run(0, [tokens], one_more)[0][0].tolist() == [1, 1]
    with pytest.raises(
        TriforceError, match=r"\(operation not permitted when stream is capturing\); TRIFORCE_GRAPHS=off"
    ):
        graphs.run(0, [tokens], one_more)


def one_more(rows: Tensor) -> list[Tensors]:
    return [(rows + 1,)]


@torch.inference_mode()
def test_another_key_is_another_graph(gpu_on_paper: PaperGpu) -> None:
    """Such as that of caches whose memory lies elsewhere. That of before is kept."""
    graphs, tokens = Graphs(GraphPool()), torch.zeros(2, device="cuda:0")
    added = [torch.full((2,), float(number + 1), device="cuda:0") for number in range(2)]
    for key in (0, 1, 0):
        for _ in range(3):
            [[made]] = graphs.run(key, [tokens], lambda rows, more=added[key]: [(rows + more,)])
            assert made.tolist() == [key + 1.0] * 2
    assert gpu_on_paper.num_graphs == 2
    assert gpu_on_paper.launches["graph"] == 2 + 2 + 3
    assert gpu_on_paper.problems == []


@torch.inference_mode()
def test_the_graph_whose_last_use_is_longest_ago_makes_room(gpu_on_paper: PaperGpu) -> None:
    graphs, tokens = Graphs(GraphPool()), torch.zeros(2, device="cuda:0")
    for key in (*range(MOST_GRAPHS), 0, MOST_GRAPHS):
        for _ in range(2):
            graphs.run(key, [tokens], one_more)
    recorded = gpu_on_paper.num_graphs
    assert len(graphs._kinds) == MOST_GRAPHS
    replayed = gpu_on_paper.launches["graph"]
    for key in (0, 2, MOST_GRAPHS):
        graphs.run(key, [tokens], one_more)
    assert gpu_on_paper.num_graphs == recorded
    assert gpu_on_paper.launches["graph"] == replayed + 3
    for _ in range(2):
        graphs.run(1, [tokens], one_more)
    assert gpu_on_paper.num_graphs == recorded + 1
    assert gpu_on_paper.problems == []


@torch.inference_mode()
def test_outputs_of_graphs_have_a_bound(gpu_on_paper: PaperGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.model.graphs.MOST_BYTES", 3 * 8)
    graphs, tokens = Graphs(GraphPool()), torch.zeros(2, device="cuda:0")
    for key in range(5):
        for _ in range(2):
            graphs.run(key, [tokens], one_more)
    assert list(graphs._kinds) == [(key, ((2,),)) for key in (2, 3, 4)]
    assert gpu_on_paper.problems == []


@torch.inference_mode()
def test_without_memory_for_a_graph_kernels_are_launched_one_by_one(
    gpu_on_paper: PaperGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, tokens = Graphs(GraphPool()), torch.zeros(2, device="cuda:0")
    for key in (0, 0, 1):
        graphs.run(key, [tokens], one_more)

    def fails(*_: object, **__: object) -> object:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "graph", fails)
        assert graphs.run(1, [tokens], one_more) is None
    assert not graphs.has_room
    assert not graphs._kinds  # what the other ones held is free
    assert gpu_on_paper.launches["graph"] == 1
    assert gpu_on_paper.problems == []


def test_a_pass_without_memory_for_its_graph_begins_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are in the caches by then."""
    found, recorded = [], Graphs._record
    for fails in (False, True):

        def record(graphs: Graphs, *args: Any, fails: bool = fails) -> object:
            made = recorded(graphs, *args)
            graphs.has_room = not fails
            return None if fails else made

        monkeypatch.setattr(Graphs, "_record", record)
        with engine_on_paper(WHOLE, pair) as (engine, gpu):
            found.append([said(engine), [logits.cpu() for logits in target_passes(engine, times=1)]])
        assert gpu.problems == []
    assert found[0][0] == found[1][0]
    assert all(ours.equal(theirs) for ours, theirs in zip(found[0][1], found[1][1], strict=True))


@torch.inference_mode()
def test_a_kind_is_recorded_after_as_many_uses_as_patience_says(gpu_on_paper: PaperGpu) -> None:
    graphs, tokens = Graphs(GraphPool()), torch.zeros(2, device="cuda:0")
    for number in range(6):
        assert graphs.run(0, [tokens], one_more, patience=3)[0][0].tolist() == [1, 1]
        assert gpu_on_paper.launches["graph"] == max(number - 2, 0)
        assert graphs.first_passes == min(number + 1, 4)
    assert gpu_on_paper.problems == []


def test_biases_of_a_graph_live_as_long_as_it(pair: Pair) -> None:
    """Later requests have equal parameters, and biases in memory of their own."""
    sampling = SamplingParams(temperature=0.0, logit_bias=((97, 3.0), (98, -float("inf"))))
    with engine_on_paper(WHOLE, pair) as (engine, gpu):
        found = [said(engine, PROMPT, sampling) for _ in range(4)]
        assert gpu.launches["graph"] > 10
    assert gpu.problems == []
    assert found == [found[0]] * 4


@torch.inference_mode()
def test_graphs_are_recorded_again_after_all_were_dropped(gpu_on_paper: PaperGpu) -> None:
    """torch's allocator fails where a pool is used whose graphs are all gone; two levels share one."""
    pool = GraphPool()
    graphs, others, tokens = Graphs(pool), Graphs(pool), torch.zeros(2, device="cuda:0")
    for dropped in ([graphs], [graphs, others], [others]):
        for each in (graphs, others):
            for _ in range(3):
                assert each.run(0, [tokens], one_more)[0][0].tolist() == [1, 1]
        for each in dropped:
            each.forget()
    assert gpu_on_paper.num_graphs == 2 + 1 + 2
    assert gpu_on_paper.problems == []


@torch.inference_mode()
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_after_a_first_pass_that_was_broken_off_the_next_one_is_launched_one_by_one(
    error: type[BaseException], gpu_on_paper: PaperGpu
) -> None:
    """It was recorded, though kernels were still to be compiled."""
    graphs, tokens = Graphs(GraphPool()), torch.zeros(2, device="cuda:0")

    def broken_off(rows: Tensor) -> list[Tensors]:
        raise error

    with pytest.raises(error):
        graphs.run(0, [tokens], broken_off)
    for replays in (0, 1):
        assert graphs.run(0, [tokens], one_more)[0][0].tolist() == [1, 1]
        assert gpu_on_paper.launches["graph"] == replays
    assert gpu_on_paper.problems == []


@torch.inference_mode()
def test_what_is_given_in_another_shape_is_another_graph(gpu_on_paper: PaperGpu) -> None:
    """Copied to where the graph reads, one row would be taken for all."""
    graphs, tokens = Graphs(GraphPool()), torch.zeros(2, device="cuda:0")
    for _ in range(3):
        for rows in (1, 2):
            given = torch.ones(rows, 2, device="cuda:0")
            [[made]] = graphs.run(0, [tokens, given], lambda tokens, given: [(tokens + given,)])
            assert made.tolist() == [[1.0, 1.0]] * rows
    assert gpu_on_paper.num_graphs == 2


def test_a_wrong_value_of_the_variable_is_an_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "no")
    with pytest.raises(UsageError, match="TRIFORCE_GRAPHS is 'no'; on and off are known"), engine_on_paper(CASE, pair):
        pass


SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=3)
BEGUN = PROMPT[:16]  # more than the draft's window


def drawn(engine: Engine, params: Sequence[SamplingParams], *, num_blocks: int = 8) -> list[tuple[list[int], Tensor]]:
    """Blocks of the draft's tokens with what they were drawn from, by each of these parameters in turn; some after
    tokens that others proposed."""
    level, blocks = engine.levels["draft"], []
    for number, sampling in enumerate(params):
        random = Beforehand(SeededSource(number), torch.device("cuda:0"))
        proposer = ModelProposer(level, Warping(replace(sampling, seed=None)), random)
        for block in range(num_blocks):
            level.truncate(0)
            forward(level, BEGUN, 1)
            proposal = proposer.propose([*BEGUN, *TOKENS[: 1 + block % 4]], 4)
            blocks.append((proposal.tokens, proposal.probs.cpu()))
    return blocks


@pytest.mark.deep
def test_draws_in_a_graph_are_those_of_passes_launched_one_by_one(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever parameters the request before had."""
    params = [SAMPLED, SamplingParams(temperature=0.0), SAMPLED, replace(SAMPLED, top_k=3), replace(SAMPLED, seed=9)]
    found, replays = [], []
    for value in ("on", "off"):
        monkeypatch.setenv(VARIABLE, value)
        with engine_on_paper(CASE, pair) as (engine, gpu):
            engine.precompute(PROMPT)
            gpu.launches.clear()
            found.append(drawn(engine, params))
            replays.append(gpu.launches["graph"])
        assert gpu.problems == []
    assert replays[0] > 3 * 8 * len(params)
    assert replays[1] == 0
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]]
    assert all(ours.equal(theirs) for (_, ours), (_, theirs) in zip(*found, strict=True))
    assert len({tuple(tokens) for tokens, _ in found[0]}) > len(params)


def test_parameters_but_for_the_seed_tell_graphs_apart() -> None:
    for step in (Draw, Judge):
        one, same, *others = (step(Warping(SamplingParams(**params))) for params in (
            {}, {}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}
        ))  # fmt: skip
        assert one == same
        assert hash(one) == hash(same)
        assert one not in others


def test_a_request_with_another_seed_uses_the_graphs_of_the_one_before(pair: Pair) -> None:
    with engine_on_paper(CASE, pair) as (engine, _):
        one, other, colder = (
            engine._make_speculator(params, engine.distribution(params, 1, ()), speculation=True)._warp
            for params in (SAMPLED, replace(SAMPLED, seed=4), replace(SAMPLED, temperature=0.1))
        )
    assert one == other != colder


def test_texts_are_those_of_passes_and_draws_launched_one_by_one(pair: Pair, pytestconfig: pytest.Config) -> None:
    """Whichever parameters the request before had."""
    params, times = [replace(SAMPLED, seed=6), GREEDY], 1  # of which many draws are of graphs
    if pytestconfig.getoption("deep"):
        params, times = [SAMPLED, replace(SAMPLED, seed=6), replace(SAMPLED, temperature=2.0), GREEDY], 3
    requests = [(tuple(OTHER), sampling) for sampling in params for _ in range(times)]
    with engine_on_paper(CASE, pair) as (engine, gpu):
        found, replayed = texts(engine, gpu, *requests)
    assert gpu.problems == []
    assert found == [one_by_one_said(pair, *request) for request in requests]
    assert len({tuple(text) for text, _ in found}) == len(params)
    assert sorted(replayed)[len(replayed) // 2] > 3  # where no draft pays on this machine, nothing is replayed


@cache
def drawn_one_by_one(pair: Pair, num_blocks: int) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "off")
        return drawn_tokens(pair, num_blocks)


def drawn_tokens(pair: Pair, num_blocks: int) -> list[list[int]]:
    with engine_on_paper(CASE, pair) as (engine, _):
        engine.precompute(PROMPT)
        blocks = drawn(engine, [SAMPLED, replace(SAMPLED, temperature=2.0)], num_blocks=num_blocks)
    return [tokens for tokens, _ in blocks]


@pytest.mark.parametrize(
    "bug",
    [
        Bug(
            "requests share graphs whatever their parameters",
            "offload.model.level",
            "*(each.compute for each in passes), *sizes",
            "*sizes",
        ),
        pytest.param(
            Bug(
                "a graph gives the logits of the rows that it was recorded with",
                "offload.model.level",
                "hidden.index_select(0, *rows) if rows else hidden",
                "hidden[len(first.tokens) - first.num_logits : len(first.tokens)]",
            ),
            marks=pytest.mark.deep,
        ),
        Bug(
            "a graph draws by the uniforms of its first token",
            "offload.model.graphs",
            "ours.copy_(theirs)",
            "ours.copy_(theirs) if theirs.dtype == torch.long else None",
        ),
    ],
    ids=lambda bug: bug.description,
)
def test_a_planted_bug_changes_what_is_drawn(
    bug: Bug, pair: Pair, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    num_blocks = 8 if pytestconfig.getoption("deep") else 2
    expected = drawn_one_by_one(pair, num_blocks)
    plant(bug, monkeypatch)
    assert drawn_tokens(pair, num_blocks) != expected


def test_kernels_of_a_pass_are_counted_for_each_level(pair: Pair) -> None:
    """As the GPU counts them; caches are as before, and graphs are recorded again."""
    with engine_on_paper(WHOLE, pair) as (engine, gpu):
        said(engine)
        lengths = {name: level.length for name, level in engine.levels.items()}
        counted = launches(engine)
        assert lengths == {name: level.length for name, level in engine.levels.items()}
        for name, level in engine.levels.items():
            level.forget_graphs()
            gpu.launches.clear()
            forward(level, [0], 1)
            level.truncate(lengths[name])
            unseen = gpu.launches["_to_copy"]  # on paper some are made behind torch's back
            assert 10 < gpu.launches.total() - unseen <= counted[name] <= gpu.launches.total()
            assert "graph" not in gpu.launches
        assert list(counted) == list(engine.levels)
    assert gpu.problems == []
    with loaded(WHOLE, pair, "cpu") as engine:
        assert launches(engine) == {}
