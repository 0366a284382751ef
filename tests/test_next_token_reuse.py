"""A next-token head drafts the same whether rows are computed, kept from an earlier request, read or borrowed: a seed's
text depends on drafts, so it depends on nothing else either."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kit.asked import Asked, together
from kit.families import save_tiny
from kit.heads import SHAPES, with_head
from kit.models import GREEDY, Sizes, changed, random_tokens, tiny_engine, tiny_plan
from kit.sessions import IDENTITY
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer
from offload.engine.request import GenerationRequest
from offload.errors import SessionError
from offload.kv.kept import Kept
from offload.kv.last_hidden import DraftedHidden
from offload.model.next_token import NextTokenLevel
from offload.plan.planner import Plan
from offload.progress import Progress
from offload.session import manifest as manifests
from offload.session.conditions import Conditions
from offload.session.fingerprints import identity_of
from offload.session.folder import Folder
from offload.session.prefix_store import PrefixStore
from offload.session.store import Store
from offload.session.units import read_unit
from test_next_token import ring_of
from test_state_sessions import sealed

BLOCK = 32
SIZES = Sizes(
    gamma=4, draft_gamma=3, budget=0, sinks=4, window=24, any_rows=True, page=BLOCK, prefill_block=BLOCK, capacity=400
)
CODED = Sizes(**{**vars(SIZES), "kv_bits": 4})
REAL = Sizes(**{**vars(SIZES), "sinks": 16, "window": 240, "page": 512, "prefill_block": 512, "capacity": 1400})
SAMPLED = SamplingParams(temperature=1.0, seed=5)
DOCUMENT, NUM_TOKENS = random_tokens(150, seed=21), 14
QUESTION, OTHER = ([*DOCUMENT, *random_tokens(9, seed=seed)] for seed in (1, 2))
Said = tuple[list[int], list[Tensor]]


@pytest.fixture(autouse=True)
def _short_prompts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.kv.states.PREFILL_BLOCK", BLOCK)
    monkeypatch.setattr("offload.engine.prefix.LEAST_TOKENS", 1)
    monkeypatch.setattr(PrefixStore, "read_seconds", lambda self, stored: 0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models whose likeliest tokens are likely, and their heads': so a text depends on what is drafted."""
    root = tmp_path_factory.mktemp("reuse")

    @cache
    def made(name: str) -> Path:
        shapes = SHAPES | {"max_position_embeddings": 2048}
        folder = with_head(save_tiny(name, root / name, tokenizer=True, **shapes))
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] *= 6
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return made


@pytest.fixture(params=["qwen3_5", "glm4_moe"])
def folder(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> Path:
    """With states, whose prefills note some places, and without."""
    return folders(request.param)


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Tensor]]:
    """The logits that heads have drafted with, by level."""
    found, run = dict[int, list[Tensor]](), NextTokenLevel.run

    def recorded(self: NextTokenLevel, passes: Any) -> None:
        run(self, passes)
        found.setdefault(id(self), []).extend(each.made[0].clone() for each in passes)

    monkeypatch.setattr(NextTokenLevel, "run", recorded)
    return found


def plan_of(folder: Path, sizes: Sizes = SIZES, **options: Any) -> Plan:
    prompt = sizes.capacity - 60
    return tiny_plan(folder, folder, sizes, num_prompt_tokens=prompt, max_tokens=60, **options)


def engine(
    folder: Path,
    sizes: Sizes = SIZES,
    *,
    root: Path | None = None,
    on_note: Callable[[str], Any] = pytest.fail,
    **options: Any,
) -> Engine:
    """root: of a prefix store. on_note: of its notes."""

    def open_store(plan: Plan) -> PrefixStore:
        assert root is not None
        return PrefixStore(root, Conditions.of(folder, plan), limit=1 << 30, on_note=on_note)

    tokenizer = load_tokenizer(folder, folder)
    return Engine.load(plan_of(folder, sizes, **options), folder, folder, tokenizer, open_store=root and open_store)


