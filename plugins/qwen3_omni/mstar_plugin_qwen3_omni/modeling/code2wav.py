"""The codec's decoder: frames of codes to samples, by a causal transformer with a window, then convolutions.

Convolutions see the past only, but each of the last stages ends a step early: the sound of n frames lacks the same
number of samples at its end, however many frames there are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.layers.linear import Embedding, Linear, MergedLinear
from mstar.layers.norm import RMSNorm
from mstar.layers.rotary import RotaryEmbedding, rotate
from mstar_plugin_qwen3_omni.config.speech import VocoderConfig

KERNEL = 7
DILATIONS = (1, 3, 9)


class CausalConv(nn.Conv1d):
    """A convolution over the present and the past; before the beginning there is silence."""

    def __init__(self, channels: int, out: int, *, kernel: int = KERNEL, dilation: int = 1, groups: int = 1) -> None:
        super().__init__(channels, out, kernel, dilation=dilation, groups=groups)
        self.past = (kernel - 1) * dilation

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T) -> (B, out, T)
        return super().forward(functional.pad(x, (self.past, 0)))


class Upsample(nn.ConvTranspose1d):
    """T steps to rate * T, less what the kernel overlaps by at either end."""

    def __init__(self, channels: int, out: int, *, kernel: int, rate: int) -> None:
        super().__init__(channels, out, kernel, stride=rate)
        self.overlap = kernel - rate

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        wide = super().forward(x, output_size)
        return wide[..., self.overlap : wide.shape[-1] - self.overlap].contiguous()


class Snake(nn.Module):
    """x + sin(a x)^2 / b, with a and b of each channel, kept as logarithms: SnakeBeta (BigVGAN, arXiv:2206.04658)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T)
        return x + (1.0 / (self.beta.exp()[:, None] + 1e-9)) * torch.sin(x * self.alpha.exp()[:, None]).square()


class Residual(nn.Module):
    """A dilated convolution and one over channels, added to what enters."""

    def __init__(self, channels: int, *, dilation: int) -> None:
        super().__init__()
        self.act1, self.act2 = Snake(channels), Snake(channels)
        self.conv1 = CausalConv(channels, channels, dilation=dilation)
        self.conv2 = CausalConv(channels, channels, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x))))


class ConvNeXt(nn.Module):
    """A convolution of each channel, then an MLP over channels, scaled and added to what enters (arXiv:2201.03545)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(size, size, groups=size)
        self.norm = nn.LayerNorm(size, eps=1e-6)
        self.pwconv1, self.pwconv2 = Linear(size, 4 * size), Linear(4 * size, size)
        self.gamma = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T)
        inner = self.norm(self.dwconv(x).transpose(1, 2))
        return x + (self.gamma * self.pwconv2(functional.gelu(self.pwconv1(inner)))).transpose(1, 2)


class Layer(nn.Module):
    """Attention over a window of the past and an MLP, each scaled by channel and added to its input."""

    def __init__(self, config: VocoderConfig) -> None:
        super().__init__()
        size, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.heads, self.head_dim = (config.num_heads, config.num_kv_heads, config.num_kv_heads), dim
        self.attention_norm, self.mlp_norm = RMSNorm(size, eps=eps), RMSNorm(size, eps=eps)
        self.qkv = MergedLinear(size, [heads * dim for heads in self.heads], bias=config.attention_bias)
        self.output = Linear(config.num_heads * dim, size, bias=config.attention_bias)
        self.gate_up = MergedLinear(size, (config.intermediate_size,) * 2)
        self.down = Linear(config.intermediate_size, size, bias=False)
        self.attention_scale = nn.Parameter(torch.ones(size))
        self.mlp_scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, is_seen: Tensor) -> Tensor:  # (B, T, C)
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=2)
        q, k, v = (part.transpose(1, 2) for part in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        groups = self.heads[0] // self.heads[1]
        k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=is_seen)
        x = x + self.attention_scale * self.output(seen.transpose(1, 2).flatten(2))
        gate, up = self.gate_up.split(self.gate_up(self.mlp_norm(x)))
        return x + self.mlp_scale * self.down(functional.silu(gate) * up)


class Code2Wav(nn.Module):
    """The whole of it; build it on the meta device and fill it with `weights.speech.load_vocoder`."""

    def __init__(self, config: VocoderConfig) -> None:
        super().__init__()
        self.config = config
        size, width = config.hidden_size, config.width
        self.embedding = Embedding(config.num_groups * config.codebook_size, size)
        self.rotary = RotaryEmbedding(config.head_dim, theta=config.rope_theta)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.upsample = nn.ModuleList(
            nn.Sequential(Upsample(size, size, kernel=rate, rate=rate), ConvNeXt(size)) for rate in config.upsampling
        )
        stages: list[nn.Module] = [CausalConv(size, width)]
        for rate in config.rates:
            residuals = [Residual(width // 2, dilation=dilation) for dilation in DILATIONS]
            upsample = Upsample(width, width // 2, kernel=2 * rate, rate=rate)
            stages.append(nn.Sequential(Snake(width), upsample, *residuals))
            width //= 2
        self.stages = nn.Sequential(*stages, Snake(width), CausalConv(width, 1))

    def forward(self, codes: Tensor) -> Tensor:
        """(B, n, groups) codes of n frames -> (B, num_samples(n)) in -1..1; n is at least 1."""
        x = self.transform(self.embed(codes)).transpose(1, 2)
        for stage in self.upsample:
            x = stage(x)
        return self.stages(x)[:, 0].clamp(-1, 1)

    def embed(self, codes: Tensor) -> Tensor:
        """(B, n, groups) -> (B, n, C), the mean over each frame's codes."""
        offsets = torch.arange(self.config.num_groups, device=codes.device) * self.config.codebook_size
        return self.embedding(codes + offsets).mean(2)

    def transform(self, x: Tensor) -> Tensor:
        """(B, n, C) -> (B, n, C)."""
        places = torch.arange(x.shape[1], device=x.device)
        distance = places[:, None] - places
        is_seen = (distance >= 0) & (distance < self.config.window)
        cos, sin = (part.to(x.dtype) for part in self.rotary(places))
        for layer in self.layers:
            x = layer(x, cos, sin, is_seen)
        return self.norm(x)
