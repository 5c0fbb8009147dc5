"""Attention to anchors (AB-UPT) as a layer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from flaxmix import ops
from flaxmix.layers import Linear
from flaxmix.mixers.heads import check_latents, head_channels, merge, real, split
from flaxmix.ops.stream import spread


class AnchorAttention(nnx.Module):
    """AB-UPT's anchor attention (arXiv:2502.09692), on a surface without a geometry
    branch.

        q = R Q x,  k = R K x_A,  v = V x_A,  y = W_o softmax_A(q k^T / sqrt(D)) v

    x_A being A of the points, drawn at random, and R the rotary embedding of their
    coordinates. O(N (C^2 + A C)) time, O(N C) memory, 4 C^2 + 4 C parameters.

    Where a model has several layers, it draws the anchors once for all of them.
    """

    def __init__(
        self,
        channels: int,
        *,
        heads: int,
        latents: int,
        coordinate_scale: float = 1000.0,
        rngs: nnx.Rngs,
    ):
        """Initialises weights N(0, 0.02^2) and biases 0.

        Args:
            channels: width C of the points.
            heads: number of heads H.
            latents: number of anchors A; all points if there are fewer.
            coordinate_scale: factor on the coordinates, which are meant to be in
                [0, 1].
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`, or a size is not
                positive.
        """
        head_channels(channels, heads)
        check_latents(latents)
        self.heads, self.latents = heads, latents
        self.coordinate_scale = coordinate_scale
        self.qkv = Linear(channels, 3 * channels, rngs=rngs)
        self.out = Linear(channels, channels, rngs=rngs)

    def check_axes(self, axes: int) -> None:
        """Raises ValueError if a head has too few channels for so many axes."""
        ops.rotary_frequencies(self.qkv.kernel.shape[-2] // self.heads, axes)

    def draw(
        self,
        points: int,
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Int[Array, "... A"], Bool[Array, "... A"] | None]:
        """Anchors for N points, by `ops.draw_anchors`: the same ones without a key."""
        key = jax.random.key(0) if key is None else key
        return ops.draw_anchors(
            key, points, self.latents, mask=mask, axis_name=axis_name
        )

    def __call__(
        self,
        x: Float[Array, "*B N C"],
        *,
        coords: Float[Array, "*B N A"],
        anchors: Int[Array, "... M"] | None = None,
        permutation: Int[Array, "... N"] | None = None,
        mask: Bool[Array, "*B N"] | None = None,
        anchor_mask: Bool[Array, "... M"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B N C"]:
        """Mixes the points of x.

        Args:
            x: points.
            coords: their coordinates.
            anchors: places of the anchors among all points, [A] or [*B, A].
            permutation: in place of `anchors`: an order of the points, the first A of
                which are the anchors.
            mask: True for real points. Anchors given with a mask have to be real.
            anchor_mask: True for anchors that count, with `anchors`.
            axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.
            key: draws the anchors if they are not given; None for the same ones
                every time.

        Raises:
            ValueError: if D is odd or leaves an axis fewer than two channels.
        """
        x, coords = real(x, mask), real(coords, mask)
        if anchors is None and permutation is not None:
            anchors = permutation[..., : self.latents]
        if anchors is None:
            anchors, anchor_mask = self.draw(
                x.shape[-2], mask=mask, axis_name=axis_name, key=key
            )
        width = x.shape[-1] // self.heads
        angles = ops.rotary_angles(self.coordinate_scale * coords, width)
        chosen = lambda a: spread(
            ops.take_points(a, anchors, axis_name=axis_name), axis_name
        )
        query, rest = jnp.split(self.qkv.kernel[...].astype(x.dtype), [x.shape[-1]], 1)
        assert self.qkv.bias is not None
        shift, offset = jnp.split(self.qkv.bias[...].astype(x.dtype), [x.shape[-1]])
        k, v = jnp.split(chosen(x) @ rest + offset, 2, -1)
        k, v = split(k, self.heads), split(v, self.heads)
        q = ops.rotate(split(x @ query + shift, self.heads), angles)
        if anchor_mask is not None:
            anchor_mask = jnp.broadcast_to(anchor_mask, k.shape[:-2])
        y = ops.anchor_attention(
            q,
            ops.rotate(k, chosen(angles)),
            v,
            mask=mask,
            anchor_mask=anchor_mask,
            axis_name=axis_name,
        )
        return self.out(merge(y))
