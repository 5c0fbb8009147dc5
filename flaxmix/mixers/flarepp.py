"""FLARE++ and simplified FLARE++ as layers (arXiv:2608.11519)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from flaxmix import ops
from flaxmix.layers import Linear, Norm
from flaxmix.layers.norm import NormKind
from flaxmix.mixers.heads import (
    check_latents,
    head_channels,
    merge,
    real,
)
from flaxmix.mixers.streamed import flare_in_blocks, flattened, in_blocks
from flaxmix.ops.affine import wide
from flaxmix.ops.flarepp import blend
from flaxmix.ops.stream import check_dropout
from flaxmix.ops.streamed import gather_from


class FlarePP(nnx.Module):
    """FLARE++: routing queries synthesised from the input.

        k0 = N(K0 x),  v0 = k0 (shared) or N(V0 x)
        q = N(reference) + sigmoid(gate) softmax_N(Na(seeds) k0^T / sqrt(D)) v0
        k = Na(K x),  v = V x
        z = softmax_N(q k^T / sqrt(D)) v,  y = W_o softmax_M(k q^T / sqrt(D)) z

    N is an affine-free norm over the D channels of a head, Na one with parameters,
    shared by the heads. With RMS norms and g = sigmoid(gate), RMS(q) is in
    [1 - g, 1 + g]. O(N (C^2 + M C)) time, O(N C) memory, and 4 C^2 + 4 C + 2 M C + H
    parameters, plus 4 D (LayerNorm) or 2 D (RMSNorm); C^2 + C more if not shared.
    """

    def __init__(
        self,
        channels: int,
        *,
        heads: int,
        latents: int,
        share: bool = True,
        gate_logit: float = 0.25,
        key_norm: bool = True,
        reference_norm: bool = True,
        attention_dropout: float = 0.0,
        norm: NormKind = "layer",
        rngs: nnx.Rngs,
    ):
        """Initialises projections near the identity and latents N(0, 0.02^2).

        Args:
            channels: width C of the points.
            heads: number of heads H.
            latents: number of latents M, for each head.
            share: whether the synthesis values are the synthesis keys.
            gate_logit: initial gate of every head; 0.25 weighs the synthesised part
                by 0.56, -80 switches it off.
            key_norm: whether routing keys are normalised.
            reference_norm: whether the reference queries are normalised.
            attention_dropout: part of the probabilities of every softmax that is set
                to 0 where a key is given.
            norm: kind of every norm in the mixer.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`, a size is not
                positive, or a probability is not in [0, 1).
        """
        check_dropout(attention_dropout)
        self.attention_dropout = attention_dropout
        width = head_channels(channels, heads)
        check_latents(latents)
        self.heads = heads
        normal = nnx.initializers.normal(0.02)
        latent = lambda: nnx.Param(normal(rngs.params(), (heads, latents, width)))
        near = lambda: Linear(channels, channels, init="identity", rngs=rngs)
        self.seeds = latent()
        self.reference = latent()
        self.gate = nnx.Param(jnp.full(heads, gate_logit, jnp.float32))
        self.synthesis_key = near()
        self.synthesis_value = None if share else near()
        self.key = near()
        self.value = near()
        self.seed_norm = Norm(width, kind=norm)
        self.key_norm = Norm(width, kind=norm) if key_norm else None
        self.plain_norm = Norm(width, kind=norm, affine=False)
        self.reference_norm = reference_norm
        self.out = Linear(channels, channels, rngs=rngs)

    def synthesis(self, x: Float[Array, "*B N C"]) -> tuple[Array, Array | None]:
        """Synthesis keys and values [*B, N, H, D]; values None for the keys."""
        norm, v0 = self.plain_norm, self.synthesis_value
        keys = norm.heads(self.synthesis_key.heads(x, self.heads))
        return keys, None if v0 is None else norm.heads(v0.heads(x, self.heads))

    def keys(self, x: Float[Array, "*B N C"]) -> Float[Array, "*B N H D"]:
        """Routing keys."""
        k = self.key.heads(x, self.heads)
        return k if self.key_norm is None else self.key_norm.heads(k)

    def values(self, x: Float[Array, "*B N C"]) -> Float[Array, "*B N H D"]:
        """Routing values."""
        return self.value.heads(x, self.heads)

    def _parameters(self) -> tuple[Array, dict[str, Any]]:
        """Seeds, and what the synthesised queries are blended with."""
        reference = self.reference[...]
        if self.reference_norm:
            reference = self.plain_norm(reference)
        seeds = self.seed_norm(self.seeds[...])
        return seeds, {"reference": reference, "gate": self.gate[...]}

    def queries(
        self,
        x: Float[Array, "*B N C"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
    ) -> Float[Array, "*B H M D"]:
        """The routing queries that x gives rise to."""
        seeds, parts = self._parameters()
        return ops.synthesize(
            *(seeds, *self.synthesis(real(x, mask))),
            **parts,
            mask=mask,
            axis_name=axis_name,
        )

    def __call__(
        self,
        x: Float[Array, "*B N C"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B N C"]:
        x = real(x, mask)
        seeds, parts = self._parameters()
        if in_blocks(x, seeds, key, self.attention_dropout):

            def mix(x, mask):
                dynamic, _ = gather_from(
                    *(FlarePP.synthesis, self, seeds, x), mask=mask, axis_name=axis_name
                )
                weight = jax.nn.sigmoid(wide(parts["gate"]))
                q = blend(parts["reference"], weight, dynamic)
                return flare_in_blocks(self, q, x, mask=mask, axis_name=axis_name)

            return flattened(mix, x, mask)
        y = ops.flarepp(
            *(seeds, *self.synthesis(x), self.keys(x), self.values(x)),
            **parts,
            mask=mask,
            axis_name=axis_name,
            dropout=self.attention_dropout,
            key=key,
        )
        return self.out(merge(y))


class SimplifiedFlarePP(nnx.Module):
    """Simplified FLARE++: the synthesised queries alone route, without a gate.

        k0 = Na(x + K0 x),  v0 = x + V0 x (or x + K0 x, shared)
        q = softmax_N(Na(seeds) k0^T / sqrt(D)) v0
        k = x + K x,  v = x + V x
        z = softmax_N(q k^T / sqrt(D)) v,  y = W_o softmax_M(k q^T / sqrt(D)) z

    O(N (C^2 + M C)) time, O(N C) memory, 5 C^2 + 5 C + M C parameters, plus 4 D
    (LayerNorm) or 2 D (RMSNorm); C^2 + C fewer if shared. This is what the first
    version of arXiv:2608.11519 called FLARE++.
    """

    def __init__(
        self,
        channels: int,
        *,
        heads: int,
        latents: int,
        share: bool = False,
        qk_norm: bool = False,
        attention_dropout: float = 0.0,
        norm: NormKind = "layer",
        rngs: nnx.Rngs,
    ):
        """Initialises weights and seeds N(0, 0.02^2) and biases 0.

        Args:
            channels: width C of the points.
            heads: number of heads H.
            latents: number of latents M, for each head.
            share: whether the synthesis values are the keys before their norm.
            qk_norm: whether routing queries and keys are normalised.
            attention_dropout: part of the probabilities of every softmax that is set
                to 0 where a key is given.
            norm: kind of every norm in the mixer.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`, a size is not
                positive, or a probability is not in [0, 1).
        """
        check_dropout(attention_dropout)
        self.attention_dropout = attention_dropout
        width = head_channels(channels, heads)
        check_latents(latents)
        self.heads = heads
        init = nnx.initializers.normal(0.02)
        self.seeds = nnx.Param(init(rngs.params(), (heads, latents, width)))
        skip = lambda: Linear(channels, channels, skip=True, rngs=rngs)
        self.synthesis_key = skip()
        self.synthesis_value = None if share else skip()
        self.key = skip()
        self.value = skip()
        self.seed_norm = Norm(width, kind=norm)
        self.synthesis_norm = Norm(width, kind=norm)
        self.query_norm = Norm(width, kind=norm) if qk_norm else None
        self.key_norm = Norm(width, kind=norm) if qk_norm else None
        self.out = Linear(channels, channels, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "*B N C"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B N C"]:
        x = real(x, mask)
        seeds = self.seed_norm(self.seeds[...])
        if in_blocks(x, seeds, key, self.attention_dropout):

            def mix(x, mask):
                q, _ = gather_from(
                    *(SimplifiedFlarePP.synthesis, self, seeds, x),
                    mask=mask,
                    axis_name=axis_name,
                )
                q = q if self.query_norm is None else self.query_norm(q)
                return flare_in_blocks(self, q, x, mask=mask, axis_name=axis_name)

            return flattened(mix, x, mask)
        first, second = (None, None) if key is None else jax.random.split(key)
        shared: Any = {
            "mask": mask,
            "axis_name": axis_name,
            "dropout": self.attention_dropout,
        }
        q = ops.synthesize(seeds, *self.synthesis(x), **shared, key=first)
        q = q if self.query_norm is None else self.query_norm(q)
        y = ops.flare(q, self.keys(x), self.values(x), **shared, key=second)
        return self.out(merge(y))

    def synthesis(self, x: Float[Array, "*B N C"]) -> tuple[Array, Array]:
        """Synthesis keys and values [*B, N, H, D]."""
        keys = self.synthesis_key.heads(x, self.heads)
        v0 = self.synthesis_value
        values = keys if v0 is None else v0.heads(x, self.heads)
        return self.synthesis_norm.heads(keys), values

    def keys(self, x: Float[Array, "*B N C"]) -> Float[Array, "*B N H D"]:
        """Routing keys."""
        k = self.key.heads(x, self.heads)
        return k if self.key_norm is None else self.key_norm.heads(k)

    def values(self, x: Float[Array, "*B N C"]) -> Float[Array, "*B N H D"]:
        """Routing values."""
        return self.value.heads(x, self.heads)
