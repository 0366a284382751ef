"""A step of an answer: accepted tokens and the text that they complete."""

from __future__ import annotations

from dataclasses import dataclass

from offload.decode.generation import FinishReason, Run
from offload.decode.logprobs import TokenScore
from offload.engine.passages import Passage
from offload.text.reply_text import ReplyText


@dataclass(frozen=True)
class Step:
    """Accepted tokens and the text that they complete. `finish` is set on the last step only: "length" where max_tokens
    cut the text, "stop" where it ended, or where a constraint allows only the end. scores: of each token, if requested.
    passages: on the last step, if requested. named: the places in `text` of tokens that the request has written by
    name. stop: on the last step, the stop string that ended the text, or ""."""

    text: str
    tokens: list[int]
    finish: FinishReason | None
    scores: tuple[TokenScore, ...] = ()
    passages: tuple[Passage, ...] = ()
    named: tuple[int, ...] = ()
    stop: str = ""

    @classmethod
    def of(cls, run: Run, written: ReplyText, text: str) -> Step:
        """The run's text after `text`, cut after the token that completes a stop string."""
        tokens, finish = list[int](), run.finish
        for token in run.tokens:
            if written.is_stopped:
                break
            tokens.append(token)
            text += written.push(token)
        if finish is not None and not written.is_stopped:
            text += written.flush()
        if written.is_stopped:
            finish = "stop"
        return cls(text, tokens, finish, named=written.named_in(text), stop=written.stop)
