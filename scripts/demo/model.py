"""A lean Llama, or mixture of Qwen3's form, for training on a CPU; parameter names and results match transformers'."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from . import settings
from .attention import attend
from .mixture import BALANCE, Mixture
from .settings import Shape

ROPE_THETA = 10000.0
RMS_EPS = 1e-5


def config_of(shape: Shape) -> PretrainedConfig:
    """The transformers config of a shape; the long target carries YaRN rotary settings."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": ROPE_THETA}
    if shape.yarn_factor is not None:
        rope = {
            "rope_type": "yarn",
            "rope_theta": ROPE_THETA,
            "factor": shape.yarn_factor,
            "original_max_position_embeddings": settings.TRAINED_POSITIONS,
        }
    fields: dict[str, object] = {
        "vocab_size": settings.VOCAB_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": RMS_EPS,
        "tie_word_embeddings": True,
        "bos_token_id": settings.BOS_ID,
        "eos_token_id": settings.EOS_ID,
        "pad_token_id": None,
        "rope_parameters": rope,
        "dtype": "bfloat16",
    }
    if not shape.experts:
        return LlamaConfig(**fields)
    return Qwen3MoeConfig(
        **fields,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.used,
        norm_topk_prob=True,
        router_aux_loss_coef=BALANCE,
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x [batch, heads, length, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Norm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + RMS_EPS)
        return (self.weight * wide).to(x.dtype)


class Attention(nn.Module):
    """The four projections of multi-head attention, and the norms of queries and keys that Qwen3's form has."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.head_dim = shape.heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.q_norm = Norm(self.head_dim) if shape.experts else nn.Identity()
        self.k_norm = Norm(self.head_dim) if shape.experts else nn.Identity()

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, length, hidden] -> rotated q and k, and v, each [batch, heads, length, head_dim]."""
        split = (*x.shape[:2], self.heads, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(split)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(split)).transpose(1, 2), cos, sin)
        return q, k, self.v_proj(x).view(split).transpose(1, 2)

    def join(self, out: Tensor) -> Tensor:
        """[batch, heads, length, head_dim] -> [batch, length, hidden]."""
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.mlp = Mixture(shape) if shape.experts else FeedForward(shape)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Everything up to the attention itself."""
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def after(self, x: Tensor, out: Tensor) -> Tensor:
        """Everything past the attention itself."""
        x = x + self.self_attn.join(out)
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.after(x, attend(*self.before(x, cos, sin)))


class Backbone(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(settings.VOCAB_SIZE, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class LanguageModel(nn.Module):
    """Token ids in, last hidden states or logits out."""

    def __init__(self, shape: Shape, model: nn.Module) -> None:
        super().__init__()
        self.shape, self.model = shape, model
        self.tables: tuple[Tensor, Tensor] | None = None
        self.apply(initialise)
        for name, weight in self.named_parameters():  # a layer starts as the identity: depth then costs no stability
            if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
                nn.init.zeros_(weight)

    def config(self) -> PretrainedConfig:
        """The transformers config."""
        raise NotImplementedError

    def make_tables(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [length, rotated], from transformers itself so that both agree exactly."""
        raise NotImplementedError

    def rope(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cached cos and sin, [length, rotated] in the compute type."""
        if self.tables is None or self.tables[0].shape[0] < length or self.tables[0].dtype != dtype:
            cos, sin = self.make_tables(length)
            self.tables = cos.to(dtype), sin.to(dtype)
        return self.tables[0][:length], self.tables[1][:length]

    def hidden(self, ids: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """ids int64 [batch, length] -> normed hidden states [batch, length, hidden]."""
        cos, sin = self.rope(ids.shape[1], dtype)
        return self.model(self.model.embed_tokens(ids).to(dtype), cos, sin)

    def embedding(self) -> Tensor:
        """The tied embedding and output head, [vocab, hidden]."""
        return self.model.embed_tokens.weight

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """ids int64 [batch, length] -> logits [batch, length, vocab] in the compute type."""
        return F.linear(self.hidden(ids, dtype), self.embedding().to(dtype))

    def loss(self, ids: Tensor) -> Tensor:
        """Mean next-token cross entropy, nats, of ids int64 [batch, length + 1]."""
        return head_loss(self.hidden(ids[:, :-1]), self.embedding(), ids[:, 1:])


class Llama(LanguageModel):
    """A Llama, or a mixture of Qwen3's form."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, Backbone(shape))

    def config(self) -> PretrainedConfig:
        return config_of(self.shape)

    def make_tables(self, length: int) -> tuple[Tensor, Tensor]:
        rotary = LlamaRotaryEmbedding(self.config())
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(length)[None])
        return cos[0], sin[0]


def head_loss(hidden: Tensor, embedding: Tensor, wanted: Tensor) -> Tensor:
    """Mean cross entropy, nats, of hidden [batch, length, size] against ids [batch, length]."""
    logits = F.linear(hidden, embedding.to(hidden.dtype))
    return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def compile_pieces() -> None:
    """Compiles the pieces around the attention, once each, shared by all layers.

    Compiling the whole model would be slower: it takes minutes, and the compiler then recomputes the rotations in
    every attention block.
    """
    global head_loss
    head_loss = torch.compile(head_loss, dynamic=False)
    Layer.before = torch.compile(Layer.before, dynamic=False)  # type: ignore[method-assign]
    Layer.after = torch.compile(Layer.after, dynamic=False)  # type: ignore[method-assign]


def initialise(module: nn.Module) -> None:
    """Small normal weights."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.04)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
