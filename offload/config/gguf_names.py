"""Tensor names of llama.cpp, and their translation to the names of Hugging Face. Both name the same parts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from offload.config.names import TensorNames

TABLE, HEAD = "token_embd.weight", "output.weight"
LAYER_TABLE = "per_layer_token_embd.weight"  # or that of n-grams
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FUSED_EXPERTS = ".ffn_gate_up_exps.weight"  # of all experts of a layer, each gate before its up
JOINED_STATES = ".ssm_in.weight"  # of queries, keys, values and gates by key head
EXPERT_FACTORS = "ffn_down_exps.scale"
SCALE = "scale"  # in place of "weight": of a matrix in NVFP4
_EMBEDDING_NORM = "token_embd_norm"  # the last norm, where a model calls it a norm of embeddings
NO_LAYERS = range(0)
IN_CONFIG = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)  # tensors that belong to the config, not to the checkpoint
_OF_STREAMS = ("norm", "down", "up", "inject")  # parts of the mean of residual streams, as in `StreamNames`
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def renamed(stored: Iterable[str], names: TensorNames, head: range = NO_LAYERS) -> dict[str, str]:
    """The map from llama.cpp's tensor names to this program's, without the names in IN_CONFIG. names: the model's
    tensor names. head: the numbers of its next-token head's layers.

    An unknown tensor of a layer is mapped to a name in that layer too, so that it is reported as unexpected. Those of
    further heads than the first keep their names.
    """
    parts, whole_of_layer, of_head = _parts(names), _whole_names(names), _of_head(names)
    whole = {TABLE: names.embeddings, HEAD: names.head}
    whole |= {
        LAYER_TABLE: names.layer_table,
        "per_layer_model_proj.weight": names.layer_projection,
        "per_layer_proj_norm.weight": names.layer_norm,
        **{
            f"output_hc_{part}.weight": f"{names.body}{names.streams.last}{name}.weight"
            for part, name in _of_streams(names)
        },
    }
    last_norms = ("output_norm", _EMBEDDING_NORM) if names.final_norm == "embedding_norm" else ("output_norm",)
    found: dict[str, str] = {}
    for name in stored:
        if layer := _LAYER.fullmatch(name):
            number, (part, dot, kind) = int(layer[1]), layer[2].rpartition(".")
            inner = whole_of_layer.get(layer[2], f"{parts.get(part) or part}{dot}{kind}")
            if number not in head:
                found[name] = f"{names.body}layers.{number}.{inner}"
            elif number == head.start:
                found[name] = f"{of_head[part]}.{kind}" if part in of_head else f"{names.next_token.layer}{inner}"
            else:
                found[name] = name
        elif norm := next((each for each in last_norms if name.startswith(f"{each}.")), ""):
            found[name] = names.norm + name.removeprefix(norm)
        elif name not in IN_CONFIG:
            found[name] = whole.get(name, name)
    return found


def _of_head(names: TensorNames) -> dict[str, str]:
    """The map of part names of a next-token head that no other layer has."""
    own = names.next_token
    return {
        "nextn.eh_proj": own.join,
        "nextn.enorm": own.embedding_norm,
        "nextn.hnorm": own.hidden_norm,
        "nextn.shared_head_norm": own.norm,
        "layer_output_norm": own.norm,  # so of Ling
        **{f"nextn.hc_head_{part}": f"{own.streams}{name}" for part, name in _of_streams(names)},
    }


def _of_streams(names: TensorNames) -> list[tuple[str, str]]:
    """The part names of a mean of residual streams, llama.cpp's and the model's."""
    return [(part, getattr(names.streams, part)) for part in _OF_STREAMS]


def _whole_names(names: TensorNames) -> dict[str, str]:
    """The map of names within a layer whose ends differ, too."""
    return {
        "ssm_a": names.recurrence.decay,
        "ssm_dt.bias": names.recurrence.time_bias,
        "ssm_d": names.recurrence.skip,
        "ffn_norm": f"{names.before_feed_forward}.weight",  # so of Falcon-H1
        "attn_sinks.weight": names.sink_logits,
        "exp_probs_b.bias": names.experts.bias,
        "ffn_gate_inp.scale": names.experts.norm,
        EXPERT_FACTORS: names.experts.scale,
        "layer_output_scale.weight": "layer_scalar",
    }


def _parts(names: TensorNames) -> dict[str, str]:
    """The map of part names within a layer. A part without a name in the model keeps llama.cpp's."""
    return {
        "attn_norm": names.before_attention,
        "post_attention_norm": names.after_attention or names.before_feed_forward,  # the latter in seed_oss
        "ffn_norm": names.before_feed_forward,
        "post_ffw_norm": names.after_feed_forward,
        "pre_ffw_norm_2": names.before_experts,
        "post_ffw_norm_1": names.after_network,
        "post_ffw_norm_2": names.after_experts,
        "inp_gate": names.input_gate,
        "proj": names.input_out,
        "post_norm": names.after_input,
        **{f"attn_{letter}": f"{names.attention}{letter}_proj" for letter in "qkv"},
        "attn_qkv": names.fused_qkv or names.recurrence.part(0),
        "attn_gate": names.recurrence.part(3) if names.gate_has_queries else names.gate,
        "ssm_in": names.recurrence.part(0),
        "ssm_ba": names.recurrence.part(4),
        "ssm_beta": names.recurrence.part(4),
        "ssm_alpha": names.recurrence.part(5),
        "ssm_conv1d": names.recurrence.taps[0],
        **{f"ssm_conv1d_{letter}": name for letter, name in zip("qkv", names.recurrence.taps, strict=False)},
        "ssm_g_a": names.recurrence.part(3),
        "ssm_g_b": names.recurrence.gates_b,
        "ssm_f_a": names.recurrence.part(5),
        "ssm_f_b": names.recurrence.times_b,
        "ssm_norm": names.recurrence.norm,
        "ssm_out": names.recurrence.out,
        "shortconv.in_proj": names.recurrence.part(0),
        "shortconv.conv": names.recurrence.taps[0],
        "shortconv.out_proj": names.recurrence.out,
        "attn_output": names.attention + names.out,
        "attn_q_norm": names.q_norm,
        "attn_k_norm": names.k_norm,
        "attn_q_a": names.low_queries,
        "attn_q_a_norm": names.q_norm,
        "attn_q_b": names.q_b,
        "attn_kv_a_mqa": names.latent_rows,
        "attn_kv_a_norm": names.k_norm,
        "attn_kv_b": f"{names.attention}kv_b_proj",
        "attn_k_b": names.k_b,
        "attn_v_b": names.v_b,
        "ffn_gate": names.opening.replace("mlp.", names.dense, 1),
        "ffn_up": names.fused_gate_up or names.up.replace("mlp.", names.dense, 1),
        "ffn_down": names.down.replace("mlp.", names.dense, 1),
        "ffn_gate_inp": names.experts.router,
        **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "gate_up", "down")},
        "ffn_latent_down": names.experts.to_latent,
        "ffn_latent_up": names.experts.from_latent,
        "ffn_gate_inp_shexp": names.experts.network_gate,
        **{f"hc_attn_{part}": names.streams.mixer + name for part, name in _of_streams(names)},
        **{f"hc_ffn_{part}": names.streams.network + name for part, name in _of_streams(names)},
        "ple_key": names.ngrams.keys,
        "ple_value": names.ngrams.values,
        "ple_norm_key": names.ngrams.key_norm,
        "ple_norm_query": names.ngrams.query_norm,
        "ple_norm_conv": names.ngrams.norm,
        "ple_conv1d": names.ngrams.taps,
        "indexer.q_proj": names.index.queries,
        "indexer.k_proj": names.index.key,
        "indexer.q_norm": names.index.q_norm,
        "indexer.k_norm": names.index.k_norm,
        **{f"ffn_{part}_shexp": f"{names.experts.network}{part}_proj" for part in ("gate", "up", "down")},
    }
