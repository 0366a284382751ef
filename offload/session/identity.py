"""The identity that a session is bound to (its keys and values fit one model only), and the format of its pages."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from functools import cached_property

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_SAFETENSORS_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_ALIGNMENT = 8  # bytes; where the data begin in a safetensors file


@dataclass(frozen=True)
class PageFormat:
    """A page's file: the keys and values of `page_tokens` tokens in all layers, as safetensors.

    One tensor per layer, `layers.3` [2, H_kv, S, D]. The header follows from the format alone, so a reader compares
    it with the expected bytes and parses nothing.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str  # a key of ELEMENT_BYTES

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[2, H_kv, S, D] of one layer."""
        return (2, self.num_kv_heads, self.page_tokens, self.head_dim)

    @property
    def layer_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]

    @cached_property
    def header(self) -> bytes:
        entries = {
            f"layers.{layer}": {
                "dtype": _SAFETENSORS_DTYPES[self.dtype],
                "shape": self.shape,
                "data_offsets": (layer * self.layer_bytes, (layer + 1) * self.layer_bytes),
            }
            for layer in range(self.num_layers)
        }
        text = json.dumps(entries, separators=(",", ":")).encode("ascii")
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + self.num_layers * self.layer_bytes

    def count(self, num_tokens: int) -> int:
        """Number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)


_SHOWN_DIGITS = 12  # of a digest; enough to tell two apart


@dataclass(frozen=True)
class Identity:
    """The conditions under which saved keys and values equal those that this run would compute.

    model, tokenizer, rope: digests (fingerprints.py). dtype: a key of ELEMENT_BYTES. `model_name` is shown to people
    and not compared: a renamed folder holds the same model.
    """

    model: str
    tokenizer: str
    rope: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    model_name: str = field(default="", compare=False)

    @property
    def page_format(self) -> PageFormat:
        return PageFormat(self.num_layers, self.num_kv_heads, self.head_dim, self.page_tokens, self.dtype)


def differences(saved: Identity, now: Identity) -> list[str]:
    """The fields that differ, each with both values: "dtype: saved bf16, now fp32"."""
    return [
        f"{each.name}: saved {_shown(saved, each.name)}, now {_shown(now, each.name)}"
        for each in fields(Identity)
        if each.compare and getattr(saved, each.name) != getattr(now, each.name)
    ]


def _shown(identity: Identity, name: str) -> str:
    value = str(getattr(identity, name))[:_SHOWN_DIGITS]
    return f"{identity.model_name} ({value})" if name == "model" and identity.model_name else value
