"""Penalties, samplers and constraints beside their definitions in plain Python, and beside those of other programs."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from kit.models import Sizes, random_model, random_tokens, save, tiny_engine, tiny_plan
from kit.sampler_values import others
from kit.sampling_reference import Letters, probabilities
from offload.decode.distribution import Distribution, distribution_of, grammar_of
from offload.decode.sampling import SETTINGS, SamplingParams, ThoughtBudget
from offload.decode.sequence import Extended
from offload.engine.request import GenerationRequest
from offload.errors import UsageError
from offload.grammar.constraint import Constraint
from offload.text.tokenizer import Tokenizer

SIZE = 6
ENDS = (5,)
ALL = SamplingParams(temperature=1.0, top_p=1.0)
DEMO = Path(__file__).parent.parent / "triforce_cli" / "models" / "demo-target"

numbers = st.floats(-4, 4, width=32)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.7, 1.0]),
    "top_k": st.sampled_from([0, 3]),
    "top_p": st.sampled_from([0.6, 1.0]),
    "min_p": st.sampled_from([0.0, 0.2]),
    "typical_p": st.sampled_from([0.5, 1.0]),
    "top_n_sigma": st.sampled_from([0.0, 0.9]),
    "xtc_probability": st.sampled_from([0.0, 0.3]),
    "repetition_penalty": st.sampled_from([1.0, 1.5, 0.5]),
    "presence_penalty": st.sampled_from([0.0, 0.6]),
    "frequency_penalty": st.sampled_from([0.0, 0.4, -0.3]),
    "penalty_window": st.integers(0, 5),
    "no_repeat_ngram": st.integers(0, 4),
    "dry_multiplier": st.sampled_from([0.0, 0.8]),
    "dry_allowed_length": st.integers(1, 3),
    "dry_window": st.integers(0, 5),
    "dry_breakers": st.sampled_from([(), ("a",), ("b", "c"), ("ab",), ("aa", "bca")]),
    "logit_bias": st.sampled_from([(), ((1, 2.0), (2, -math.inf)), tuple((t, -math.inf) for t in range(SIZE))]),
    "min_tokens": st.integers(0, 3),
    "ignore_eos": st.booleans(),
}
params = st.builds(
    lambda **fields: replace(ALL, **fields),
    **{name: st.sampled_from([row.default, *others(row)]) for name, row in SETTINGS.items() if name != "seed"} | VALUES,
)


def made(
    sampling: SamplingParams,
    num_prompt: int,
    size: int = SIZE,
    ends: Sequence[int] = ENDS,
    suppressed: Collection[int] = (),
) -> Distribution:
    letters: Any = Letters(size)
    return distribution_of(
        sampling, letters, num_prompt=num_prompt, vocab_size=size, end_tokens=ends, suppressed=suppressed
    )


@given(params, st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=12), st.data())
def test_each_place_has_the_distribution_of_its_definition(
    sampling: SamplingParams, tokens: list[int], data: st.DataObject
) -> None:
    num_prompt = data.draw(st.integers(1, len(tokens)))
    num_rows = data.draw(st.integers(1, len(tokens) - num_prompt + 1))
    rows = data.draw(
        st.lists(st.lists(numbers, min_size=SIZE, max_size=SIZE, unique=True), min_size=num_rows, max_size=num_rows)
    )
    never = data.draw(st.sets(st.integers(0, SIZE - 1), max_size=2))
    found = made(sampling, num_prompt, suppressed=never).probs(torch.tensor(rows), tokens)
    sampling = replace(sampling, logit_bias=(*sampling.logit_bias, *((token, -math.inf) for token in never)))
    for row, probs, place in zip(rows, found.tolist(), range(len(tokens) - num_rows + 1, len(tokens) + 1), strict=True):
        expected = probabilities(row, tokens[:place], num_prompt, sampling, end_tokens=ENDS)
        assert probs == pytest.approx(expected, abs=1e-4) or near_a_threshold(row, tokens[:place], num_prompt, sampling)


def near_a_threshold(row: list[float], before: list[int], num_prompt: int, sampling: SamplingParams) -> bool:
    """Whether a change of the logits like fp32's rounding changes by its definition what is kept."""
    shaken = [[x + sign * 1e-5 * (i + 1) for i, x in enumerate(row)] for sign in (1, -1)]
    top_k_alone = replace(
        untypical(sampling), top_p=1.0, min_p=0.0, top_n_sigma=0.0
    )  # others drop what was at its edge
    for params in (sampling, top_k_alone, untypical(sampling)):
        first = probabilities(row, before, num_prompt, params, end_tokens=ENDS)
        others = (probabilities(each, before, num_prompt, params, end_tokens=ENDS) for each in shaken)
        if any(other != pytest.approx(first, abs=1e-3) or kept(other) != kept(first) for other in others):
            return True
    return sampling.typical_p < 1.0 and equally_typical(first)


