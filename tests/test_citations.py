"""Citations: an answer's passages are those that its rows attend to more than other rows do and whose words it has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.engine.passages import Attended, Passage
from triforce_cli.answering import bm25, sentences
from triforce_cli.answering.citations import SHOWN, Citation, citations
from triforce_cli.documents import Document

PARTS = [
    "Rents are due monthly.",
    "Heaters are serviced yearly.",
    "Spare keys are with Ada Miller.",
    "Nobody swims there.",
]


CHUNK = 16


def row(*masses: float) -> Tensor:
    """The masses of a row, [L = 2, H_kv = 2, C], in unequal parts by layer and head."""
    return torch.tensor([0.1, 0.2, 0.3, 0.4]).view(2, 2, 1) * torch.tensor(masses)


def attended(prompt: list[Tensor], *text: Tensor, chunk: int = CHUNK, num_prompt: int | None = None) -> Attended:
    found = Attended(chunk, prompt[0].shape[-1] * chunk if num_prompt is None else num_prompt)
    found.begin(prompt)
    for each in text:
        found.add(each, 1)
    return found


def places(found: Attended, count: int = 9) -> list[tuple[int, int]]:
    """The passages, in chunks."""
    return [(each.start // found.chunk, each.end // found.chunk) for each in found.passages(count)]


def test_what_every_row_attends_to_is_no_passage_wherever_it_is() -> None:
    """The title was the first or second citation of 12 of 12 answers about a lease: it had the most mass."""
    others, text = row(90, 1, 1, 1, 30, 1, 1, 1, 1, 1), row(90, 1, 1, 1, 30, 1, 1, 9, 1, 1)
    assert places(attended([others, others, others], text)) == [(6, 9)]


def test_a_prompts_beginning_is_a_passage_where_the_text_attends_to_it_more_than_other_rows() -> None:
    others, text = row(20, 1, 1, 1, 1, 1), row(60, 1, 1, 1, 1, 1)
    assert places(attended([others, others], text)) == [(0, 2)]


def test_passages_are_in_the_order_of_their_shares_and_do_not_overlap() -> None:
    """A share is a passage's excess over the baseline, relative to it: chunk 1 gained the most mass."""
    others = row(50, 8, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    text = row(50, 18, 1, 1, 8, 1, 7, 1, 1, 1, 1, 4)
    found = attended([others, others], text)
    assert places(found) == [(3, 6), (0, 3), (6, 9), (10, 12)]
    assert places(found, 1) == [(3, 6)]
    masses, floor = found.masses(), 0.3 * 94 / 12
    assert masses is not None
    assert masses.base is not None
    base = masses.base.tolist()
    excess = {at: (gained - 1.1 * base[at]) / (base[at] + floor) for at, gained in ((4, 8), (1, 18), (6, 7), (11, 4))}
    wanted = [each / sum(excess.values()) for each in excess.values()]
    assert [each.share for each in found.passages(9)] == pytest.approx(wanted)
    assert found.passages(1)[0].shares == pytest.approx((0, wanted[0], 0))


def test_the_end_of_a_document_is_a_passage_though_the_prompts_last_rows_are_next_to_it() -> None:
    """The last row of a table was never cited: it stands directly before the question, and every row attends to what
    is near. The text's rows are further away."""
    near, far = row(20, 1, 1, 1, 1, 1, 2, 8), row(16, 0.8, 0.8, 0.8, 0.6, 0.4, 0.5, 7.5)
    assert places(attended([near, near, near], far)) == []
    assert places(attended([near, near, near], *[far] * 40)) == [(6, 8)]
    assert places(attended([near, near, near], *[near * 0.25] * 40)) == []  # what is near, and no more


def test_a_baseline_is_as_the_texts_rows_would_give_it() -> None:
    """Mass falls with the distance: a baseline row that is 24 tokens behind a chunk is brought to 48 by a half."""
    masses = attended([row(1.0, 8.0)] * 3, *[row(1.0, 4.0)] * 49).masses()
    assert masses is not None
    assert masses.base is not None
    before, later = 32 - 3 + 0.5 - 0.0, 32 + 24
    wanted = [(before - 8) / (later - 8), 8.0 * 8 / (later - 24)]  # no nearer than half a chunk
    assert masses.base.tolist() == pytest.approx(wanted)


def test_a_passage_has_whole_chunks_of_the_prompt_alone() -> None:
    others, text = row(9, 1, 1, 1, 1, 1, 1), row(9, 1, 1, 1, 1, 6, 90)
    assert places(attended([others, others], text, num_prompt=106)) == [(4, 6)]


def test_nothing_is_cited_where_no_place_stands_out() -> None:
    others = row(5, 1, 4, 1, 3)
    assert places(attended([others, others], others)) == []
    assert places(attended([others, others], row(5, 0.5, 3, 1, 2))) == []
    assert places(Attended(1, 5)) == []
    assert places(attended([row(1), row(1)], row(2))) == []


def test_one_row_of_the_prompt_that_asks_for_a_passage_does_not_take_it_away() -> None:
    nothing, asks, text = row(9, 1, 1, 1, 1, 1), row(9, 1, 1, 1, 60, 1), row(9, 1, 1, 1, 9, 1)
    assert places(attended([nothing, asks, nothing, nothing], text)) == [(3, 6)]


def test_the_prompts_last_row_is_the_texts_until_it_has_rows_of_its_own() -> None:
    nothing, last, text = row(9, 1, 1, 1, 1, 1, 1, 1), row(9, 1, 6, 1, 1, 1, 1, 1), row(9, 1, 1, 1, 1, 1, 6, 1)
    assert places(attended([nothing, nothing, last])) == [(1, 4)]
    assert places(attended([nothing, nothing, last], text)) == [(5, 8)]


def test_without_rows_to_compare_with_the_most_mass_counts_but_not_the_sinks() -> None:
    found = attended([row(90, 1, 1, 1, 30, 1, 1, 60)])
    assert places(found) == [(6, 8), (3, 6)]
    more = [mass - 1.1 * 185 / 8 for mass in (60, 30)]
    assert [each.share for each in found.passages(9)] == pytest.approx([each / sum(more) for each in more])


def test_a_pass_counts_by_its_rows_and_not_as_one() -> None:
    others, here, there = row(9, 1, 1, 1, 1, 1, 1, 1, 1), row(9, 1, 5, 1, 1, 1, 1, 1, 1), row(9, 1, 1, 1, 1, 1, 8, 1, 1)
    alone, together = attended([others, others], here, here, here, there), attended([others, others])
    together.add(here * 3, 3)
    together.add(there, 1)
    assert together.passages(9) == alone.passages(9)
    assert places(together)[0] == (1, 4)


def test_masses_too_small_to_compare_make_no_passage_before_a_real_one() -> None:
    """1e-6 after 1e-8 is a hundred times as much, and nothing."""
    others, text = row(9, 1, 1, 1, 1, 1, 1e-8, 1), row(9, 1, 5, 1, 1, 1, 1e-6, 1)
    assert places(attended([others, others], text), 1) == [(1, 4)]


def test_words_that_few_passages_have_count_for_more() -> None:
    found = bm25.scores("The KEYS are here", PARTS)
    assert found[2] > 2 * found[0]
    assert found[0] == found[1] > 0  # "are" alone
    assert found[3] == 0
    assert bm25.scores("", PARTS) == [0, 0, 0, 0]
    assert bm25.scores("anything", []) == []


def test_a_word_counts_for_less_in_a_longer_passage_and_when_it_is_repeated() -> None:
    short, long, twice = bm25.scores("key", ["the key", "the key " + "of it " * 9, "key key"])
    assert long < short < twice < 2 * short


def test_words_are_compared_without_regard_to_case_in_any_script() -> None:
    assert bm25.words("Straße, ÉTÉ_12: 4,800!") == ["strasse", "été", "12", "4", "800"]


class Letters:
    """A tokenizer of characters."""

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))


