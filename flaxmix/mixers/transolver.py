"""Physics attention of Transolver, Transolver++ and Transolver-3 as layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from flaxmix import ops
from flaxmix.layers import Linear, ResidualMLP
from flaxmix.layers.mlp import exact_gelu
from flaxmix.mixers.heads import check_latents, head_channels, merge, real, split
from flaxmix.ops.affine import wide


class _Slices(nnx.Module):
    """What the three share: slices, attention between their tokens, output."""

    def __init__(self, channels: int, heads: int, latents: int, rngs: nnx.Rngs):
        width = head_channels(channels, heads)
        check_latents(latents)
        self.heads = heads
        self.slice = Linear(width, latents, rngs=rngs)
        token = lambda: Linear(width, width, bias=False, rngs=rngs)
        self.query = token()
        self.key = token()
        self.value = token()
        self.out = Linear(channels, channels, rngs=rngs)

    def _mix(self, k, v, *, factor: Any = 1.0, rate=None, **options):
        """Mixes by slice weights softmax_M(factor rate (W_s k + b_s) + rate noise).

        factor is a scalar or [H]; rate [*B, N, H] or None.
        """
        bias = self.slice.bias
        assert bias is not None
        # The bias is one more channel, which is 1 for every point.
        q = jnp.concatenate([self.slice.kernel[...], bias[...][None]]).T
        q = jnp.broadcast_to(factor, self.heads)[:, None, None] * q
        k = jnp.concatenate([k, jnp.ones_like(k[..., :1])], -1)
        k = k if rate is None else (wide(k) * rate[..., None]).astype(k.dtype)
        kernels = {
            "query": self.query.kernel[...],
            "key": self.key.kernel[...],
            "value": self.value.kernel[...],
        }
        y = ops.transolver(k, q, v, **kernels, rate=rate, **options)
        return self.out(merge(y))


class _Tempered(_Slices):
    """What Transolver and Transolver-3 share: a temperature for each head.

    A subclass makes its projections, and projects to what decides the slices, what is
    averaged, and further arguments of `ops.transolver`.
    """

    _make_projections: Callable[..., None]
    _projected: Callable[..., tuple[Any, Any, dict[str, Any]]]

    def __init__(
        self,
        channels: int,
        *,
        heads: int,
        latents: int,
        clamp: bool = True,
        rngs: nnx.Rngs,
    ):
        """Initialises weights N(0, 0.02^2), biases 0 and temperatures 0.5.

        Args:
            channels: width C of the points.
            heads: number of heads H.
            latents: number of slices M, for each head.
            clamp: whether temperatures are kept within 0.1 and 5.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`, or a size is not
                positive.
        """
        super().__init__(channels, heads, latents, rngs)
        self._make_projections(channels, rngs)
        self.temperature = nnx.Param(jnp.full(heads, 0.5, jnp.float32))
        self.clamp = clamp

    def __call__(
        self,
        x: Float[Array, "*B N C"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B N C"]:
        k, v, options = self._projected(real(x, mask))
        t = self.temperature[...]
        factor = 1 / (jnp.clip(t, 0.1, 5.0) if self.clamp else t)
        options |= {"mask": mask, "axis_name": axis_name}
        return self._mix(k, v, factor=factor, **options)


class Transolver(_Tempered):
    """Transolver's physics attention (arXiv:2402.02366), without its convolutions.

        w = softmax_M((W_s P x + b_s) / tau),  t = sum_N w (F x) / (sum_N w + 1e-5)
        y = W_o sum_M w softmax_M(t W_q (t W_k)^T / sqrt(D)) t W_v

    for each head, tau being its temperature within 0.1 and 5. W_s, W_q, W_k and W_v
    are shared by the heads. O(N (C^2 + M C)) time, O(N C) memory: weights are
    recomputed block by block. 3 C^2 + 3 C + D M + M + 3 D^2 + H parameters.

    The paper starts W_s as an orthogonal matrix; here, as in the comparison of
    arXiv:2608.11519, it starts like every other weight.
    """

    def _make_projections(self, channels, rngs):
        self.point = Linear(channels, channels, rngs=rngs)
        self.feature = Linear(channels, channels, rngs=rngs)

    def _projected(self, x):
        return split(self.point(x), self.heads), split(self.feature(x), self.heads), {}


class Transolver3(_Tempered):
    """Transolver-3's physics attention, without tiles and caches.

        w = softmax_M((W_s P x + b_s) / tau),  t = F sum_N w x / (sum_N w + 1e-5) + b_F
        y = W_o sum_M w softmax_M(t W_q (t W_k)^T / sqrt(D)) t W_v

    for each head. The paper forms W_s P and averages x itself, which saves memory on
    accelerators; here the same function is evaluated as Transolver's is, which costs
    O(N (C^2 + M C)) instead of O(N H M C) operations: F sum_N w x = sum_N w (F x). It
    differs from Transolver in b_F, added after the average, and in one projection for
    P and F. O(N C) memory. 3 C^2 + 3 C + D M + M + 3 D^2 + H parameters.

    The authors do not bound tau, and a head whose temperature gets near 0 gives
    infinite scores; `clamp=False` does the same.
    """

    def _make_projections(self, channels, rngs):
        self.project = Linear(channels, 2 * channels, rngs=rngs)

    def _projected(self, x):
        kernel, bias = self.project.kernel[...].astype(x.dtype), self.project.bias
        assert bias is not None
        offset, shift = jnp.split(bias[...], 2)
        v, k = jnp.split(x @ kernel, 2, -1)
        k = split(k + shift.astype(x.dtype), self.heads)
        offset = offset.reshape(self.heads, -1)
        return k, split(v, self.heads), {"offset": offset}


class TransolverPP(_Slices):
    """Transolver++'s physics attention (arXiv:2502.02414).

        u = P x,  tau = max(gelu(MLP(u)) + offset, 0.01) for each point and head
        w = softmax_M((W_s u + b_s + g) / tau),  t = sum_N w u / (sum_N w + 1e-5)
        y = W_o sum_M w softmax_M(t W_q (t W_k)^T / sqrt(D)) t W_v

    with Gumbel noise g in training. W_s, the MLP (D to M to 1, exact GELU), W_q, W_k
    and W_v are shared by the heads. O(N (C^2 + M C)) time. Weights and noise are
    recomputed block by block, but the MLP's hidden layer, N H M numbers, is held.
    2 C^2 + 2 C + 2 (D M + M) + M + 1 + 3 D^2 + H
    parameters.

    The authors' code draws noise in evaluation too, so that the same input gives
    another output each time. Here noise is drawn where a key is given, as training
    does. But a model that was trained with noise needs it: `evaluation_noise` draws it
    without a key, too, always the same for the first real point, for the second and
    so on, whatever the batch, the padding and the sharding.
    """

    def __init__(
        self,
        channels: int,
        *,
        heads: int,
        latents: int,
        evaluation_noise: bool = False,
        rngs: nnx.Rngs,
    ):
        """Initialises weights N(0, 0.02^2), biases 0 and offsets 0.5.

        Args:
            channels: width C of the points.
            heads: number of heads H.
            latents: number of slices M, for each head.
            evaluation_noise: whether noise is drawn without a key, too; train.pde has
                it on unless told otherwise.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`, or a size is not
                positive.
        """
        super().__init__(channels, heads, latents, rngs)
        width = channels // heads
        self.point = Linear(channels, channels, rngs=rngs)
        self.temperature_head = ResidualMLP(
            width, latents, 1, activation="exact", rngs=rngs
        )
        self.offset = nnx.Param(jnp.full(heads, 0.5, jnp.float32))
        self.evaluation_noise = evaluation_noise

    def __call__(
        self,
        x: Float[Array, "*B N C"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
        gumbel_u: Float[Array, "*B H N M"] | Key[Array, "..."] | None = None,
    ) -> Float[Array, "*B N C"]:
        """Mixes the points of x.

        Args:
            x: points.
            mask: True for real points.
            axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.
            key: draws the noise, another for each item; None for none.
            gumbel_u: uniforms in [0, 1) to make the noise of, in place of `key`; or a
                key that draws the same for all items, see `ops.pool`.
        """
        noise = gumbel_u
        if noise is None and key is not None:
            typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
            # jax.random.PRNGKey makes the other kind.
            own: Any = key if typed else jax.random.wrap_key_data(key)
            noise = jax.random.split(own, x.shape[:-2])
        if noise is None and self.evaluation_noise:
            noise = jax.random.key(0)
        u = split(self.point(real(x, mask)), self.heads)
        t = wide(exact_gelu(self.temperature_head(u)))[..., 0]
        rate = 1 / jnp.maximum(t + wide(self.offset[...]), 0.01)
        options = {"mask": mask, "axis_name": axis_name, "noise": noise}
        return self._mix(u, u, rate=rate, **options)
