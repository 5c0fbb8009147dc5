"""FLARE++ with every part switchable, for ablations."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from flaxmix import ops
from flaxmix.layers import Linear, Norm
from flaxmix.layers.norm import NormKind
from flaxmix.mixers.heads import check_latents, head_channels, merge, real, split
from flaxmix.ops.flarepp import blend
from flaxmix.ops.stream import check_dropout

NormUse = bool | Literal["affine"]
Gate = Literal["sigmoid", "raw"]


class AblatedFlarePP(nnx.Module):
    """FLARE++ (arXiv:2608.11519) with norms, biases and parts that can be left out.

        k0 = N(K0 x),  v0 = N(V0 x),  q = softmax_N(N(seeds) k0^T / sqrt(D)) v0
        with a gate:  q = N(reference) + w q,  w = sigmoid(gate) or gate itself
        k = N(K x),  q = N(q),  v = V x
        z = softmax_N(q k^T / sqrt(D)) v,  y = W_o softmax_M(k q^T / sqrt(D)) z

    Each N is False (left out), True (without parameters) or "affine". The defaults
    are FLARE++ itself. `share=True` takes K0 x for V0 x, before its norm. The
    authors' form of the gate is "raw". O(N (C^2 + M C)) time, O(N C) memory,
    4 or 5 C^2 + C + 2 M C + H parameters, besides biases and norms.
    """

    def __init__(
        self,
        channels: int,
        *,
        heads: int,
        latents: int,
        seed_norm: NormUse = "affine",
        synthesis_key_norm: NormUse = True,
        synthesis_value_norm: NormUse = True,
        reference_norm: NormUse = True,
        query_norm: NormUse = False,
        key_norm: NormUse = "affine",
        gate: Gate | None = "sigmoid",
        gate_logit: float = 0.25,
        share: bool = True,
        synthesis_key_bias: bool = True,
        synthesis_value_bias: bool = True,
        key_bias: bool = True,
        value_bias: bool = True,
        synthesis_key_identity: bool = True,
        synthesis_value_identity: bool = True,
        key_identity: bool = True,
        value_identity: bool = True,
        attention_dropout: float = 0.0,
        norm: NormKind = "layer",
        rngs: nnx.Rngs,
    ):
        """Initialises weights N(0, 0.02^2), plus the identity where asked for.

        Args:
            channels: width C of the points.
            heads: number of heads H.
            latents: number of latents M, for each head.
            seed_norm: norm of the seeds.
            synthesis_key_norm: norm of k0.
            synthesis_value_norm: norm of v0.
            reference_norm: norm of the reference queries; needs a gate.
            query_norm: norm of the routing queries.
            key_norm: norm of the routing keys.
            gate: "sigmoid" or "raw"; None routes by the synthesised queries alone.
            gate_logit: initial gate of every head.
            share: whether V0 is K0.
            synthesis_key_bias: whether K0 has a bias.
            synthesis_value_bias: whether V0 has a bias.
            key_bias: whether K has a bias.
            value_bias: whether V has a bias.
            synthesis_key_identity: whether K0 starts near the identity.
            synthesis_value_identity: whether V0 starts near the identity.
            key_identity: whether K starts near the identity.
            value_identity: whether V starts near the identity.
            attention_dropout: part of the probabilities of every softmax that is set
                to 0 where a key is given.
            norm: kind of every norm in the mixer.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`, a size is not
                positive, a choice is none of those above, or a probability is not in
                [0, 1).
        """
        width = head_channels(channels, heads)
        check_latents(latents)
        check_dropout(attention_dropout)
        if gate not in (None, "sigmoid", "raw"):
            raise ValueError(f"gate must be None, 'sigmoid' or 'raw', got {gate!r}.")
        self.heads, self.gate_kind = heads, gate
        self.attention_dropout = attention_dropout

        def head_norm(name, use):
            if use not in (True, False, "affine"):
                raise ValueError(
                    f"{name} must be True, False or 'affine', got {use!r}."
                )
            return Norm(width, kind=norm, affine=use == "affine") if use else None

        def linear(bias, identity):
            init = "identity" if identity else "normal"
            return Linear(channels, channels, bias=bias, init=init, rngs=rngs)

        normal = nnx.initializers.normal(0.02)
        latent = lambda: nnx.Param(normal(rngs.params(), (heads, latents, width)))
        self.seeds = latent()
        self.reference = None if gate is None else latent()
        logits = jnp.full(heads, gate_logit, jnp.float32)
        self.gate = None if gate is None else nnx.Param(logits)
        self.synthesis_key = linear(synthesis_key_bias, synthesis_key_identity)
        own = (synthesis_value_bias, synthesis_value_identity)
        self.synthesis_value = None if share else linear(*own)
        self.key = linear(key_bias, key_identity)
        self.value = linear(value_bias, value_identity)
        self.seed_norm = head_norm("seed_norm", seed_norm)
        self.synthesis_key_norm = head_norm("synthesis_key_norm", synthesis_key_norm)
        self.synthesis_value_norm = head_norm(
            "synthesis_value_norm", synthesis_value_norm
        )
        use = reference_norm if gate is not None else False
        self.reference_norm = head_norm("reference_norm", use)
        self.query_norm = head_norm("query_norm", query_norm)
        self.key_norm = head_norm("key_norm", key_norm)
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
        first, second = (None, None) if key is None else jax.random.split(key)
        shared = {
            "mask": mask,
            "axis_name": axis_name,
            "dropout": self.attention_dropout,
        }
        points = lambda layer: split(layer(x), self.heads)
        k0 = points(self.synthesis_key)
        v0 = k0 if self.synthesis_value is None else points(self.synthesis_value)
        q = ops.synthesize(
            _rows(self.seed_norm, self.seeds[...]),
            _heads(self.synthesis_key_norm, k0),
            _heads(self.synthesis_value_norm, v0),
            **shared,
            key=first,
        )
        if self.gate is not None and self.reference is not None:
            weight = self.gate[...]
            if self.gate_kind == "sigmoid":
                weight = jax.nn.sigmoid(weight)
            q = blend(_rows(self.reference_norm, self.reference[...]), weight, q)
        q = _rows(self.query_norm, q)
        k = _heads(self.key_norm, points(self.key))
        y = ops.flare(q, k, points(self.value), **shared, key=second)
        return self.out(merge(y))


def _rows(norm, x):
    return x if norm is None else norm(x)


def _heads(norm, x):
    return x if norm is None else norm.heads(x)
