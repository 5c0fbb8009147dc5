"""Full self-attention as a layer."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from flaxmix import ops
from flaxmix.layers import Linear, Norm
from flaxmix.layers.norm import NormKind
from flaxmix.mixers.heads import head_channels, merge, real, split
from flaxmix.ops.stream import check_dropout


class SelfAttention(nnx.Module):
    """Multi-head self-attention, W_o softmax(q k^T / sqrt(D)) v.

    O(N^2 C) time; memory O(N C) beside one block of scores. 4 C^2 + 4 C parameters.

    N sharded over R devices costs each of them 1 / R of that time and memory. Forward,
    it sends 2 N C / R numbers to the next device R - 1 times; backward, again, and
    R times as many gradients in float32 or wider.
    """

    def __init__(
        self,
        channels: int,
        *,
        heads: int,
        qk_norm: bool = False,
        bias: bool = True,
        attention_dropout: float = 0.0,
        norm: NormKind = "layer",
        rngs: nnx.Rngs,
    ):
        """Initialises weights N(0, 0.02^2) and biases 0.

        Args:
            channels: width C of the points.
            heads: number of heads H.
            bias: whether the queries, keys and values have a bias.
            qk_norm: whether queries and keys are normalised over D, for each head.
            attention_dropout: part of the probabilities of every softmax that is set
                to 0 where a key is given.
            norm: kind of those norms.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`, or a probability is not
                in [0, 1).
        """
        check_dropout(attention_dropout)
        self.attention_dropout = attention_dropout
        width = head_channels(channels, heads)
        self.heads = heads
        self.qkv = Linear(channels, 3 * channels, bias=bias, rngs=rngs)
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
        """Mixes the points of x.

        Args:
            x: points.
            mask: True for real points.
            axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.
            key: drives the dropout; None for none.
        """
        q, k, v = jnp.split(self.qkv(real(x, mask)), 3, -1)
        q, k, v = (split(t, self.heads) for t in (q, k, v))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm.heads(q), self.key_norm.heads(k)
        y, _ = ops.attention(
            *(q, k, v),
            mask=mask,
            dropout=self.attention_dropout,
            key=key,
            axis_name=axis_name,
        )
        return self.out(merge(y))