def kept(probs: list[float]) -> list[bool]:
    return [p > 0 for p in probs]


def untypical(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, typical_p=1.0, xtc_probability=0.0)


def equally_typical(probs: list[float]) -> bool:
    """Whether two surprises are as far from the expected one but for rounding: of two tokens of nearly 1/2 each the
    distances differ by the square of what is missing."""
    surprises = [-math.log(p) for p in probs if p > 0]
    expected = sum(math.exp(-surprise) * surprise for surprise in surprises)
    distances = sorted(abs(surprise - expected) for surprise in surprises)
    return any(farther - nearer < 1e-6 for nearer, farther in pairwise(distances))


@given(params, st.lists(st.integers(0, SIZE - 1), min_size=2, max_size=6), st.data())
def test_the_same_object_gives_the_same_at_any_place_in_any_order(
    sampling: SamplingParams, prompt: list[int], data: st.DataObject
) -> None:
    """Drafted tokens come and go, and the sequence grows."""
    sequence, used = list(prompt), made(sampling, len(prompt))
    for _ in range(data.draw(st.integers(1, 6))):
        drafted = data.draw(st.lists(st.integers(0, SIZE - 1), max_size=4))
        tokens = Extended(Extended(sequence, drafted[:2]), drafted[2:])
        rows = torch.randn(len(drafted) + 1, SIZE, generator=torch.Generator().manual_seed(len(sequence)))
        fresh = made(sampling, len(prompt)).probs(rows, [*sequence, *drafted])
        assert torch.equal(used.probs(rows, tokens), fresh)
        sequence += data.draw(st.lists(st.integers(0, SIZE - 1), max_size=2))


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ({"repetition_penalty": 1.3, "penalty_window": 0}, theirs.RepetitionPenaltyLogitsProcessor(1.3)),
        ({"no_repeat_ngram": 2}, theirs.NoRepeatNGramLogitsProcessor(2)),
        ({"no_repeat_ngram": 1}, theirs.NoRepeatNGramLogitsProcessor(1)),
        ({"min_tokens": 9}, theirs.MinNewTokensLengthLogitsProcessor(30, 9, 5, device="cpu")),
        ({"logit_bias": ((3, -2.0), (7, 1.5))}, theirs.SequenceBiasLogitsProcessor({(3,): -2.0, (7,): 1.5})),
        ({"temperature": 0.7}, theirs.TemperatureLogitsWarper(0.7)),
        ({"top_k": 4}, theirs.TopKLogitsWarper(4)),
        ({"top_p": 0.8}, theirs.TopPLogitsWarper(0.8)),
        ({"min_p": 0.1}, theirs.MinPLogitsWarper(0.1)),
        ({"typical_p": 0.7}, theirs.TypicalLogitsWarper(0.7)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_transformers_has_too_is_the_same(ours: dict[str, Any], other: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        tokens = torch.randint(0, 40, (1, 35), generator=generator)
        logits = 3 * torch.randn(1, 40, generator=generator)
        found = made(replace(ALL, **ours), 30, size=40).probs(logits, tokens[0].tolist())
        torch.testing.assert_close(found, other(tokens, logits.clone()).softmax(-1), rtol=1e-5, atol=1e-6)


def test_where_everything_is_forbidden_the_bans_give_way() -> None:
    everything = tuple((token, -math.inf) for token in range(SIZE))
    probs = made(replace(ALL, logit_bias=everything, repetition_penalty=1.1), 1).probs(torch.zeros(1, SIZE), [0])
    assert probs.sum() == pytest.approx(1)
    probs = made(replace(ALL, no_repeat_ngram=1), 1).probs(torch.zeros(1, 2), [0, 1])
    assert probs.tolist() == [[0.5, 0.5]]


def test_nothing_that_is_off_costs_anything() -> None:
    assert made(ALL, 1).adjust is None
    assert made(replace(ALL, logit_bias=((1, 2.0),), top_n_sigma=1.0, xtc_probability=0.1), 1).adjust is None


def test_a_bias_is_of_an_id_or_of_a_text_that_is_one_token() -> None:
    tokenizer = Tokenizer.from_folder(DEMO)
    [token] = tokenizer.encode_piece(" the")
    for name in (token, " the"):
        found = _of(replace(ALL, logit_bias=((name, -math.inf),)), tokenizer)
        probs = found.probs(torch.zeros(1, len(tokenizer)), [1])
        assert probs[0, token] == 0
        assert probs[0, token + 1] > 0
    for wrong, said in [(len(tokenizer), "token"), (" the sea and", "tokens")]:
        with pytest.raises(UsageError, match=said):
            _of(replace(ALL, logit_bias=((wrong, 1.0),)), tokenizer)


def test_a_breaker_costs_nothing_where_it_would_prolong_a_repetition() -> None:
    """It did: DRY kept tables and lists from going on, unlike its author's code and llama.cpp's."""
    dry = replace(ALL, dry_multiplier=1.0, dry_allowed_length=1, dry_breakers=("b",))
    for tokens, costs in [((0, 1, 0), 0.0), ((0, 2, 0), 1.0)]:
        adjusted = made(dry, 1).adjusted(torch.zeros(1, SIZE), tokens)[0]
        assert adjusted.tolist() == [-costs if token == tokens[1] else 0.0 for token in range(SIZE)]


@pytest.mark.parametrize(("size", "tokens", "banned"), [(2, [0, 0], [0]), (2, [0, 1], []), (3, [4, 4, 4], [4])])
def test_ngrams_of_a_text_that_is_exactly_as_long_as_they(size: int, tokens: list[int], banned: list[int]) -> None:
    """A fault that no test noticed: such a text was passed over."""
    adjusted = made(replace(ALL, no_repeat_ngram=size), 1).adjusted(torch.zeros(1, SIZE), tokens)[0]
    assert (adjusted == -math.inf).nonzero().flatten().tolist() == banned


def test_a_constraint_leaves_its_tokens_alone() -> None:
    tokenizer = Tokenizer.from_folder(DEMO)
    found = _of(replace(ALL, constraint=Constraint("choice", '["yes", "no"]')), tokenizer)
    probs = found.probs(torch.zeros(1, len(tokenizer)), [1])[0]
    firsts = {tokenizer.decode([token]).strip()[0] for token in probs.nonzero().flatten().tolist()}
    assert firsts == {"y", "n"}


CONSTRAINTS = {
    "json-schema": '{"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "string"}}}',
    "regex": "(ab ){30}",
    "choice": '["yes yes yes yes", "no no no no no"]',
    "grammar": 'start: "go " start | "stop"',
}
LATER: dict[str, dict[str, Any]] = {
    "biases": {"logit_bias": ((5, 100.0), (300, -100.0))},
    "bans": {"logit_bias": tuple((token, -math.inf) for token in range(3, 4096, 2))},
    "all banned": {"logit_bias": tuple((token, -math.inf) for token in range(4096))},
    "repetition": {"repetition_penalty": 10.0, "penalty_window": 0},
    "occurrences": {"presence_penalty": 2.0, "frequency_penalty": -2.0},
    "n-grams": {"no_repeat_ngram": 1},
    "DRY": {"dry_multiplier": 100.0, "dry_base": 10.0, "dry_allowed_length": 1, "dry_breakers": ()},
    "thoughts": {"thoughts": ThoughtBudget(2, "\n</think>\n\n")},
    "thoughts at once": {"thoughts": ThoughtBudget(0, "\n</think>\n\n")},
    "least tokens": {"min_tokens": 1000},
    "truncation": {"top_k": 1, "xtc_probability": 0.5, "typical_p": 0.5, "temperature": 0.01},
}


@pytest.mark.few(len(LATER) + 1)
@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("later", LATER)
def test_no_step_behind_a_constraint_leaves_it(kind: str, later: str) -> None:
    """A budget of thoughts wrote its mark into JSON, and from there on the grammar allowed everything."""
    tokenizer = Tokenizer.from_folder(DEMO)
    size, ends = len(tokenizer), frozenset({tokenizer.eos_token_id or 0})
    constraint = Constraint(cast(Any, kind), CONSTRAINTS[kind])
    found = _of(replace(ALL, constraint=constraint, **LATER[later]), tokenizer)
    state = grammar_of(constraint, tokenizer, size, ends).state()
    generator = torch.Generator().manual_seed(1)
    tokens = [1]
    for scale in (1.0, 30.0, 1e38) * 8:
        probs = found.probs(scale * torch.randn(1, size, generator=generator), tokens)[0]
        allowed = state.masks([])[0]
        assert probs.sum() == pytest.approx(1.0)
        assert not probs[~allowed].any()
        tokens.append(int(torch.multinomial(probs, 1, generator=generator)))
        if tokens[-1] in ends:
            break
        assert state.advance(tokens[-1:]) == 1


def _of(sampling: SamplingParams, tokenizer: Tokenizer) -> Distribution:
    ends = (tokenizer.eos_token_id,) if tokenizer.eos_token_id is not None else ()
    return distribution_of(sampling, tokenizer, num_prompt=1, vocab_size=len(tokenizer), end_tokens=ends)


def test_an_engine_never_draws_what_the_generation_config_suppresses(tmp_path: Path) -> None:
    """With a draft whose own config suppresses nothing, too."""
    model, prompt = random_model(vocab_size=258), random_tokens(40)
    target, draft = save(model, tmp_path / "target", tokenizer=True), save(model, tmp_path / "draft", tokenizer=True)

    def greedy(draft: Path | None) -> list[int]:
        plan = tiny_plan(target, draft, Sizes(), num_prompt_tokens=len(prompt), max_tokens=12)
        with tiny_engine(plan, target, draft) as engine:
            steps = engine.generate(GenerationRequest(prompt, SamplingParams(temperature=0.0), 12))
            return [token for step in steps for token in step.tokens]

    free = greedy(None)
    never = sorted({*free[:4]})
    (target / "generation_config.json").write_text(json.dumps({"suppress_tokens": never}))
    ids = torch.tensor([prompt])
    found = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, suppress_tokens=never,
        eos_token_id=None,
    )  # fmt: skip
    assert greedy(None) == greedy(draft) == found[0, len(prompt) :].tolist()
    assert free != greedy(None)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("repetition_penalty", 0.0, "repetition-penalty is 0.0, it must be above 0"),
        ("presence_penalty", 3.0, "presence-penalty is 3.0, it must be from -2 to 2"),
        ("penalty_window", -1, "penalty-window is -1"),
        ("typical_p", 0.0, "typical-p is 0.0"),
        ("xtc_probability", 2.0, "xtc-probability is 2.0"),
        ("dry_base", 0.5, "dry-base is 0.5"),
        ("min_tokens", -1, "min-tokens is -1"),
        ("logit_bias", ((1, math.inf),), "logit-bias of 1 is inf"),
        ("logit_bias", ((1, math.nan),), "logit-bias of 1 is nan"),
    ],
)
def test_what_is_out_of_range_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(ALL, **{field: value})


def test_a_text_that_cannot_end_and_a_constraint_are_refused() -> None:
    with pytest.raises(UsageError, match="leave one of them out"):
        replace(ALL, ignore_eos=True, constraint=Constraint("regex", "a"))
