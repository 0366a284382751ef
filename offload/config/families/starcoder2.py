"""StarCoder2 (BigCode): LayerNorm with bias, an ungated feed-forward network with GELU, one window for all layers."""

from __future__ import annotations

from functools import partial

from offload.config.families.common import Defaults, Family, decoder
from offload.config.families.windows import with_one_window
from offload.config.model import ModelConfig
from offload.config.names import TensorNames
from offload.config.norm import Norm
from offload.fields import Fields


def describe(source: Fields) -> ModelConfig:
    source.choice("hidden_act", ("gelu_pytorch_tanh",), default="gelu_pytorch_tanh")
    bias = source.flag("use_bias", True)
    config = decoder(
        source,
        "starcoder2",
        Defaults(max_positions=4096, kv_heads=2, eps=1e-5, norm_key="norm_epsilon", tied=True),
        norm=partial(Norm, centred=True, bias=True),
        attention={"bias": bias, "out_bias": bias},
        feed_forward={"activation": "gelu_tanh", "gated": False, "bias": bias},
        names=TensorNames(up="mlp.c_fc", down="mlp.c_proj"),
    )
    return with_one_window(source, config)


FAMILIES = (Family("starcoder2", "StarCoder2", describe, frozenset(("hidden_act", "scale_attention_softmax_in_fp32"))),)
