"""Causal self-attention as a layer, and what the causal mixers share.

They are called as `mixer(x, layer=0, positions=None, axis_name=None, cache=None)` on x
[*B, T, C]. `positions` [*B, T] is the place of each token in its document, from 1, and
0 for padding, which never matters, even NaN, and gets 0. Documents are contiguous and
do not see each other; None means one of T tokens.

With a cache x is [B, T, C], one document a row, and the result is y and the new cache:
each token is written at slot `positions` - 1 and reads what is before it there. A token
beyond the last slot is not written.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from flaxmix import ops
from flaxmix.layers import Linear
from flaxmix.mixers.heads import head_channels, merge, split
from flaxmix.ops.causal import check_positions
from flaxmix.ops.stream import accumulator


class AttentionCache(NamedTuple):
    """Keys, rotated, and values of the tokens so far."""

    k: Float[Array, "*B S H D"]
    v: Float[Array, "*B S H D"]


class CausalAttention(nnx.Module):
    """Multi-head causal self-attention, W_o softmax(q k^T / sqrt(D)) v.

    q and k have a rotary embedding over the whole head, base 10,000. 4 C^2 parameters.
    O(T^2 C) time; memory O(T C) beside one tile of scores. Its cache holds 2 C numbers
    a token.
    """

    def __init__(self, channels: int, *, heads: int, rngs: nnx.Rngs):
        """Initialises weights N(0, 0.02^2).

        Args:
            channels: width C of the tokens.
            heads: number of heads H.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels` into even widths.
        """
        self.heads, self.width = heads, rotary_width(channels, heads)
        linear = lambda: Linear(channels, channels, bias=False, rngs=rngs)
        self.q, self.k, self.v, self.out = linear(), linear(), linear(), linear()

    def make_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> AttentionCache:
        """An empty cache for `capacity` tokens a row."""
        empty = jnp.zeros((batch, capacity, self.heads, self.width), dtype)
        return AttentionCache(empty, empty)

    def __call__(
        self,
        x: Float[Array, "*B T C"],
        *,
        layer: int | Int[Array, ""] = 0,
        positions: Int[Array, "*B T"] | None = None,
        axis_name: str | None = None,
        cache: AttentionCache | None = None,
    ) -> Any:
        """Mixes the tokens of x; see the module for the arguments.

        `layer` makes no difference; `axis_name` is the mesh axis that T is sharded
        over, in the order of `flaxmix.ops.places`.
        """
        del layer
        x = real_tokens(x, positions, axis_name, cache)
        q, k, v = (split(linear(x), self.heads) for linear in (self.q, self.k, self.v))
        q, k = rotated((q, k), positions, axis_name)
        if cache is not None and positions is not None:
            cache = AttentionCache(
                written(cache.k, k, positions), written(cache.v, v, positions)
            )
            y, _ = ops.causal_attention(q, cache.k, cache.v, stop=positions)
            return self.out(merge(y).astype(x.dtype)), cache
        start = None
        if positions is not None:
            start = ops.places(x.shape[-2], axis_name) + 1 - positions
        y, _ = ops.causal_attention(q, k, v, start=start, axis_name=axis_name)
        return self.out(merge(y))


def rotary_width(channels: int, heads: int) -> int:
    """D = C / H.

    Raises:
        ValueError: if `heads` does not divide `channels` into even widths.
    """
    width = head_channels(channels, heads)
    if width % 2:
        raise ValueError(
            f"the rotary embedding needs an even number of channels a head, got "
            f"{channels=} and {heads=}: {width} each."
        )
    return width


def real_tokens(
    x: Float[Array, "*B T C"],
    positions: Int[Array, "*B T"] | None,
    axis_name: str | None,
    cache: Any,
) -> Float[Array, "*B T C"]:
    """Zeroes padding, so that not even NaN spreads, forward or backward.

    Raises:
        ValueError: if `positions` are no integers of the batch and token axes of x, or
            None with a cache.
        NotImplementedError: if there are a cache and an `axis_name`.
    """
    if cache is not None and axis_name is not None:
        raise NotImplementedError(f"a cache is not sharded, got {axis_name=}.")
    if positions is None:
        if cache is not None:
            raise ValueError("with a cache there must be positions, got None.")
        return x
    check_positions(positions, x.shape[:-1])
    return jnp.where(positions[..., None] > 0, x, 0)


def rotated(
    arrays: tuple[Array, ...],
    positions: Int[Array, "*B T"] | None,
    axis_name: str | None,
) -> tuple[Array, ...]:
    """[*B, T, H, D] with the rotary embedding of places 0, 1 ... in their documents."""
    *batch, tokens, _, width = arrays[0].shape
    place = ops.places(tokens, axis_name) if positions is None else positions - 1
    place = jnp.broadcast_to(place, (*batch, tokens))[..., None]
    angles = ops.rotary_angles(place.astype(accumulator(arrays[0].dtype)), width)
    return tuple(ops.rotate(x, angles) for x in arrays)


def written(
    kept: Float[Array, "B S H D"],
    new: Float[Array, "B T H D"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B S H D"]:
    """A cache with new tokens at slots `positions` - 1; padding is not written."""
    row, slots = jnp.arange(len(kept))[:, None], kept.shape[1]
    slot = jnp.where(positions > 0, positions - 1, slots)
    return kept.at[row, slot].set(new.astype(kept.dtype), mode="drop")