def cited(order: list[int], answer: str, shares: tuple[float, ...] = (0.4, 0.3, 0.25, 0.2)) -> list[str]:
    """The citations of the parts in the given order of their shares."""
    text, tokenizer = "\n".join(PARTS), Letters()
    starts = [text.index(part) for part in PARTS]
    passages = [Passage(starts[i], starts[i] + len(PARTS[i]), (share,)) for i, share in zip(order, shares, strict=True)]
    found = citations(passages, list(map(ord, text)), [Document("a", text)], tokenizer, answer)  # type: ignore[arg-type]
    return [each.text for each in found]


def test_attention_alone_ranks_where_the_answer_has_no_words_of_a_passage() -> None:
    assert cited([3, 1, 0, 2], "??") == [PARTS[3], PARTS[1], PARTS[0]]


def test_words_decide_between_near_shares_alone() -> None:
    """Of 39 answers 4 had citations like 3 % before 51 %: ranks let common words win over the mass."""
    assert cited([3, 1, 0, 2], "Ada") == [PARTS[2], PARTS[3], PARTS[1]]
    assert cited([3, 1, 0, 2], "Ada", (0.41, 0.3, 0.25, 0.2)) == [PARTS[3], PARTS[1], PARTS[0]]
    assert cited([3, 2, 1, 0], "Ada Miller", (0.51, 0.03, 0.02, 0.01)) == [PARTS[3], PARTS[2], PARTS[1]]
    assert cited([3, 2, 1, 0], "Heaters", (0.5, 0.2, 0.1, 0.1)) == [PARTS[3], PARTS[1], PARTS[2]]
    assert cited([2, 1, 0, 3], "Nobody. Rents are due monthly.")[:2] == [PARTS[0], PARTS[3]]


