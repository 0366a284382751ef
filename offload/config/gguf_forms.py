"""The encodings that llama.cpp's quantiser gives a model's matrices in a form such as Q4_K_M, so that a GGUF file can
be planned before it is fetched (llama.cpp, src/llama-quant.cpp)."""

from __future__ import annotations

from offload.config.encodings import encoded, matrices
from offload.config.model import ModelConfig
from offload.config.next_token import head_of

FORMS = ("Q8_0", "MXFP4", "Q4_K_M")
_LAYERS_OF_70B = 80  # eight query heads share a key head there, so values take little
_ODD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # where a row is no multiple of 256 numbers
_UNIT = 256


def in_form(config: ModelConfig, form: str, *, others: str = "") -> ModelConfig:
    """`config` with its matrices in one of FORMS. others: the encoding of all but the experts, if it is not the
    form's."""
    head = head_of(config)
    every = matrices(config) | (matrices(head) if head is not None else {})

    def encoding_of(name: str) -> str:
        is_expert = ".experts." in name
        if form == "MXFP4" and is_expert:
            return form
        if form != "Q4_K_M":
            return "Q8_0"
        if others and not is_expert:
            return others
        kind = _in_q4_k_m(config, name)
        return _ODD[kind] if name in every and every[name].inputs % _UNIT else kind

    return encoded(config, encoding_of)


def _in_q4_k_m(config: ModelConfig, name: str) -> str:
    """The encoding of a matrix: more bits for the head, for joined projections, and in half of the layers for values
    and the last matrix of a feed-forward network."""
    if name == (config.names.embeddings if config.tie_embeddings else config.names.head):
        return "Q6_K"
    if "in_proj_qkv" in name:
        return "Q5_K"
    count = config.num_layers
    layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else 0
    more = layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2
    if more and any(part in name for part in ("v_proj", "down_proj", ".w2.")):
        return "Q6_K"
    return "Q5_K" if "v_proj" in name and count == _LAYERS_OF_70B else "Q4_K"
