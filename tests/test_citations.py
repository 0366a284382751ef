"""Citations: an answer's passages are those that its rows attend to more than other rows do and whose words it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from offload.engine.attended import Attended, Passage
from triforce_cli.answering import words
from triforce_cli.answering.citations import SHOWN, citations
from triforce_cli.documents import Document

PARTS = [
    "Rents are due monthly.",
    "Heaters are serviced yearly.",
    "Spare keys are with Ada Miller.",
    "Nobody swims there.",
]


def row(*masses: float) -> Tensor:
    """The masses of a row, [L = 2, H_kv = 2, C], in unequal parts by layer and head."""
    return torch.tensor([0.1, 0.2, 0.3, 0.4]).view(2, 2, 1) * torch.tensor(masses)


def attended(prompt: list[Tensor], *text: Tensor, chunk: int = 1, num_prompt: int | None = None) -> Attended:
    found = Attended(chunk, prompt[0].shape[-1] * chunk if num_prompt is None else num_prompt)
    found.begin(prompt)
    for each in text:
        found.add(each, 1)
    return found


def places(found: Attended, count: int = 9) -> list[tuple[int, int]]:
    return [(each.start, each.end) for each in found.passages(count)]


def test_what_every_row_attends_to_is_no_passage_wherever_it_is() -> None:
    """The title was the first or second citation of 12 of 12 answers about a lease: it had the most mass."""
    others, text = row(90, 1, 1, 1, 30, 1, 1, 1, 1, 1), row(90, 1, 1, 1, 30, 1, 1, 9, 1, 1)
    assert places(attended([others, others, others], text)) == [(6, 9)]


def test_a_prompts_beginning_is_a_passage_where_the_text_attends_to_it_more_than_other_rows() -> None:
    others, text = row(20, 1, 1, 1, 1, 1), row(60, 1, 1, 1, 1, 1)
    assert places(attended([others, others], text)) == [(0, 2)]


def test_passages_are_in_the_order_of_their_lifts_and_do_not_overlap() -> None:
    others = row(50, 8, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    text = row(50, 18, 1, 1, 8, 1, 7, 1, 1, 1, 1, 4)
    found = attended([others, others], text)
    assert places(found) == [(3, 6), (0, 3), (10, 12)]  # chunk 1 gained the most mass, chunk 4 the greatest lift
    assert places(found, 1) == [(3, 6)]
    assert [each.share for each in found.passages(9)] == pytest.approx([7 / 26, 10 / 26, 3 / 26])


def test_a_passage_has_whole_chunks_of_the_prompt_alone() -> None:
    others, text = row(9, 1, 1, 1, 1, 1, 1), row(9, 1, 1, 1, 1, 6, 90)
    assert places(attended([others, others], text, chunk=4, num_prompt=26)) == [(16, 24)]


def test_nothing_is_cited_where_no_place_stands_out() -> None:
    others = row(5, 1, 4, 1, 3)
    assert places(attended([others, others], others)) == []
    assert places(attended([others, others], row(5, 0.5, 3, 1, 2))) == []
    assert places(Attended(1, 5)) == []
    assert places(attended([row(1), row(1)], row(2))) == []


def test_one_row_of_the_prompt_that_asks_for_a_passage_does_not_take_it_away() -> None:
    nothing, asks, text = row(9, 1, 1, 1, 1, 1), row(9, 1, 1, 1, 9, 1), row(9, 1, 1, 1, 9, 1)
    assert places(attended([nothing, asks, nothing, nothing], text)) == [(3, 6)]


def test_the_prompts_last_row_is_the_texts_until_it_has_rows_of_its_own() -> None:
    nothing, last, text = row(9, 1, 1, 1, 1, 1, 1, 1), row(9, 1, 6, 1, 1, 1, 1, 1), row(9, 1, 1, 1, 1, 1, 6, 1)
    assert places(attended([nothing, nothing, last])) == [(1, 4)]
    assert places(attended([nothing, nothing, last], text)) == [(5, 8)]


def test_without_rows_to_compare_with_the_most_mass_counts_but_not_the_sinks() -> None:
    found = attended([row(90, 1, 1, 1, 30, 1, 1, 1)])
    assert places(found) == [(3, 6)]
    assert [each.share for each in found.passages(9)] == pytest.approx([32 / 36])


def test_a_pass_counts_by_its_rows_and_not_as_one() -> None:
    others, here, there = row(9, 1, 1, 1, 1, 1, 1, 1, 1), row(9, 1, 5, 1, 1, 1, 1, 1, 1), row(9, 1, 1, 1, 1, 1, 8, 1, 1)
    alone, together = attended([others, others], here, here, here, there), attended([others, others])
    together.add(here * 3, 3)
    together.add(there, 1)
    assert together.passages(9) == alone.passages(9)
    assert places(together)[0] == (1, 4)
    assert places(attended([others, others], others, others, others)) == []


def test_masses_too_small_to_compare_make_no_passage_before_a_real_one() -> None:
    """1e-6 after 1e-8 is a hundred times as much, and nothing."""
    others, text = row(9, 1, 1, 1, 1, 1, 1e-8, 1), row(9, 1, 5, 1, 1, 1, 1e-6, 1)
    assert places(attended([others, others], text), 1) == [(1, 4)]


def test_words_that_few_passages_have_count_for_more() -> None:
    found = words.scores("The KEYS are here", PARTS)
    assert found[2] > 2 * found[0]
    assert found[0] == found[1] > 0  # "are" alone
    assert found[3] == 0
    assert words.scores("", PARTS) == [0, 0, 0, 0]
    assert words.scores("anything", []) == []


def test_a_word_counts_for_less_in_a_longer_passage_and_when_it_is_repeated() -> None:
    short, long, twice = words.scores("key", ["the key", "the key " + "of it " * 9, "key key"])
    assert long < short < twice < 2 * short


def test_words_are_compared_without_regard_to_case_in_any_script() -> None:
    assert words.words("Straße, ÉTÉ_12: 4,800!") == ["strasse", "été", "12", "4", "800"]


class Letters:
    """A tokenizer of characters."""

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))


def cited(order: list[int], answer: str) -> list[str]:
    """The citations of the parts in the given order."""
    text, tokenizer = "\n".join(PARTS), Letters()
    starts = [text.index(part) for part in PARTS]
    passages = [Passage(starts[i], starts[i] + len(PARTS[i]), 0.1) for i in order]
    found = citations(passages, list(map(ord, text)), [Document("a", text)], tokenizer, answer)  # type: ignore[arg-type]
    return [each.text for each in found]


def test_attention_alone_ranks_where_the_answer_has_no_words_of_a_passage() -> None:
    assert cited([3, 1, 0, 2], "??") == [PARTS[3], PARTS[1], PARTS[0]]


def test_words_move_a_passage_up_to_the_place_that_both_ranks_give_it() -> None:
    assert cited([3, 2, 1, 0], "Ada") == [PARTS[2], PARTS[3], PARTS[1]]
    assert cited([3, 1, 0, 2], "Ada") == [PARTS[2], PARTS[3], PARTS[1]]
    assert cited([2, 1, 0, 3], "Nobody. Rents are due monthly.")[:2] == [PARTS[0], PARTS[2]]


def test_a_passage_that_attention_does_not_name_is_not_cited_for_its_words() -> None:
    assert cited([3, 1], "Spare keys are with Ada.") == [PARTS[1], PARTS[3]]
    assert len(cited([0, 1, 2, 3], "Ada")) == SHOWN
