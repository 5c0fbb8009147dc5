"""Inputs of Relation and of causal attention: tokens, documents, shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

from flaxmix.parameters import named_parameters, with_parameters

# One case by default, the others in the slow set: devices, and whether documents are
# packed.
DEVICES = [
    (4, True),
    *(
        pytest.param(n, packed, marks=pytest.mark.slow)
        for n in (1, 2, 4, 8)
        for packed in (False, True)
        if (n, packed) != (4, True)
    ),
]


def filled(make, dtype):
    """What `make` makes, with parameters far from 0 and from each other."""
    abstract = nnx.eval_shape(make)
    # Norms and retentions around what they begin with.
    base = {"scale": 1.0, "A_log": 1.0, "dt_bias": -2.0}
    fill = lambda i, k, p: base.get(k.split(".")[-1], 0.0) + 0.3 * draw(*p, seed=i)
    shapes = {k: p.shape for k, p in named_parameters(abstract).items()}
    arrays = {
        k: jnp.asarray(fill(i, k, p), dtype) for i, (k, p) in enumerate(shapes.items())
    }
    return with_parameters(abstract, arrays)


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def documents(*rows):
    """Positions of rows given as lengths of documents; negative ones are padding."""
    place = lambda n: np.arange(1, n + 1) if n > 0 else np.zeros(-n, int)
    return jnp.asarray([np.concatenate([*map(place, row)]) for row in rows], jnp.int32)


def whole(batch, tokens):
    return documents(*[[tokens]] * batch)


def seen(positions, *, own):
    """Which tokens each one sees [B, T, T], itself if `own`."""
    positions = np.asarray(positions)
    i, j = np.arange(positions.shape[1])[:, None], np.arange(positions.shape[1])
    return (j > i - positions[..., None]) & (j < i + own)


def over_devices(f, devices, *, tokens, out=None):
    """f(*arrays) of arrays [B, T, ...], T shared out as `ops.places` says.

    Args:
        f: takes arrays of tokens, then `axis_name`; returns arrays of tokens.
        devices: number of them.
        tokens: T.
        out: of each result, the axis of its tokens, default 1; None for no tokens.
    """
    chunk = tokens // (2 * devices)
    parts = np.arange(tokens).reshape(2 * devices, chunk)
    order = np.concatenate([np.r_[parts[r], parts[-1 - r]] for r in range(devices)])
    back = np.argsort(order)
    mesh = jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,))
    spec = lambda axis: P() if axis is None else P(*[None] * axis, "context")

    def call(*arrays, **shared):
        local = lambda arrays, shared: f(*arrays, **shared, axis_name="context")
        specs = (
            jax.tree.map(lambda _: spec(1), arrays),
            jax.tree.map(lambda _: P(), shared),
        )
        axes = (1,) if out is None else out
        shapes = tuple(map(spec, axes)) if out is not None else spec(1)
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=shapes)
        result = run(jax.tree.map(lambda a: a[:, order], arrays), shared)
        if out is None:
            return result[:, back]
        put = lambda x, axis: x if axis is None else jnp.take(x, back, axis)
        return tuple(put(x, axis) for x, axis in zip(result, axes, strict=True))

    return call
