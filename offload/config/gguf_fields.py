"""The metadata of a model in a GGUF file: its fields and its special tokens."""

from __future__ import annotations

import re
import struct
from collections.abc import Set

from offload.config.gguf_header import Header, Items, Value, shortest
from offload.config.gguf_names import TABLE
from offload.config.gguf_tokens import end_ids, notes, token_id
from offload.errors import ModelError, unreadable
from offload.fields import MOST_SIZE, TEXT, Fields, whole

# Keys that may change the arithmetic unless their value is 0, false or empty. An architecture may read some of them.
_SUSPECT = re.compile(
    r"softcap|scale$|expert|clamp|sliding|sections|nextn|ssm|pooling|alibi|temperature|deepstack|leading_dense|"
    r"recurrent|full_attention|parallel_residual|max_alibi|shared_kv|per_layer|altup|laurel|hyper|lora|mla|indexer|compress|"
    r"(^|\.)ple\."
)
_MOST_FACTORS = 1 << 12
_TOKENS = "tokenizer.ggml."


class Metadata(Fields):
    """The metadata of a model, by key without the prefix of the architecture."""

    def __init__(self, header: Header) -> None:
        name = header.values["general.architecture"]
        self.header, self._prefix = header, f"{name}."
        values = {key: value for key, value in header.values.items() if key.startswith(self._prefix)}
        own = {key.removeprefix(self._prefix): value for key, value in values.items()}
        super().__init__(own, f"{header.path}: {name}", between=".")

    def refuse_unknown(self, known: Set[str]) -> None:
        """Raises ModelError if a key outside `known` changes the arithmetic."""
        for key in self.data:
            if key not in known and _SUSPECT.search(key) and self._says(key):
                self.refuse(key, "absent or 0: it changes the arithmetic, and this program does not implement it")

    def _says(self, key: str) -> bool:
        value = self.data[key]
        return any(self.header.items(self._prefix + key) or ()) if isinstance(value, Items) else bool(value)

    def alike(self, key: str, default: int | None = None) -> int:
        """An integer that is the same in all layers, stored once or as a list over layers."""
        if not isinstance(self.data.get(key), Items):
            return self.integer(key, default=default)
        values = set(self.values(key))
        if len(values) != 1:
            self.refuse(key, "the same in all layers")
        wanted, value = whole(1, MOST_SIZE), values.pop()
        return value if isinstance(value, int) and wanted.fits(value) else self.refuse(key, f"of {wanted.wanted}")

    def optional(self, key: str) -> float | None:
        """A number over 0; None if it is absent or 0."""
        value = self.data.get(key)
        return None if type(value) in (int, float) and value == 0 else self.optional_number(key)

    def values(self, key: str) -> list[Value]:
        return self.header.items(self._prefix + key) or self.refuse(key, "a list")

    def head_layers(self) -> range:
        """The numbers of the layers of the next-token head, which are stored after the others."""
        count = self.integer("block_count")
        return range(count - self.get("nextn_predict_layers", whole(0, count - 1), 0), count)

    def has_sections(self) -> bool:
        """Whether heads rotate in sections, by positions of their own in pictures."""
        return "rope.dimension_sections" in self.data and any(self.values("rope.dimension_sections"))

    def text(self, key: str) -> str:
        """A text, "" if it is absent."""
        text: str = self.get(key, TEXT, "")
        return text

    def token(self, name: str) -> int | None:
        """The id of a special token of the tokenizer, None if there is none."""
        return token_id(self._tokens(), name, self._num_tokens())

    def ends(self) -> list[int]:
        """Ids of the tokens that end a reply."""
        return end_ids(self._tokens(), self.header.items(f"{_TOKENS}tokens") or (), self._num_tokens())

    def suppressed(self) -> tuple[int, ...]:
        """Ids of the tokens that are never drawn; ids without a token are left out."""
        ids = self.header.items(f"{_TOKENS}suppress_tokens") or ()
        return tuple(dict.fromkeys(i for i in ids if type(i) is int and 0 <= i < self._num_tokens()))

    def token_notes(self) -> list[str]:
        """Notes for the user on special tokens that are named but not in the vocabulary."""
        return notes(self._tokens(), self._num_tokens())

    def _tokens(self) -> dict[str, Value]:
        """The metadata of the tokenizer."""
        values = self.header.values.items()
        return {key.removeprefix(_TOKENS): value for key, value in values if key.startswith(_TOKENS)}

    def _num_tokens(self) -> int:
        """The number of tokens that have both a text and a row in the embedding's table."""
        rows, named = self.header.tensors[TABLE].shape[0], self.header.values.get(f"{_TOKENS}tokens")
        return min(rows, named.count) if isinstance(named, Items) else rows

    def has(self, tensor: str, layer: int = 0) -> bool:
        """Whether a layer has this tensor, such as attn_q.bias."""
        return f"blk.{layer}.{tensor}" in self.header.tensors

    def head_has(self, part: str) -> bool:
        """Whether the next-token head has this part, which no other layer has."""
        return self.has(f"nextn.{part}.weight", self.head_layers().start)

    def is_head_alone(self) -> bool:
        """Whether the file has layers of a next-token head and none of its model."""
        layers = {name.split(".")[1] for name in self.header.tensors if name.startswith("blk.")}
        return bool(layers) and layers <= {*map(str, self.head_layers())}

    def has_head(self) -> bool:
        """Whether the next-token head has the parts that no other layer has; the last norm has one of three names."""
        first = self.head_layers().start
        is_normed = self.head_has("shared_head_norm") or self.head_has("hc_head_norm")
        is_normed = is_normed or self.has("layer_output_norm.weight", first)
        return self.head_has("eh_proj") and is_normed

    def factors(self, tensor: str, most: float = 1e6) -> list[float] | None:
        """The numbers of a short fp32 vector, over 0 and below `most`; None if there is no such tensor."""
        info = self.header.tensors.get(tensor)
        if info is None:
            return None
        if info.kind != "F32" or len(info.shape) != 1 or info.shape[0] > _MOST_FACTORS:
            raise ModelError(f"{info.path}: {tensor} is {info.kind} {list(info.shape)}, not a short list in F32")
        try:
            with info.path.open("rb") as file:
                file.seek(info.start)
                found = [shortest(each) for each in struct.unpack(f"<{info.shape[0]}f", file.read(info.nbytes))]
        except (OSError, struct.error) as error:
            raise unreadable(info.path, error if isinstance(error, OSError) else OSError(str(error))) from error
        if not all(0 < each < most for each in found):
            raise ModelError(
                f"{info.path}: {tensor} has numbers that are not over 0 and below {most:g}; download it again"
            )
        return found
