"""The end of answers: which error, and so which exit code, follows from their finish reasons."""

from __future__ import annotations

import pytest

from offload.errors import TriforceError
from triforce_cli.answering.ending import End, check_ends, of_apis


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ([End("a", "length", "regex")], 6, "a was cut and may not match its regex"),
        ([End("a", "length", "regex"), End("b", "length", "JSON schema")], 6, "a and 1 other were cut and may not"),
        ([End("a", "timeout")], 124, "a was cut because the time was over; raise --timeout"),
        ([End("a", "length", "regex"), End("b", "timeout", "regex")], 124, "b was cut because the time was over"),
        ([End(name, "timeout") for name in "abc"], 124, "a and 2 others were cut because the time was over"),
    ],
)
def test_the_exit_code_of_several_answers_follows_from_how_they_ended(ends: list[End], code: int, said: str) -> None:
    """By command, a text that its time cut ended with 124, 6 or 0."""
    with pytest.raises(TriforceError) as error:
        check_ends(ends)
    assert (error.value.exit_code, said in str(error.value)) == (code, True)


def test_answers_that_may_end_as_they_did_are_no_error() -> None:
    check_ends([])
    check_ends([End("a", "stop", "regex"), End("b", "length"), End("c", "interrupted", "regex")])


@pytest.mark.parametrize(("finish", "word"), [("stop", "stop"), ("length", "length"), ("timeout", "length")])
def test_apis_of_other_programs_have_no_word_for_time(finish: str, word: str) -> None:
    assert of_apis(finish) == word
