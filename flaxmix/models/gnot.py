"""GNOT: normalised linear attention and experts gated by position."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Key

from flaxmix import ops
from flaxmix.layers import Linear, Norm, ResidualMLP
from flaxmix.layers.mlp import exact_gelu
from flaxmix.layers.norm import NormKind
from flaxmix.mixers.heads import head_channels, merge, real, split
from flaxmix.models.stack import apply_stack, stack
from flaxmix.ops.stream import align


class _LinearAttention(nnx.Module):
    """W_o linear_attention(Q x, K y, V y)."""

    def __init__(self, channels: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        linear = lambda: Linear(channels, channels, rngs=rngs)
        self.query = linear()
        self.key = linear()
        self.value = linear()
        self.out = linear()

    def __call__(self, x, y, mask, axis_name):
        y = real(y, mask)
        q = split(self.query(x), self.heads)
        k, v = split(self.key(y), self.heads), split(self.value(y), self.heads)
        y = ops.linear_attention(q, k, v, mask=mask, axis_name=axis_name)
        return self.out(merge(y))


class _Gate(nnx.Module):
    """Weights of the experts, softmax(MLP(x))."""

    def __init__(self, inputs: int, hidden: int, experts: int, rngs: nnx.Rngs):
        self.first = Linear(inputs, hidden, rngs=rngs)
        self.hidden = nnx.List([Linear(hidden, hidden, rngs=rngs)])
        self.last = Linear(hidden, experts, rngs=rngs)

    def __call__(self, x):
        h = exact_gelu(self.first(x))
        for layer in self.hidden:
            h = exact_gelu(layer(h))
        return jax.nn.softmax(self.last(h), -1)


class _Block(nnx.Module):
    def __init__(self, inputs, channels, heads, experts, mlp_ratio, norm, rngs):
        norms = lambda: Norm(channels, kind=norm)
        mlps = lambda: stack(
            lambda rngs: ResidualMLP(
                channels,
                int(mlp_ratio * channels),
                channels,
                activation="exact",
                rngs=rngs,
            ),
            experts,
            rngs,
        )
        self.geometry_norm = norms()
        self.field_norm = norms()
        self.cross = _LinearAttention(channels, heads, rngs)
        self.cross_norm = norms()
        self.experts1 = mlps()
        self.self_norm = norms()
        self.attend = _LinearAttention(channels, heads, rngs)
        self.output_norm = norms()
        self.experts2 = mlps()
        self.gate = _Gate(inputs, 2 * channels, experts, rngs)

    def __call__(self, field, *, geometry, points, mask, axis_name):
        weights = self.gate(points).astype(field.dtype)

        def mixture(experts, x):
            y = jax.vmap(lambda expert: expert(x), out_axes=-1)(experts)
            return jnp.einsum("...ce,...e->...c", y, weights)

        x, y = self.geometry_norm(geometry), self.field_norm(field)
        x = geometry + self.cross(x, y, mask, axis_name)
        x = x + self.cross_norm(mixture(self.experts1, x))
        y = self.self_norm(x)
        x = x + self.attend(y, y, mask, axis_name)
        return x + self.output_norm(mixture(self.experts2, x))


class GNOT(nnx.Module):
    """General Neural Operator Transformer (arXiv:2302.14376) as compared in the FLARE
    study (arXiv:2508.12594).

        X = geometry(e),  f = field(e) + placeholder, then in each block
        t = X + cross(norm(X), norm(f)),   t = t + norm(sum_e g_e MLP1_e(t))
        t = t + attend(norm(t), norm(t)),  f = t + norm(sum_e g_e MLP2_e(t))
        y = head(f)

    with normalised linear attention (`ops.linear_attention`) and g = softmax(gate(x)).
    e are the points' features x (unstructured), or with `grid` the distances of each
    grid point to an 8 x 8 grid (structured): then features other than the place reach
    the gate alone. As in the study, every block starts from the same X. O(N C^2) time
    and O(N C) memory.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        channels: int,
        blocks: int,
        heads: int,
        experts: int = 3,
        grid: tuple[int, int] | None = None,
        norm: NormKind = "layer",
        mlp_ratio: float = 2.0,
        remat: bool = False,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        """Initialises weights N(0, 0.02^2), biases 0, and the placeholder uniform
        within [0, 1 / C).

        Args:
            inputs: features of a point, coordinates included.
            outputs: fields at a point.
            channels: width C.
            blocks: depth B.
            heads: number of heads H.
            experts: number of MLPs in each of a block's two mixtures.
            grid: rows and columns of the grid that the points form, row by row, for
                the structured variant; None for the other.
            norm: kind of the norms; the study has "layer".
            mlp_ratio: hidden width of the experts, in units of C. That of the
                embeddings, the gates and the head is 2 C.
            remat: whether the backward pass recomputes each block from its input.
            dtype: what all but embeddings and gates computes in; None means the dtype
                of x.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`, or a size is not
                positive.
        """
        head_channels(channels, heads)
        if experts < 1:
            raise ValueError(f"experts must be at least 1, got {experts}.")
        mlp = lambda inputs, outputs: ResidualMLP(
            inputs, 2 * channels, outputs, activation="exact", rngs=rngs
        )
        embedded = inputs if grid is None else 64
        self.geometry = mlp(embedded, channels)
        self.field = mlp(embedded, channels)
        uniform = jax.random.uniform(rngs.params(), (channels,), jnp.float32)
        self.placeholder = nnx.Param(uniform / channels)
        make = lambda rngs: _Block(
            inputs, channels, heads, experts, mlp_ratio, norm, rngs
        )
        self.blocks = stack(make, blocks, rngs)
        self.head = mlp(channels, outputs)
        self.grid = None if grid is None else tuple(grid)
        self.remat = remat
        self.dtype = None if dtype is None else jnp.dtype(dtype)

    def __call__(
        self,
        x: Float[Array, "*B N I"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
        pos: Float[Array, "... N P"] | None = None,
    ) -> Float[Array, "*B N O"]:
        """Predicts the fields at every point.

        Args:
            x: features of the points.
            mask: True for real points. Masked points do not matter and get 0.
            axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.
            key: of no account.
            pos: what is embedded in place of the distances, in the structured variant.

        Returns:
            The fields, in the dtype of x.

        Raises:
            ValueError: if the points are not those of the grid.
        """
        points = real(x, mask)
        if self.grid is not None and pos is None:
            pos = self._distances(x, axis_name)
        dtype = x.dtype if self.dtype is None else self.dtype
        widen = lambda h: real(jnp.broadcast_to(h, (*x.shape[:-1], h.shape[-1])), mask)
        # Positions are embedded before they go to all items of a batch, which a mask
        # may tell apart.
        e = points if pos is None else pos.astype(x.dtype)
        e = e if mask is None else widen(e)
        geometry = widen(self.geometry(e)).astype(dtype)
        field = widen(self.field(e) + self.placeholder[...].astype(x.dtype))
        # The grid is the same for all items, the points may be shared out.
        field, _ = align(field.astype(dtype), points)
        y = apply_stack(
            self.blocks,
            field,
            remat=self.remat,
            geometry=geometry,
            points=points,
            mask=mask,
            axis_name=axis_name,
        )
        return real(self.head(y).astype(x.dtype), mask)

    def _distances(self, x, axis_name):
        """Of the points on this device to the 8 x 8 grid in the unit square [N, 64]."""
        assert self.grid is not None
        rows, columns = self.grid
        points, shards = x.shape[-2], 1
        place = jnp.arange(points)
        if axis_name is not None:
            shards = lax.axis_size(axis_name)
            place = place + lax.axis_index(axis_name) * points
        if points * shards < rows * columns:
            raise ValueError(
                f"{points * shards} points are not those of a {rows} x {columns} grid."
            )
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        unit = lambda i, n: (i / max(n - 1, 1)).astype(dtype)
        own = unit(place // columns, rows), unit(place % columns, columns)
        line = np.linspace(0, 1, 8)
        other = np.repeat(line, 8), np.tile(line, 8)
        squares = [
            jnp.square(a[:, None] - jnp.asarray(b, dtype))
            for a, b in zip(own, other, strict=True)
        ]
        return jnp.sqrt(sum(squares[1:], squares[0]))
