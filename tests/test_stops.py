"""Stop strings that name special tokens, which are no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken

from kit.models import Sizes, byte_tokenizer, random_model, random_tokens, save, tiny_engine, tiny_plan
from offload.decode.generation import Run
from offload.decode.sampling import SamplingParams
from offload.engine.request import GenerationRequest
from offload.engine.step import Step
from offload.text.reply_text import ReplyText
from offload.text.stops import StopStrings
from offload.text.tokenizer import Tokenizer

SPECIAL = ("<|im_start|>", "<|im|>", "<|im")
ORDINARY = "<tool>"


def tokenizer_with_names() -> Tokenizer:
    inner = byte_tokenizer()
    inner.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    inner.add_tokens([AddedToken(ORDINARY, special=False)])
    return Tokenizer(inner)


def stopped(text: str, *stops: str, ends: tuple[str, ...] = (), size: int = 100) -> tuple[str, int, str | None]:
    """What is shown of `text`, how many tokens are kept, and why it ended: in runs of `size` tokens."""
    tokenizer = tokenizer_with_names()
    tokens, names = tokenizer.encode_piece(text), tokenizer.added_tokens(special=False)
    end_tokens = frozenset(names[name] for name in ends)
    written = ReplyText(tokenizer, [], stops=stops, named={}, end_tokens=end_tokens)
    shown, kept = "", 0
    for at in range(0, len(tokens), size):
        run = Run(tokens[at : at + size], "length" if at + size >= len(tokens) else None)
        step = Step.of(run, written, "")
        shown, kept = shown + step.text, kept + len(step.tokens)
        if step.finish is not None:
            return shown, kept, step.finish
    raise AssertionError("the last run ends the text")


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("Hi.<|im_start|>user", ["<|im_start|>"], ("Hi.", 4, "stop")),
        ("Hi.\n<|im_start|>user", ["\n<|im_start|>us"], ("Hi.", 7, "stop")),
        ("Hi<|im_start|><|im|>x", ["<|im_start|><|im|>"], ("Hi", 4, "stop")),
        ("Hi<|im_start|>x", ["<|im_start|>y"], ("Hix", 4, "length")),
        ("Hi<|im_start|>x", ["<|im_start|>y", "x"], ("Hi", 4, "stop")),
        ("a<tool>b", ["<tool>"], ("a", 2, "stop")),
        ("a<tool>b", ["ol>b"], ("a<to", 3, "stop")),
        ("E<|im|>ND", ["END"], ("", 4, "stop")),
        ("a<|im_start|>b", ["<|im", "_start"], ("ab", 3, "length")),
        ("a<|im_start|>b", ["|", ">", "<"], ("ab", 3, "length")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_special_token_counts_as_its_name_where_a_stop_string_names_it(
    text: str, stops: list[str], expected: tuple[str, int, str], size: int
) -> None:
    """It never stopped: special tokens are not in the decoded text. Whether a round of accepted tokens goes on behind
    it changes nothing, and a part of a name is none."""
    assert stopped(text, *stops, size=size) == expected


@pytest.mark.parametrize("cuts", [("xabcdef",), ("xab", "cdef"), ("xabcd", "ef"), tuple("xabcdef")])
@pytest.mark.parametrize("stops", [["cd", "abcde"], ["abcde", "cd"]])
def test_the_stop_string_that_is_complete_first_ends_the_text(cuts: tuple[str, ...], stops: list[str]) -> None:
    """Of two that one token completes, too: the text does not depend on how it is cut into tokens."""
    watch = StopStrings(stops)
    assert "".join([*map(watch.push, cuts), watch.flush()]) == "xab"
    assert watch.stop == "cd"


def test_a_stop_string_of_the_answer_counts_only_there() -> None:
    for cuts in (("one END two END",), ("one E", "ND two E", "ND"), tuple("one END two END three")):
        watch, text, shown = StopStrings(["XX"], of_answer=["END"]), "", ""
        for cut in cuts:
            text += cut
            shown += watch.push(cut, answer_from=6 if len(text) > 6 else None)
        assert (shown + watch.flush(), watch.stop) == ("one END two ", "END")
    watch = StopStrings(["XX"], of_answer=["END"])
    assert [watch.push("aE", answer_from=None), watch.push("NDXX", answer_from=None)] == ["aE", "ND"]
    watch = StopStrings([], {"<|im|>": 300}, of_answer=["<|im|>D"])
    assert [watch.push("a", 1, answer_from=None), watch.push("", 300, answer_from=1)] == ["a", ""]
    assert (watch.push("D", 2, answer_from=1), watch.stop) == ("", "<|im|>D")


def test_the_letters_of_a_name_stop_too() -> None:
    watch = StopStrings(["<|im_start|>"], {"<|im_start|>": 300})
    assert (watch.push("a<|im_st", 1), watch.push("art|>b", 2), watch.found) == ("a", "", True)


def test_a_stop_string_that_ends_with_the_end_of_the_text() -> None:
    assert stopped("Hi\n<|im|>x", "\n<|im|>", ends=("<|im|>",)) == ("Hi", 4, "stop")
    assert stopped("Hi\n<tool>", "\n<tool>", ends=("<tool>",)) == ("Hi", 4, "stop")
    assert stopped("Hi\n<tool>", ends=("<tool>",)) == ("Hi\n", 4, "length")


def test_an_engine_stops_at_a_special_token_that_is_named(tmp_path: Path) -> None:
    path, prompt = save(random_model(vocab_size=258), tmp_path / "target", tokenizer=True), random_tokens(40)
    plan = tiny_plan(path, None, Sizes(), num_prompt_tokens=len(prompt), max_tokens=8)
    sampling = SamplingParams(temperature=0.0, logit_bias=(("<s>", 100.0),))
    request = GenerationRequest(prompt, sampling, 4)
    with tiny_engine(plan, path) as engine:
        free = list(engine.generate(request))
        steps = list(engine.generate(replace(request, stop=("<s>",))))
    start = byte_tokenizer().bos_token_id
    assert [token for step in free for token in step.tokens] == [start] * 4
    assert [token for step in steps for token in step.tokens] == [start]
    assert [(step.text, step.finish) for step in steps] == [("", "stop")]
