"""OLMo 2 (Ai2): norms after attention and feed-forward network, none before; q and k normed over all heads."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, decoder, epsilon, without_windows
from offload.config.fields import Fields
from offload.config.model import ModelConfig, Norm, TensorNames


def describe(source: Fields) -> ModelConfig:
    defaults = Defaults(eps=1e-5)
    bias, norm = source.flag("attention_bias", False), Norm(epsilon(source, defaults))
    config = decoder(
        source,
        "olmo2",
        defaults,
        attention={"bias": bias, "out_bias": bias, "qk_norm": norm, "norms_whole": True},
        block={
            "before_attention": None, "after_attention": norm, "before_feed_forward": None, "after_feed_forward": norm,
        },
        names=TensorNames(
            after_attention="post_attention_layernorm", after_feed_forward="post_feedforward_layernorm"
        ),
    )  # fmt: skip
    return without_windows(source, config)


FAMILIES = (Family("olmo2", "OLMo 2", describe, refuses="several ranks"),)