def said(
    made: Engine,
    drafted: dict[int, list[Tensor]],
    prompt: Sequence[int],
    *,
    reuse: bool = False,
    num_tokens: int = NUM_TOKENS,
) -> Said:
    drafted.clear()
    request = GenerationRequest(list(prompt), SAMPLED, max_tokens=num_tokens, reuse=reuse)
    tokens = [token for step in made.generate(request) for token in step.tokens]
    [logits] = drafted.values()
    return tokens, list(logits)


def alike(one: Said, other: Said) -> bool:
    """Whether texts are the same, and all drafts' logits, bit for bit."""
    return one[0] == other[0] and len(one[1]) == len(other[1]) and all(map(torch.equal, one[1], other[1]))


def again(made: Engine, drafted: dict[int, list[Tensor]], prompt: Sequence[int]) -> Said:
    """After a request for as long a text as has room."""
    said(made, drafted, prompt, num_tokens=55)
    return said(made, drafted, prompt)


def after_another(made: Engine, drafted: dict[int, list[Tensor]], prompt: Sequence[int]) -> Said:
    said(made, drafted, OTHER, num_tokens=55)
    return said(made, drafted, prompt)


@pytest.mark.few(2)
@pytest.mark.parametrize("earlier", [again, after_another])
@pytest.mark.parametrize("sizes", [SIZES, CODED], ids=["alone", "under 4 bits"])
def test_an_earlier_request_changes_no_draft(
    folder: Path, sizes: Sizes, drafted: dict[int, list[Tensor]], earlier: Callable[..., Said]
) -> None:
    """Bug: hidden rows that the ring had lost read as zeros."""
    with engine(folder, sizes) as made:
        fresh = said(made, drafted, QUESTION)
        assert made.stats.reused_tokens == 0
    assert fresh[1]
    with engine(folder, sizes) as made:
        assert alike(earlier(made, drafted, QUESTION), fresh)
        assert made.stats.reused_tokens >= 3 * BLOCK


@pytest.mark.few(1)
def test_a_short_answer_leaves_all_of_a_prefill_to_be_reused(folder: Path, drafted: dict[int, list[Tensor]]) -> None:
    with engine(folder) as made:
        fresh = said(made, drafted, QUESTION)
        assert alike(said(made, drafted, QUESTION), fresh)
        assert made.stats.reused_tokens == len(QUESTION) - SIZES.rows


@pytest.mark.few(1)
def test_a_neighbour_whose_rows_are_borrowed_changes_no_draft(folder: Path, drafted: dict[int, list[Tensor]]) -> None:
    """Bug: so did rows that were borrowed from a sequence that had gone on."""
    with engine(folder) as made:
        fresh = said(made, drafted, QUESTION)
    requests = [Asked(OTHER, SAMPLED, 50), Asked(DOCUMENT[:40], GREEDY, 30), Asked(QUESTION, SAMPLED, NUM_TOKENS)]
    with engine(folder, num_sequences=2) as made:
        drafted.clear()
        texts, stats = together(made, requests)
        assert stats[2].reused_tokens >= 3 * BLOCK
    assert texts[2] == fresh[0]
    count = len(fresh[1])
    assert any(alike((texts[2], logits[-count:]), fresh) for logits in drafted.values())


@pytest.mark.few(2)
@pytest.mark.parametrize("sizes", [SIZES, CODED, REAL], ids=["alone", "under 4 bits", "pages of 512"])
def test_a_warm_store_changes_no_draft(
    folder: Path, sizes: Sizes, drafted: dict[int, list[Tensor]], tmp_path: Path
) -> None:
    """Of a prompt that ends shortly after a page, too: the head reads hidden rows of tokens before it."""
    text = random_tokens(2 * sizes.page + sizes.window + 40, seed=3)
    prompts = [[*text, *random_tokens(count, seed=count)] for count in (5, 9)]
    prompts += [text[: 2 * sizes.page + 9]]
    cold = []
    for prompt in prompts[1:]:
        with engine(folder, sizes) as made:
            cold.append(said(made, drafted, prompt))
    with engine(folder, sizes, root=tmp_path) as made:
        said(made, drafted, prompts[0])
        made.keep()
    for prompt, expected in zip(prompts[1:], cold, strict=True):
        with engine(folder, sizes, root=tmp_path) as made:
            said(made, drafted, random_tokens(60, seed=8))  # leaves its own first rows
            assert alike(said(made, drafted, prompt), expected)
            if made.worker.states is None or prompt is prompts[1]:  # states are at few places
                assert made.stats.stored_tokens >= sizes.page