def test_passages_are_ranked_by_their_shares_whatever_their_order() -> None:
    assert cited([0, 1, 2, 3], "", (0.01, 0.2, 0.03, 0.5)) == [PARTS[3], PARTS[1], PARTS[2]]


def test_a_passage_that_attention_does_not_name_is_not_cited_for_its_words() -> None:
    assert cited([3, 1], "Spare keys are with Ada.", (0.5, 0.2)) == [PARTS[3], PARTS[1]]
    assert len(cited([0, 1, 2, 3], "Ada")) == SHOWN


def located_in(
    documents: Sequence[Document], prompt: str, start: int, end: int, shares: tuple[float, ...] = (0.1,)
) -> Citation:
    tokenizer: Any = Letters()
    [found] = citations([Passage(start, end, shares)], list(map(ord, prompt)), documents, tokenizer, "")
    return found


def test_the_second_of_two_like_documents_is_cited_where_it_is_read() -> None:
    text = "".join(f"Line {number} has words.\n" for number in range(9))
    documents = [Document("a", text), Document("b", text), Document("c", text)]
    prompt = f"<{text}|{text}|{text}>"
    for number, name in enumerate("abc"):
        start = 1 + number * (len(text) + 1) + text.index("Line 4")
        found = located_in(documents, prompt, start - 4, start + 20)
        assert (found.document, found.first_line) == (name, 5)


def test_a_document_begins_where_its_longest_line_says_if_its_text_was_changed() -> None:
    """Of like lines the nearest is cited, so a document that is placed wrongly is cited at another line."""
    same = "Same words here.\n"
    text = f"First ﬁle\n{same}{'filler ' * 30}\nA long line that it has once.\n{same}"
    changed = f"<{'x' * 150}{text.replace('ﬁ', 'fi')}>"
    for line, at in ((2, changed.index("Same")), (5, changed.rindex("Same"))):
        assert located_in([Document("a", text)], changed, at - 4, at + 20).first_line == line


def test_a_line_that_a_document_has_twice_does_not_tell_where_it_begins() -> None:
    same = "The same long line is first and last.\n"
    text = (
        f"{same}{''.join(f'Line {number}.' + chr(10) + 'Short one.' + chr(10) for number in range(4))}The one.\n{same}"
    )
    changed = f"<{text[1:]}>"  # so that the first of both is not found
    at = changed.rindex("Short one.")
    assert located_in([Document("a", text)], changed, at - 4, at + 14).first_line == 9


@pytest.mark.parametrize("space", ["", "\n", " \n\n\t", "\n" * 40])
def test_a_document_with_leading_white_space_is_cited_by_its_own_lines(space: str) -> None:
    text = f"{space}{'Same words here.' + chr(10)}{'filler line' + chr(10)}" * 2
    prompt = f"<system>{text.strip()}<question>"
    for at in (prompt.index("Same"), prompt.rindex("Same")):
        found = located_in([Document("a", text)], prompt, at - 4, at + 20)
        line = 1 + text.count("\n", 0, text.index("Same") if at == prompt.index("Same") else text.rindex("Same"))
        assert (found.first_line, found.last_line, found.text) == (line, line, "Same words here.")


def test_a_passage_that_begins_or_ends_at_a_line_break_has_the_lines_of_its_text() -> None:
    text = "One is here.\nTwo is here.\nThree is here.\nFour is here.\n"
    start, end = text.index("Two") - 1, text.index("Four")
    for first, last in ((start - 4, end + 4), (start - 3, end + 3)):
        found = located_in([Document("a", text)], text, first, last)
        assert (found.first_line, found.last_line, found.text) == (2, 3, "Two is here.\nThree is here.")


