"""The identity of a session, which binds its keys and values to one model."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from offload.session.layout import NO_TENSORS, Format, PageFormat, TensorsFormat

_SHOWN_DIGITS = 12  # of a digest; enough to tell two apart
STATE_FIELDS = (  # of an identity
    *("num_state_layers", "state_heads", "state_key_dim", "state_value_dim", "tail_tokens", "tail_size"),
)
NO_NUMBERS = ("state_key_dim", "state_value_dim")  # 0 where layers have inputs alone


@dataclass(frozen=True)
class Identity:
    """The identity of a session: under equal identities, saved keys and values equal the ones that a run would compute.

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
    num_window_layers: int = 0  # beside num_layers, the layers that see all tokens
    window_kv_heads: int = 0  # of these layers, and their head_dim; 0: the same as the others
    window_head_dim: int = 0
    num_state_layers: int = 0  # layers with a recurrent state, which have no rows; the next five are of these
    state_heads: int = 0
    state_key_dim: int = 0
    state_value_dim: int = 0
    tail_tokens: int = 0  # whose inputs are held with a state, and the numbers of each
    tail_size: int = 0
    model_name: str = field(default="", compare=False)

    @property
    def page_format(self) -> PageFormat:
        return PageFormat(self.num_layers, self.num_kv_heads, self.head_dim, self.page_tokens, self.dtype)

    @property
    def window_format(self) -> PageFormat:
        """The format of a page of the layers with a window."""
        heads, dim = self.window_kv_heads or self.num_kv_heads, self.window_head_dim or self.head_dim
        return replace(self.page_format, num_layers=self.num_window_layers, num_kv_heads=heads, head_dim=dim)

    @property
    def formats(self) -> dict[str, Format]:
        """The formats of files by the names of parts, as far as the identity has them."""
        pages, states = {"rows": self.page_format, "windows": self.window_format}, NO_TENSORS
        if self.num_state_layers:
            shape = self.num_state_layers, self.state_heads, self.state_key_dim, self.state_value_dim
            tails = "tails", self.dtype, (self.num_state_layers, self.tail_tokens, self.tail_size)
            states = TensorsFormat((("states", "fp32", shape), tails))
        return {**{name: form if form.num_layers else NO_TENSORS for name, form in pages.items()}, "states": states}


def differences(saved: Identity, now: Identity) -> list[str]:
    """The fields that differ, each with both values: "dtype: saved bf16, now fp32"."""
    return [
        f"{each.name}: saved {_shown(saved, each.name)}, now {_shown(now, each.name)}"
        for each in fields(Identity)
        if each.compare and getattr(saved, each.name) != getattr(now, each.name)
    ]


def _shown(identity: Identity, name: str) -> str:
    value = str(getattr(identity, name))[:_SHOWN_DIGITS]
    if name in ("window_kv_heads", "window_head_dim") and value == "0":
        return "as in other layers"
    return f"{identity.model_name} ({value})" if name == "model" and identity.model_name else value