class Stopped(Exception):
    """A person's interrupt."""


def test_rows_that_were_read_before_a_prefill_was_broken_off_have_no_hidden_rows(
    folders: Callable[[str], Path], drafted: dict[int, list[Tensor]], tmp_path: Path
) -> None:
    """But for the first ones. So of a prompt that ends soon after them the last ones are computed."""
    folder, short = folders("glm4_moe"), [*QUESTION[: 4 * BLOCK], *random_tokens(12, seed=4)]
    with engine(folder, root=tmp_path) as made:
        cold = said(made, drafted, short)
        said(made, drafted, QUESTION)
        made.keep()

    def stop(progress: Progress) -> None:
        if progress.stage == "prefill":
            raise Stopped

    with engine(folder, root=tmp_path) as made:
        with pytest.raises(Stopped):
            list(made.generate(GenerationRequest([*QUESTION, *QUESTION], GREEDY, max_tokens=4), on_progress=stop))
        assert made.num_cached == 4 * BLOCK
        assert alike(said(made, drafted, short), cold)
        assert made.stats.reused_tokens == 3 * BLOCK


@pytest.mark.few(1)
def test_a_damaged_file_of_hidden_rows_is_computed_again(
    folder: Path, drafted: dict[int, list[Tensor]], tmp_path: Path
) -> None:
    with engine(folder, root=tmp_path) as made:
        cold = said(made, drafted, QUESTION)
        made.keep()
    [file] = tmp_path.glob("*/*-hidden-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for stored in (False, True):
        notes = list[str]()
        with engine(folder, root=tmp_path, on_note=notes.append) as made:
            assert alike(said(made, drafted, QUESTION), cold)
            assert (made.stats.stored_tokens > 0) is stored
            assert len(notes) == (not stored)
            made.keep()


def test_rows_that_a_run_without_a_head_has_kept_are_computed_by_one_with(
    folders: Callable[[str], Path], drafted: dict[int, list[Tensor]], tmp_path: Path
) -> None:
    """As are those that one with other sinks has kept; then each finds its own."""
    folder = folders("glm4_moe")
    more, none = (Sizes(**{**vars(SIZES), **values}) for values in ({"sinks": 7}, {"gamma": 0, "draft_gamma": 0}))
    with engine(folder, none, root=tmp_path) as made:
        list(made.generate(GenerationRequest(QUESTION, SAMPLED, max_tokens=3)))
        assert made.worker.hidden is None
        made.keep()
    for sizes in (SIZES, more):
        with engine(folder, sizes) as made:
            cold = said(made, drafted, QUESTION)
        for stored in (0, 4 * BLOCK):
            with engine(folder, sizes, root=tmp_path) as made:
                assert alike(said(made, drafted, QUESTION), cold)
                assert made.stats.stored_tokens == stored
                made.keep()


def opened(path: Path, folder: Path, made: Engine) -> Store:
    return Store.open(path, identity_of(folder, made.plan))


@pytest.mark.few(2)
@pytest.mark.parametrize("sizes", [SIZES, CODED], ids=["alone", "under 4 bits"])
def test_a_restored_run_drafts_what_the_run_that_saved_it_drafts(
    folder: Path, sizes: Sizes, drafted: dict[int, list[Tensor]], tmp_path: Path
) -> None:
    """After the end of its text, and where some of that is taken back."""
    with engine(folder, sizes) as made, opened(tmp_path, folder, made) as store:
        text = [*QUESTION, *said(made, drafted, QUESTION)[0]]
        made.save(store, {})
        saved = list(store.tokens)
        wanted = [said(made, drafted, [*text, 5], reuse=True)]
        made.restore(store, text)
        wanted.append(said(made, drafted, [*text[:-6], 7, 8], reuse=True))
    with engine(folder, sizes) as made, opened(tmp_path, folder, made) as store:
        said(made, drafted, random_tokens(60, seed=8))
        assert made.restore(store, text) == len(saved)
        assert alike(said(made, drafted, [*text, 5], reuse=True), wanted[0])
        assert made.stats.reused_tokens >= len(saved) - sizes.rows
        said(made, drafted, random_tokens(60, seed=9))
        made.restore(store, text)
        assert alike(said(made, drafted, [*text[:-6], 7, 8], reuse=True), wanted[1])


@pytest.mark.few(1)
def test_a_session_without_hidden_rows_is_gone_on_with(
    folder: Path, drafted: dict[int, list[Tensor]], tmp_path: Path
) -> None:
    """One of a run without a head. Bug: the first rows of the text before it were taken for its own."""
    with tiny_engine(tiny_plan(folder, None, Sizes(**{**vars(SIZES), "gamma": 0, "draft_gamma": 0}),
        num_prompt_tokens=340, max_tokens=60), folder) as made, opened(tmp_path, folder, made) as store:  # fmt: skip
        request = GenerationRequest(QUESTION, SAMPLED, max_tokens=NUM_TOKENS)
        text = [*QUESTION, *(token for step in made.generate(request) for token in step.tokens)]
        made.save(store, {})
    found = []
    for earlier in (random_tokens(60, seed=8), random_tokens(90, seed=9)):
        with engine(folder) as made, opened(tmp_path, folder, made) as store:
            said(made, drafted, earlier)
            assert made.restore(store, text) > len(QUESTION)
            assert made.worker.hidden is not None
            assert not len(made.worker.hidden.first_rows)
            found.append(said(made, drafted, [*text, 5], reuse=True))
    assert alike(*found)


FORGED: list[tuple[dict[str, object], str]] = [
    ({"num_first": -1}, "num_first is -1"),
    ({"num_first": 5000}, "num_first is 5000"),
    ({"start": 10_000}, "start is 10000"),
    ({"size": 0}, "size is 0"),
    ({"size": 2**30}, "size is 1073741824"),
    ({"checksum": "0"}, "checksum is"),
    ({"file": "../hidden-0123456789abcdef.safetensors"}, "it must be a file of hidden rows"),
    ({"more": 1}, "more is not known"),
]


@pytest.mark.parametrize(("fields", "why"), FORGED)
def test_a_forged_manifest_of_hidden_rows_is_refused(fields: dict[str, object], why: str) -> None:
    units = {"rows": (3,), "hidden": (3, 2, 1, 8)}
    parts = {
        name: (manifests.Saved(unit, manifests.file_name(name, unit, 4, "0" * 16), "0" * 32),)
        for name, unit in units.items()
    }
    content = manifests.encode(manifests.Manifest(IDENTITY, (1, 2, 3), parts, 5, {}, 1.0, 2.0))
    assert manifests.decode(content).parts == parts
    record = json.loads(b"{" + content.partition(b"\n")[2])
    assert record["format"] == 6
    record["hidden"] |= fields
    with pytest.raises(ValueError, match=why):
        manifests.decode(sealed(record))


@pytest.mark.few(1)
def test_a_damaged_file_of_hidden_rows_ends_a_session(
    folder: Path, drafted: dict[int, list[Tensor]], tmp_path: Path
) -> None:
    with engine(folder) as made, opened(tmp_path, folder, made) as store:
        said(made, drafted, QUESTION)
        made.save(store, {})
        assert store.bytes_to_write(len(store.tokens), len(store.tokens), made.worker.kept) == 0
        [file] = tmp_path.glob("hidden-*")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        tokens = list(store.tokens)
    with engine(folder) as made, opened(tmp_path, folder, made) as store:
        with pytest.raises(SessionError, match=file.name):
            made.restore(store, tokens)
        assert made.num_cached == 0


def test_a_chat_that_is_replanned_with_a_head_computes_rows_anew(
    folders: Callable[[str], Path], drafted: dict[int, list[Tensor]]
) -> None:
    """The plan before had none, so there are no hidden rows."""
    folder = folders("glm4_moe")
    with engine(folder) as made:
        fresh = said(made, drafted, QUESTION)
    with engine(folder) as made:
        with_a_head = made.plan
        made.replan(changed(made.plan, draft=False))
        list(made.generate(GenerationRequest(QUESTION, GREEDY, max_tokens=3)))
        made.replan(with_a_head)
        assert alike(said(made, drafted, QUESTION), fresh)
        assert made.stats.reused_tokens == 0


@pytest.mark.usefixtures("forked_here")
def test_two_ranks_keep_hidden_rows(
    folders: Callable[[str], Path], drafted: dict[int, list[Tensor]], tmp_path: Path
) -> None:
    folder = folders("qwen3_5")

    def ranks() -> Engine:
        def open_store(plan: Plan) -> PrefixStore:
            return PrefixStore(tmp_path / "store", Conditions.of(folder, plan), limit=1 << 30, on_note=pytest.fail)

        plan = changed(plan_of(folder), num_devices=2)
        return Engine.load(plan, folder, folder, load_tokenizer(folder, folder), open_store=open_store)

    with ranks() as made, opened(tmp_path / "session", folder, made) as store:
        cold = said(made, drafted, QUESTION)
        made.keep()
        made.save(store, {})
        wanted = said(made, drafted, [*QUESTION, *cold[0], 5], reuse=True)
    with ranks() as made, opened(tmp_path / "session", folder, made) as store:
        assert alike(said(made, drafted, QUESTION), cold)
        assert made.stats.stored_tokens > 0
        made.prefix.truncate(0)
        made.restore(store, [*QUESTION, *cold[0]])
        assert alike(said(made, drafted, [*QUESTION, *cold[0], 5], reuse=True), wanted)


class Full:
    """A cache of so many verified tokens."""

    length = 0


@pytest.mark.parametrize("seed", range(20))
def test_what_a_ring_has_depends_on_the_tokens_and_not_on_what_was_drafted(seed: int) -> None:
    """Drafts of any number, by the target's passes and by a level below, rejected or not, cuts, prefills and copies:
    what is read is the row of the token there, and what can be read is the same for all."""
    chance, window, slack = random.Random(seed), 5, 7
    rows = torch.randn(400, 4, generator=torch.Generator().manual_seed(seed))
    drafting, plain, full = ring_of(window, slack), ring_of(window, slack), Full()
    below = DraftedHidden(drafting, full)  # type: ignore[arg-type]
    for _ in range(60):
        start = full.length
        if chance.random() < 0.2:
            cut = chance.randrange(start + 1)
            full.length = cut
            drafting.truncate(cut)
            plain.truncate(cut)
        elif start < 300:
            count = chance.choice([1, 2, 3, 40 if chance.random() < 0.3 else 1])
            wrong = chance.randrange(slack - count + 1) if count <= 3 else 0
            split = chance.randrange(1, slack)
            below.write(start, torch.zeros(split, 4))
            below.write(start + split, torch.zeros(slack - split, 4))
            drafting.write(start, torch.cat([rows[start : start + count], torch.zeros(wrong, 4)]))
            plain.write(start, rows[start : start + count])
            full.length = start + count
            drafting.truncate(full.length)
            below.truncate(full.length)
        assert (drafting.oldest, drafting.length) == (plain.oldest, plain.length)
        assert len(drafting.first_rows) == len(plain.first_rows) == min(4, full.length)
        assert plain.units(full.length) == drafting.units(full.length)
        assert not plain.units(full.length + 1)
        expected = rows[: full.length].clone()
        expected[4 : max(plain.oldest, 4)] = 0
        for each in (drafting, plain):
            assert torch.equal(each.read(0, full.length), expected)
        stop = full.length + chance.randrange(10)
        kept = plain.reachable(full.length, stop)
        first = max(stop - window, 0)
        assert kept >= min(full.length, first)
        needed = [place for place in range(first, kept) if stop > window + 4 or place >= 4]
        assert all(place >= plain.oldest for place in needed)


def test_a_file_of_hidden_rows_is_measured_before_memory_is_taken_for_it(tmp_path: Path) -> None:
    """A made-up manifest may name any number of rows: 2**24 of them ended in an error of memory."""
    hidden = ring_of(5, 7)
    (tmp_path / "rows").write_bytes(b"few")
    saved, kept = manifests.Saved((2**40, 4, 0, 4), "rows", ""), Kept(hidden)
    with Folder(tmp_path) as folder, pytest.raises(SessionError, match="it has 3 bytes, this file of hidden rows has"):
        read_unit(folder, saved, kept, hidden, lambda num_bytes, fewer=0: None)
