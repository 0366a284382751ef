"""llama.cpp, through the xllamacpp wheel, as a process that answers in JSON lines. The protocol is that of `serve`.

Run as a file by the Python that has the wheel. That may be another Python without this project's packages: nothing
but the standard library and xllamacpp is imported.

usage: python llama_cpp.py < requests > answers
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

TOKEN = re.compile(r"t(\d+)")


def token_name(token: int) -> str:
    """The name of a token in our GGUF files: texts are read back as ids."""
    return f"t{token}"


class Way(Protocol):
    """A program that continues prompts. about: information on the program and its last texts, ready for JSON."""

    about: dict[str, Any]

    def generate(self, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        """(tokens, seconds from the start at which each was known). request: `prompt`, `max_tokens`, `end_tokens`, and
        `temperature`, `top_k`, `top_p`, `min_p`, `seed` of the sampling, and perhaps a `json_schema`."""
        ...

    def generate_all(self, request: dict[str, Any]) -> tuple[list[list[int]], float]:
        """(tokens of each of `prompts`, seconds from when all of them have been read). The other parts of `request` as
        in `generate`."""
        ...


def serve(open_way: Callable[[dict[str, Any]], Way]) -> None:
    """Answer each line of standard input with a line on standard output, until the input ends. The first line has the
    options of `open_way`; each other line is a request of `generate`, or with `prompts` of `generate_all`, and its
    answer has `tokens` and `seconds`. Every answer has `about`, the way's information on itself. An error ends the
    process with its message on standard error, as does all output of libraries."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    way = open_way(json.loads(sys.stdin.readline()))
    answer({"about": way.about})
    for line in sys.stdin:
        request = json.loads(line)
        tokens, seconds = way.generate_all(request) if "prompts" in request else way.generate(request)
        answer({"tokens": tokens, "seconds": seconds, "about": way.about})


class LlamaCpp:
    """A llama.cpp server inside this process. Each slot keeps the KV rows of its last prompt for the next.

    Tokens are read from their names in GGUF files that gguf_file.py wrote. A schema needs a file with a real
    vocabulary: `about` then has the text, its finish reason (`finish`), and the server's own `timings`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        """options: `model`, a GGUF file; `context`, tokens of each of `slots`; `threads` that decode,
        `prompt_threads` that read prompts; `cache`, "f16", "bf16" or "f32"; `flash`, whether to use flash attention;
        `ubatch`, tokens of a prompt that are computed at a time; `draft`, a GGUF file or null; `lookup`, a kind of
        n-gram lookups or null; `rows`, a file or null: the rows of the first prompt are written there, or read from
        there if it exists."""
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = options["model"]
        params.n_ctx, params.n_parallel = options["context"] * options["slots"], options["slots"]
        params.kv_unified, params.n_gpu_layers = False, 0  # a cache of its own for each sequence
        params.cache_ram_mib = params.n_ctx_checkpoints = 0  # no copies of prompts: none is repeated
        params.verbosity = 1  # errors and warnings
        params.n_ubatch = options["ubatch"]
        params.n_batch = max(params.n_batch, params.n_ubatch)
        _set_threads(params, options)
        cache = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{options['cache'].upper()}")
        params.cache_type_k = params.cache_type_v = cache
        flash = "ENABLED" if options["flash"] else "DISABLED"
        params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
        kind = options["lookup"] and f"NGRAM_{options['lookup'].upper()}"
        if options["draft"] is not None:
            kind, draft = "DRAFT_SIMPLE", params.speculative.draft
            draft.mparams.path, draft.n_gpu_layers = options["draft"], 0
            draft.cache_type_k, draft.cache_type_v = params.cache_type_k, params.cache_type_v
            _set_threads(draft, options)
        if kind:
            types = xllamacpp.common_speculative_type
            params.speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{kind}")]
        self._rows = Path(options["rows"]) if options["rows"] else None
        if self._rows is not None:
            params.slot_save_path = f"{self._rows.parent}{os.sep}"
        self._server = xllamacpp.Server(params)
        if self._rows is not None and self._rows.exists():
            self._move_rows("restore")
        self.about = {"version": xllamacpp.__version__, "system": xllamacpp.get_system_info().strip()}

    def generate(self, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        tokens, seconds = self._complete(_completion(request))
        if self._rows is not None and not self._rows.exists():
            self._move_rows("save")
        count = _length(tokens, request["end_tokens"])
        return tokens[:count], seconds[:count]

    def generate_all(self, request: dict[str, Any]) -> tuple[list[list[int]], float]:
        asked = [request | {"prompt": prompt, "id_slot": slot} for slot, prompt in enumerate(request["prompts"])]
        for each in asked:
            self._complete(_completion(each | {"max_tokens": 1}))
        said: dict[int, list[int]] = {}

        def complete(slot: int) -> None:
            said[slot], _ = self._complete(_completion(asked[slot]))

        threads = [threading.Thread(target=complete, args=(slot,)) for slot in range(len(asked))]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        return [said[slot][: _length(said[slot], request["end_tokens"])] for slot in range(len(asked))], seconds

    def _complete(self, completion: dict[str, Any]) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        seconds: list[float] = []
        parts: list[dict[str, Any]] = []
        start = time.perf_counter()

        def hear(part: dict[str, Any]) -> None:
            if "choices" not in part:
                raise RuntimeError(f"the server answered {json.dumps(part)}")
            parts.append(part)
            found = [int(token) for token in TOKEN.findall(part["choices"][0]["text"])]
            tokens.extend(found)
            seconds.extend([time.perf_counter() - start] * len(found))

        self._server.handle_completions(completion, hear)
        if "json_schema" in completion:
            said = [part["choices"][0] for part in parts]
            text, finish = "".join(each["text"] for each in said), said[-1]["finish_reason"]
            self.about |= {"text": text, "finish": finish, "timings": parts[-1]["timings"]}
        return tokens, seconds

    def _move_rows(self, action: str) -> None:
        """Save or restore rows, which is possible over HTTP alone."""
        assert self._rows is not None
        body = json.dumps({"filename": self._rows.name}).encode()
        place = f"{self._server.listening_address}/slots/0?action={action}"
        urllib.request.urlopen(urllib.request.Request(place, body, {"Content-Type": "application/json"})).close()


def _set_threads(params: Any, options: dict[str, Any]) -> None:
    params.cpuparams.n_threads, params.cpuparams_batch.n_threads = options["threads"], options["prompt_threads"]


def _completion(request: dict[str, Any]) -> dict[str, Any]:
    """The server's request for the same distribution: the same samplers in the same order, and no others."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "id_slot", "json_schema")
    return {name: request[name] for name in names if name in request} | {
        "prompt": request["prompt"],
        "max_tokens": request["max_tokens"],
        "samplers": ["temperature", "top_k", "top_p", "min_p"],
        "ignore_eos": not request["end_tokens"],
        "cache_prompt": True,
        "stream": True,
    }


def _length(tokens: Sequence[int], end_tokens: Sequence[int]) -> int:
    """The number of tokens up to and including the first end token."""
    ends = (place + 1 for place, token in enumerate(tokens) if token in end_tokens)
    return next(ends, len(tokens))


if __name__ == "__main__":
    serve(LlamaCpp)
