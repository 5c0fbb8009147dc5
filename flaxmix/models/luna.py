"""Luna: a packed sequence goes through the network beside the points."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Key

from flaxmix.layers import Norm, ResidualMLP
from flaxmix.layers.norm import NormKind
from flaxmix.mixers import LunaAttention
from flaxmix.mixers.heads import check_latents
from flaxmix.models.backbone import Backbone
from flaxmix.models.stack import split_key
from flaxmix.ops.stream import align, check_dropout, drop, shard_key


class LunaBlock(nnx.Module):
    """(Y, P) = luna(norm(x), norm(p)); x = x + Y, p = p + P; x = x + MLP(norm(x))."""

    def __init__(
        self,
        channels: int,
        *,
        heads: int,
        norm: NormKind = "layer",
        mlp_ratio: float = 2.0,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        """Initialises the block; see `Luna`."""
        check_dropout(dropout)
        self.dropout = dropout
        self.mixer_norm = Norm(channels, kind=norm)
        self.packed_norm = Norm(channels, kind=norm)
        self.mixer = LunaAttention(channels, heads=heads, rngs=rngs)
        self.mlp_norm = Norm(channels, kind=norm)
        hidden = int(mlp_ratio * channels)
        self.mlp = ResidualMLP(channels, hidden, channels, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "*B N C"],
        p: Float[Array, "*B M C"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "*B N C"], Float[Array, "*B M C"]]:
        """Returns x and p after the block."""
        y, packed = self.mixer(
            self.mixer_norm(x), self.packed_norm(p), mask=mask, axis_name=axis_name
        )
        x = x + drop(y, shard_key(key, axis_name), self.dropout, 0)
        return x + self.mlp(self.mlp_norm(x)), p + packed


class Luna(Backbone):
    """Luna (arXiv:2106.01540) in the shared backbone of arXiv:2608.11519.

    A packed sequence of M tokens, the same at first for every input, reads the points
    in each block and is read by them; see `mixers.LunaAttention`. 7 C^2 + 7 C
    parameters a block for the attention, one more norm, and M C once.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        channels: int,
        blocks: int,
        heads: int,
        latents: int,
        norm: NormKind = "layer",
        mlp_ratio: float = 2.0,
        io_layers: int = 2,
        dropout: float = 0.0,
        remat: bool = False,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        """Initialises the packed sequence N(0, 1 / C), the rest as `Surrogate`.

        `latents` is the length M of the packed sequence; the other arguments are
        those of `Surrogate`.
        """
        check_latents(latents)
        super().__init__(
            inputs,
            outputs,
            channels=channels,
            blocks=blocks,
            block=lambda rngs: LunaBlock(
                channels,
                heads=heads,
                norm=norm,
                mlp_ratio=mlp_ratio,
                dropout=dropout,
                rngs=rngs,
            ),
            norm=norm,
            io_layers=io_layers,
            remat=remat,
            dtype=dtype,
            rngs=rngs,
        )
        init = nnx.initializers.normal(channels**-0.5)
        self.packed = nnx.Param(init(rngs.params(), (latents, channels)))

    def __call__(
        self,
        x: Float[Array, "*B N I"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B N O"]:
        """Predicts the fields at every point; see `Surrogate`."""
        h = self._start(x, mask)
        p = self.packed[...].astype(h.dtype)
        p, _ = align(jnp.broadcast_to(p, (*h.shape[:-2], *p.shape)), h)
        each = {"key": split_key(key, self.depth)}
        h, _ = self._blocks((h, p), each=each, mask=mask, axis_name=axis_name)
        return self._finish(h, x, mask)
