"""Blocks of a decoder, and the group of them that depth repeats."""

from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from flaxmix.layers import Norm, SwiGLU


class DecoderBlock(nnx.Module):
    """x = x + mixer(norm(x)); x = x + SwiGLU(norm(x)), with RMSNorms."""

    def __init__(
        self,
        channels: int,
        *,
        mixer: Callable[..., nnx.Module],
        hidden: int,
        rngs: nnx.Rngs,
    ):
        """Initialises the block.

        Args:
            channels: width C of the tokens.
            mixer: makes the mixer, as `mixer(channels, rngs=rngs)`.
            hidden: width of the feed-forward layer.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if the mixer or the feed-forward layer rejects a size.
        """
        self.mixer_norm = Norm(channels, kind="rms")
        self.mixer: Any = mixer(channels, rngs=rngs)
        self.mlp_norm = Norm(channels, kind="rms")
        self.mlp = SwiGLU(channels, hidden, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "*B T C"],
        *,
        layer: int | Int[Array, ""] = 0,
        positions: Int[Array, "*B T"] | None = None,
        axis_name: str | None = None,
        cache: Any = None,
    ) -> Any:
        """Applies the block; arguments and result are those of its mixer."""
        y = self.mixer(
            self.mixer_norm(x),
            layer=layer,
            positions=positions,
            axis_name=axis_name,
            cache=cache,
        )
        if cache is not None:
            y, cache = y
        x = x + y
        x = x + self.mlp(self.mlp_norm(x))
        return x if cache is None else (x, cache)


class DecoderGroup(nnx.Module):
    """Blocks of possibly different mixers in turn; a decoder repeats the group."""

    def __init__(self, blocks: Sequence[DecoderBlock]):
        self.blocks = nnx.List(blocks)

    def __call__(
        self,
        x: Float[Array, "*B T C"],
        *,
        repeat: int | Int[Array, ""] = 0,
        positions: Int[Array, "*B T"] | None = None,
        axis_name: str | None = None,
        caches: tuple[Any, ...] | None = None,
    ) -> Any:
        """Applies the blocks.

        Args:
            x: tokens.
            repeat: how often the group came before.
            positions, axis_name: as in `flaxmix.mixers.CausalAttention`.
            caches: one for each block.

        Returns:
            The tokens; with caches, also the new ones.
        """
        first, updated = repeat * len(self.blocks), []
        shared = {"positions": positions, "axis_name": axis_name}
        for i, block in enumerate(self.blocks):
            if caches is None:
                x = block(x, layer=first + i, **shared)
            else:
                x, cache = block(x, layer=first + i, cache=caches[i], **shared)
                updated.append(cache)
        return x if caches is None else (x, tuple(updated))
