"""llama.cpp with raw server requests, and with probabilities of whole vocabularies: see samplers.py.

Run as a file by the Python that has the wheel xllamacpp, which may lack this project's packages.

usage: python sampler_process.py < requests > answers
"""

from __future__ import annotations

from typing import Any

from llama_cpp import LlamaCpp, serve


class Asked(LlamaCpp):
    """llama.cpp with raw requests. about: has `first_place`, [token, number] pairs: log-probabilities before the
    samplers, or with post_sampling_probs probabilities after them."""

    def generate(self, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        """request: `completion`, as llama.cpp's server takes it."""
        answers: list[dict[str, Any]] = []
        self._server.handle_completions(request["completion"] | {"stream": False, "cache_prompt": True}, answers.append)
        if "choices" not in answers[0]:
            raise RuntimeError(f"the server answered {answers[0]}")
        places = answers[0]["choices"][0]["logprobs"]["content"]
        self.about = self.about | {"first_place": [list(pair) for pair in _pairs(places[0])] if places else []}
        return [place["id"] for place in places], []


def _pairs(place: dict[str, Any]) -> list[tuple[int, float]]:
    if "top_probs" in place:
        return [(token["id"], token["prob"]) for token in place["top_probs"]]
    return [(token["id"], token["logprob"]) for token in place["top_logprobs"]]


if __name__ == "__main__":
    serve(Asked)