def test_a_passage_over_a_documents_end_or_start_is_cited_with_the_share_of_its_part() -> None:
    """The last row of a table was lost where the question begins in the same chunk."""
    rows = "".join(f"row {name} | {number}\n" for number, name in enumerate(("one", "two", "three", "four")))
    prompt = f"System text that is long.\n\n{rows}\nWhat is in row four of it?"
    end = prompt.index("four | 3") + 8
    [found] = citations(
        [Passage(end - 24, end + 24, (0.2, 0.4, 0.2))], list(map(ord, prompt)), [Document("a", rows)], Letters(), ""
    )  # type: ignore[arg-type]
    assert (found.text, found.last_line) == ("row three | 2\nrow four | 3", 4)
    assert found.share == pytest.approx(0.2 + 0.4 * 8 / 16, abs=0.03)
    start = prompt.index("row one")
    [found] = citations(
        [Passage(start - 24, start + 24, (0.2, 0.4, 0.2))], list(map(ord, prompt)), [Document("a", rows)], Letters(), ""
    )  # type: ignore[arg-type]
    assert (found.text, found.first_line) == ("row one | 0\nrow two | 1", 1)
    assert found.share == pytest.approx(0.4 * 8 / 16 + 0.2, abs=0.03)
    found = located_in([Document("a", rows)], prompt, start - 10, start + 38)
    assert found.text == "row one | 0\nrow two | 1\nrow three | 2"


def test_of_a_passage_whose_text_was_changed_the_half_that_is_found_tells_the_line() -> None:
    """Of its occurrences the one is cited that is as far behind the passage's beginning as in the passage."""
    text = "Same words here.\nﬁne ﬁne ﬁne ﬁne.\nSame words here.\nend"
    prompt = text.replace("ﬁ", "fi")
    start = prompt.index("fine") - 4
    found = located_in([Document("a", text)], prompt, start, prompt.index("end") + 3)
    assert (found.first_line, found.text) == (3, "Same words here.")


def test_bm25_is_as_published() -> None:
    """Robertson and Zaragoza, 2009, (3.15) with k1 = 1.2 and b = 0.75; the weight is that of Lucene, never negative."""
    passages = ["key key door", "door of the old house there", "key"]
    mean = (3 + 6 + 1) / 3

    def part(having: int, number: int, length: int) -> float:
        weight = math.log(1 + (3 - having + 0.5) / (having + 0.5))
        return weight * number * 2.2 / (number + 1.2 * (0.25 + 0.75 * length / mean))

    wanted = [part(2, 2, 3) + part(2, 1, 3), part(2, 1, 6), part(2, 1, 1)]
    assert bm25.scores("Key, door! KEY", passages) == pytest.approx(wanted)  # a word of the answer counts once


# Sentences

WRAPPED = (
    "The rent is due on the first day of each month, and it is paid by\ntransfer. A fee of 30 is due when it is late, "
    'and the tenant pays it.\nNo. 5 is let by Mr. Low, cf. the plan. See it? "Yes." He did; e.g. twice.\n'
)
TABLE = "| name | room |\n|---|---|\n| Ada | 14 |\n| Bo | 15 |"
COLUMNS = "Name       Room   Telephone number\nAda Low    14     555-1234 and 99\nBo Hill    15     555-1235 and 98"


@pytest.mark.parametrize(
    ("text", "part", "wanted"),
    [
        (WRAPPED, "transfer", "The rent is due on the first day of each month, and it is paid by\ntransfer."),
        (WRAPPED, "30", "A fee of 30 is due when it is late, and the tenant pays it."),
        (WRAPPED, "Low", "No. 5 is let by Mr. Low, cf. the plan."),
        (WRAPPED, "See it", "See it?"),
        (WRAPPED, "Yes", '"Yes."'),
        (WRAPPED, "twice", "He did; e.g. twice."),
        (TABLE, "14", "| Ada | 14 |"),
        (COLUMNS, "1234", "Ada Low    14     555-1234 and 99"),
        ("a;1;2\nhex bolt;44021;A-03;1250\nwasher;2;3", "A-03", "hex bolt;44021;A-03;1250"),
        ("- one thing\n- another thing that is\n- third", "another", "- another thing that is"),
        ("32. Keys\nSpare keys. They are here.", "They", "They are here."),
        ("1. Water. The pump broke.\n2. Fences.", "Water", "1. Water."),
        ("A heading\n\nSome text without an end", "text", "Some text without an end"),
        ("Rooms\nAda Low\nBo Hill", "Ada", "Ada Low"),
        ("雨が降る。傘を持つ。行く。", "傘", "傘を持つ。"),
        ("It costs 4.50 a day. So it is.", "50", "It costs 4.50 a day."),
    ],
)
def test_a_quoted_passage_is_whole_sentences_or_rows(text: str, part: str, wanted: str) -> None:
    start = text.index(part)
    first, last = sentences.whole(text, start, start + len(part))
    assert text[first:last].rstrip() == wanted


def test_a_sentence_without_an_end_is_quoted_from_a_word_to_a_word() -> None:
    text = "word " * 400
    start, end = sentences.whole(text, 1001, 1013)
    assert text[start:end] == "word word word"
    assert sentences.whole(text, 11, 12, 10, 20) == (10, 20)
    assert sentences.whole("First. Second. Third.", 8, 9, 7) == (7, 15)
