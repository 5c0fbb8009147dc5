"""FLARE++ in PyTorch, to be timed against; needs the package torch.

Written from the equations of arXiv:2608.11519, with its fused attention calls. Same
sizes, same parameters, plain eager mode.
"""

import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F  # pyright: ignore[reportMissingImports]


class _MLP(nn.Module):
    def __init__(self, inputs, hidden, outputs, layers, skip_in, skip_out):
        super().__init__()
        self.first, self.last = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
        self.hidden = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.skip_in, self.skip_out = skip_in, skip_out

    def forward(self, x):
        gelu = lambda a: F.gelu(a, approximate="tanh")
        h = gelu(self.first(x))
        h = h + x if self.skip_in else h
        for layer in self.hidden:
            h = h + gelu(layer(h))
        y = self.last(h)
        return y + h if self.skip_out else y


class _Mixer(nn.Module):
    def __init__(self, channels, heads, latents):
        super().__init__()
        self.heads, width = heads, channels // heads
        latent = lambda: nn.Parameter(0.02 * torch.randn(heads, latents, width))
        self.seeds, self.reference = latent(), latent()
        self.gate = nn.Parameter(torch.full((heads, 1, 1), 0.25))
        self.seed_norm, self.key_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        linear = lambda: nn.Linear(channels, channels)
        self.k0, self.k, self.v, self.out = linear(), linear(), linear(), linear()

    def forward(self, x):
        split = lambda a: a.unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        plain = lambda a: F.layer_norm(a, a.shape[-1:])
        attend = F.scaled_dot_product_attention
        many = lambda a: a.expand(len(x), *a.shape)
        k0 = plain(split(self.k0(x)))
        dynamic = attend(many(self.seed_norm(self.seeds)), k0, k0)
        q = plain(self.reference) + torch.sigmoid(self.gate) * dynamic
        k, v = self.key_norm(split(self.k(x))), split(self.v(x))
        y = attend(k, q, attend(q, k, v))
        return self.out(y.transpose(-3, -2).flatten(-2))


class _Block(nn.Module):
    def __init__(self, channels, heads, latents):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.mixer = _Mixer(channels, heads, latents)
        self.mlp = _MLP(channels, 2 * channels, channels, 0, False, False)

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Surrogate(nn.Module):
    """`flaxmix.models.Surrogate` with `mixers.FlarePP`."""

    def __init__(self, inputs, outputs, *, channels, blocks, heads, latents):
        super().__init__()
        self.embed = _MLP(inputs, channels, channels, 2, False, True)
        self.blocks = nn.Sequential(
            *(_Block(channels, heads, latents) for _ in range(blocks))
        )
        self.norm = nn.LayerNorm(channels)
        self.head = _MLP(channels, channels, outputs, 2, True, False)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.embed(x))))


def mixer(batch, points, channels, heads, latents):
    """A call that does one forward and backward pass of a mixer; parameter count.

    Gradients are those of all parameters and of the input.
    """
    torch.manual_seed(0)
    model = _Mixer(channels, heads, latents)
    x = torch.randn(batch, points, channels, requires_grad=True)

    def call():
        model.zero_grad(set_to_none=True)
        x.grad = None
        y = model(x)
        y.backward(y.detach())

    return call, sum(p.numel() for p in model.parameters())


def step(batch, points, inputs, outputs, **sizes):
    """A call that does one forward and backward pass, and its parameter count."""
    torch.manual_seed(0)
    model = Surrogate(inputs, outputs, **sizes)
    x, y = torch.randn(batch, points, inputs), torch.randn(batch, points, outputs)

    def call():
        model.zero_grad(set_to_none=True)
        F.mse_loss(model(x), y).backward()

    return call, sum(p.numel() for p in model.parameters())


def causal_attention(tokens: int, heads: int, width: int):
    """A call that does causal attention forward and backward; parameter count.

    Gradients are those of queries, keys and values, which count as parameters.
    """
    torch.manual_seed(0)
    q, k, v, dy = (torch.randn(1, heads, tokens, width) for _ in range(4))
    arrays = [x.requires_grad_() for x in (q, k, v)]

    def call():
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, arrays, dy)

    return call, sum(x.numel() for x in arrays)
