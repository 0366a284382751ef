"""The whole engine on a GPU on paper: nothing races, nothing is mixed up, and the tokens are plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import test_cuda
from kit.asked import Asked, together
from kit.models import GREEDY, save_pair
from offload.decode.sampling import SamplingParams
from offload.engine.request import GenerationRequest
from offload.grammar.constraint import Constraint
from offload.model.torch_layers import TorchLayers
from offload.plan import bits, choice
from offload.progress import ignore
from offload.session.identity import Identity
from offload.session.store import Store
from offload.speed import hardware
from paper import on_paper
from paper.engines import BUSIEST, CASES, NUM_NEW, OTHER, PROMPT, Case, Pair, engine_on_paper, loaded, said
from paper.products import products_by_row
from triforce_cli.chat.background import BackgroundWork

EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"), context=256)


@cache
def plainly(case: Case, pair: Pair) -> list[list[int]]:
    with engine_on_paper(case, pair) as (engine, gpu):
        expected = [said(engine, prompt) for prompt in (PROMPT, OTHER)]
    assert gpu.problems == []
    return expected


@pytest.mark.few(1)
@EVERY
def test_tokens_are_those_of_plain_decoding_and_every_access_is_ordered(case: Case, pair: Pair) -> None:
    """Three requests: a prompt, another that begins like it, and the first again with the rows of the second."""
    expected = plainly(case.plain(), pair)
    with engine_on_paper(case, pair) as (engine, gpu):
        got = [said(engine, PROMPT), said(engine, OTHER)]
        again = said(engine, PROMPT, reuse=True)
        moved = engine.stats.decode_link.bytes_to_device
    assert got == expected
    assert again == expected[0]
    assert bool(moved) == bool(case.offload)
    assert gpu.problems == []


@pytest.mark.few(1)
@EVERY
def test_several_sequences_say_what_each_says_alone_and_every_access_is_ordered(case: Case, pair: Pair) -> None:
    """Three of four requests at a time, one of which leaves before its end."""
    expected = plainly(case.plain(), pair)
    requests = [Asked(prompt, GREEDY, NUM_NEW) for prompt in (PROMPT, OTHER, PROMPT, OTHER)]
    requests[1] = replace(requests[1], leaves=1)
    with engine_on_paper(replace(case, num_sequences=3), pair) as (engine, gpu):
        found, _ = together(engine, requests)
    first, left, again, last = found
    assert [first, again, last] == [expected[0], expected[0], expected[1]]
    assert left == expected[1][: len(left)]
    assert 0 < len(left) <= NUM_NEW
    assert gpu.problems == []


def test_a_gpu_says_what_the_processor_says(pair: Pair) -> None:
    """fp32: other kernels, and so other sums, but no tokens that are nearly tied."""
    with loaded(BUSIEST.plain(), pair, device="cpu") as engine:
        assert [said(engine, prompt) for prompt in (PROMPT, OTHER)] == plainly(BUSIEST.plain(), pair)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["draft, both streamed", "plain, kv streamed"])
def test_rows_are_not_copied_over_tiles_that_still_cross_the_link(name: str, pair: Pair) -> None:
    """A text ends with the first tiles of the next pass on their way; then another engine's prefill takes their
    place."""
    expected = plainly(CASES[name].plain(), pair)
    with on_paper() as gpu, loaded(CASES[name], pair) as first, loaded(CASES[name], pair) as other:
        first.precompute(PROMPT)
        said(other, OTHER)
        other.worker.fetch_ahead()
        other.take_prompt(first)
        assert said(other, PROMPT) == expected[0]
        assert other.stats.reused_tokens > 0
    assert gpu.problems == []


def test_a_seed_repeats_its_text(pair: Pair) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5)
    with engine_on_paper(BUSIEST, pair) as (engine, gpu):
        assert said(engine, PROMPT, sampling) == said(engine, PROMPT, sampling)
    assert gpu.problems == []


@pytest.mark.deep
def test_a_request_that_is_broken_off_leaves_nothing_under_way(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a layer's attention, after so many of them: in the prefill, a draft, a retrieval, a verification. What
    runs as a graph has none."""
    expected, attend = plainly(BUSIEST.plain(), pair)[0], TorchLayers._attended
    with engine_on_paper(BUSIEST, pair) as (engine, gpu):
        calls: list[object] = []
        with monkeypatch.context() as patch:
            patch.setattr(TorchLayers, "_attended", lambda *args: (calls.append(args), attend(*args))[1])
            said(engine, OTHER)
            calls.clear()  # graphs are recorded now
            said(engine, OTHER)
        assert len(calls) > 9  # how many depends on how far drafts pay on this machine
        for after in range(0, len(calls), 3):
            with monkeypatch.context() as patch:
                left = iter(range(after))

                def interrupted(*args: Any, left: Iterator[int] = left) -> object:
                    if next(left, None) is None:
                        raise KeyboardInterrupt
                    return attend(*args)

                patch.setattr(TorchLayers, "_attended", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    said(engine, OTHER)
            assert said(engine) == expected
    assert gpu.problems == []


@pytest.mark.deep
def test_a_session_is_saved_and_restored(pair: Pair, tmp_path: Path) -> None:
    with engine_on_paper(BUSIEST, pair) as (engine, gpu):
        shape = engine.worker.full.shape
        identity = Identity("", "", "", "fp32", 2, shape.num_kv_heads, shape.head_dim, shape.page_tokens)
        longer = [*PROMPT, *said(engine), 1, 2, 3, 4, 5]
        engine.precompute(longer)
        with Store.open(tmp_path / "session", identity) as store:
            engine.save(store, {})
        following = said(engine, longer, reuse=True)
        said(engine, OTHER)
        with Store.open(tmp_path / "session", identity) as store:
            assert engine.restore(store, longer) == len(longer)
        assert said(engine, longer, reuse=True) == following
    assert gpu.problems == []


def test_chat_works_ahead_on_a_thread_of_its_own(pair: Pair) -> None:
    """The next message's beginning is computed there; a message that comes meanwhile waits for it."""
    background, [expected, _] = BackgroundWork(), plainly(BUSIEST.plain(), pair)
    with engine_on_paper(BUSIEST, pair) as (engine, gpu), closing(background):
        said(engine, OTHER)
        launched = gpu.launches.total()
        background.start(lambda on_progress: engine.precompute(PROMPT[:-3], on_progress=on_progress), "next")
        background.wait(ignore)
        assert gpu.launches.total() > launched
        assert engine.num_cached == len(PROMPT) - 3
        assert said(engine, PROMPT, reuse=True) == expected
        background.start(lambda on_progress: engine.precompute(OTHER, on_progress=on_progress), "another")
        background.break_off()
        assert said(engine) == expected
    assert gpu.problems == []


OF_ROWS = test_cuda.test_a_row_of_a_product_does_not_depend_on_its_place_among_the_rows  # tried further below
# A product's bits in Triton are those of a GPU, and this GPU computes on a CPU.
BITS = test_cuda.test_a_row_of_a_product_with_weights_in_few_bits_does_not_depend_on_the_rows_beside_it
# So are programs of what crosses the link in fewer bits: see packed_interpreted.py and quantised_interpreted.py.
FEWER_BITS = test_cuda.test_tokens_are_the_same_in_whatever_bits_weights_and_pages_cross_the_link
# See fixed_interpreted.py and chosen_interpreted.py.
PROGRAMS = (
    test_cuda.test_products_in_fixed_point_have_the_bits_of_their_definition,
    test_cuda.test_chosen_blocks_come_from_pinned_memory_to_the_slots_that_torch_gives_them,
)
APART = (OF_ROWS, BITS, FEWER_BITS, *PROGRAMS)
GPU_TESTS = {name: test for name, test in vars(test_cuda).items() if name.startswith("test_") and test not in APART}
QUICK = ("test_a_host_block", "test_a_block_can", "test_copies_arrive", "test_a_copy_home")  # without a model


CONTROLS = {
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, no_repeat_ngram=3),
    "a constraint": SamplingParams(temperature=0.0, constraint=Constraint("regex", "[a-d]{3} [0-9]+!")),
    "a bias": SamplingParams(temperature=0.0, logit_bias=((97, 3.0), (98, -float("inf"))), top_n_sigma=1.0),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("sampling", CONTROLS.values(), ids=CONTROLS)
def test_controlled_texts_are_those_of_plain_decoding(sampling: SamplingParams, pair: Pair) -> None:
    """Where the tokens before a place count, the host draws; a bias stays in the GPU's passes. Scores come along."""
    found = []
    for case in (BUSIEST, BUSIEST.plain()):
        with engine_on_paper(case, pair) as (engine, gpu):
            request = GenerationRequest(PROMPT, sampling, max_tokens=NUM_NEW, logprobs=2)
            steps = list(engine.generate(request))
        assert gpu.problems == []
        tokens = [token for step in steps for token in step.tokens]
        scores = [score for step in steps for score in step.scores]
        assert [score.token for score in scores] == tokens
        found.append((tokens, [round(score.logprob, 3) for score in scores]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "test",
    [
        pytest.param(test, marks=[] if name.startswith(QUICK) else [pytest.mark.deep])
        for name, test in GPU_TESTS.items()
    ],
    ids=GPU_TESTS,
)
def test_the_tests_for_a_gpu_pass_on_paper(test: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With smaller products and shorter prompts, of two tiles a layer."""
    monkeypatch.setattr(test_cuda, "SIDE", 256)
    monkeypatch.setattr(test_cuda, "LONG", 1100)
    monkeypatch.setattr(test_cuda, "LONGER", 1100)
    monkeypatch.setattr(test_cuda, "MAX_TOKENS", 4)
    monkeypatch.setattr(test_cuda, "DTYPES", ("bf16",))
    # Products with quantised weights have twins here; attention to a cache in 4 bits and packed pages have none: see
    # quantised_interpreted.py and packed_interpreted.py.
    monkeypatch.setattr(hardware, "_has_kernels", lambda new_enough: new_enough)
    monkeypatch.setattr(choice, "cache_problem", lambda sizing: "on paper")
    monkeypatch.setattr(bits, "_packing_problem", lambda sizing: "on paper")
    with on_paper() as gpu:
        test()
    assert gpu.problems == []


@pytest.mark.parametrize("planted", ["mm", "bmm", None])
def test_the_test_of_a_rows_place_passes_on_a_gpu_without_that_and_fails_on_one_with_it(
    planted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU's library does nobody knows here, and what a CPU's does says nothing of it: so the test itself is
    tried, on a GPU that takes each row by itself and on two that split a row's sum by its place."""
    monkeypatch.setattr(test_cuda, "WIDTHS", ((256, 704),))
    with on_paper() as gpu:
        products_by_row(gpu, monkeypatch, split=planted)
        if planted is None:
            OF_ROWS()
        else:
            with pytest.raises(AssertionError):
                OF_ROWS()
    assert gpu.launches["mm"] > 0
    assert (gpu.launches["bmm"] > 0) == (planted != "mm")
    assert gpu.problems == []
