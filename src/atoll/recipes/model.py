"""A small decoder-only transformer over bytes: RMSNorm, rotary positions, QK-norm, SwiGLU, no biases.

Shapes: B batch, T positions, C width, N heads, D head width, F hidden, V vocabulary, E experts, K active ones, S = B*T.

Sizes are chosen so that whole tensors pack evenly into fragments: no tensor is above 1/19 of the model, so P
= 24 stays within max/mean 1.25. The head is not tied to the embedding: with 256 bytes that costs 4% of
`tiny`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import ConfigError

VOCABULARY = 256
ROPE_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a model. Checked when built."""

    layers: int
    """Transformer blocks."""
    width: int
    """Values per position between blocks; a multiple of `heads`."""
    heads: int
    """Attention heads; width / heads must be even, for rotary positions."""
    hidden: int
    """Inner width of the SwiGLU layer."""
    context: int
    """Most positions the model takes at once."""
    vocabulary: int = VOCABULARY
    """Bytes."""
    experts: int = 1
    """Of each block's MLP; 1: an ordinary one."""
    active: int = 1
    """Experts that each position goes through."""

    def __post_init__(self) -> None:
        for field in ("layers", "width", "heads", "hidden", "context", "vocabulary", "experts", "active"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)} must be at least 1")
        if self.width % (2 * self.heads):
            raise ConfigError(f"width={self.width} must be a multiple of 2*heads={2 * self.heads}")
        if self.active > self.experts:
            raise ConfigError(f"active={self.active} must be at most experts={self.experts}")


MODELS = {
    "tiny": ModelConfig(layers=4, width=128, heads=4, hidden=336, context=256),
    "tiny-moe": ModelConfig(layers=4, width=128, heads=4, hidden=168, context=256, experts=4, active=2),
    "small": ModelConfig(layers=6, width=384, heads=6, hidden=1024, context=512),
}


def rotate(x_BNTD: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864), halves convention: pair (i, i + D/2) turns by position *
    base^(-2i/D)."""
    _, _, length, size = x_BNTD.shape
    frequency = ROPE_BASE ** (-torch.arange(0, size, 2, device=x_BNTD.device, dtype=torch.float32) / size)
    angle_TE = torch.arange(length, device=x_BNTD.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle_TE.cos().to(x_BNTD.dtype), angle_TE.sin().to(x_BNTD.dtype)
    left, right = x_BNTD.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Attention(nn.Module):
    """Self-attention with RMS-normalised queries and keys. causal: a position sees those before it."""

    def __init__(self, config: ModelConfig, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        query, key, value = (
            layer(x_BTC).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        size = (query.shape[-1],)
        query, key = rotate(F.rms_norm(query, size)), rotate(F.rms_norm(key, size))
        mixed_BNTD = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed_BNTD.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        return self.down(F.silu(self.gate(x_BTC)) * self.up(x_BTC))


class Experts(nn.Module):
    """Each position goes through the `active` experts that its router prefers, weighted by a softmax over them.

    `balance` of the last forward pass is E * sum_e (share of positions sent to e) * (mean router probability of e), 1
    where all are used alike (arXiv 2101.03961); the loop adds a little of it to the loss.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.active = config.active
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config) for _ in range(config.experts))
        self.balance: Tensor | None = None

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x_SC = x_BTC.flatten(0, 1)
        scores_SE = self.router(x_SC)
        best_SK, chosen_SK = scores_SE.topk(self.active, dim=-1)
        weight_SK = best_SK.softmax(dim=-1)
        out_SC = torch.zeros_like(x_SC)
        for index, expert in enumerate(self.experts):
            row, column = (chosen_SK == index).nonzero(as_tuple=True)
            out_SC = out_SC.index_add(0, row, expert(x_SC[row]) * weight_SK[row, column, None])
        sent_E = F.one_hot(chosen_SK, len(self.experts)).sum(dim=1).float().mean(dim=0) / self.active
        self.balance = len(self.experts) * (sent_E * scores_SE.softmax(dim=-1).mean(dim=0)).sum()
        return out_SC.view_as(x_BTC)


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, config: ModelConfig, *, causal: bool = True) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config, causal=causal)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = SwiGLU(config) if config.experts == 1 else Experts(config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
        return x_BTC + self.mlp(self.mlp_norm(x_BTC))


class ByteModel(nn.Module):
    """Bytes in, logits over the next byte out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(initialise)
        for block in self.blocks:
            # A block begins as the identity: the residual stream grows from what it learns.
            nn.init.zeros_(block.attention.out.weight)
            for mlp in [block.mlp] if config.experts == 1 else block.mlp.experts:
                nn.init.zeros_(mlp.down.weight)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def balance(self) -> Tensor | float:
        """Mean of the blocks' in the last forward pass; 0 without experts."""
        found = [b.mlp.balance for b in self.blocks if isinstance(b.mlp, Experts) and b.mlp.balance is not None]
        return torch.stack(found).mean() if found else 0.0

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """int64 [B, T], T <= context -> logits [B, T, V]."""
        if tokens_BT.shape[1] > self.config.context:
            raise ConfigError(
                f"length={tokens_BT.shape[1]} must be at most the model's context={self.config.context}"
            )
        x_BTC = F.rms_norm(self.embed(tokens_BT), (self.config.width,))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.lm_head(self.norm(x_BTC))


def initialise(module: nn.Module) -> None:
    """First weights of one layer."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)


def build_model(name: str, seed: int) -> ByteModel:
    """The model of that name, fp32 on the CPU; the same weights for the same seed. Global chance is left
    alone."""
    if name not in MODELS:
        raise ConfigError(f"model={name!r} is unknown; use one of {', '.join(MODELS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ByteModel(MODELS[name])
