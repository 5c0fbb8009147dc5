"""Models on points that are shared out over the devices of a mesh, exactly."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from jaxtyping import Array, Bool, Float, Key

from flaxmix.ops.stream import vary


def apply(
    model: Any,
    x: Float[Array, "*B N I"],
    *,
    mesh: Mesh | AbstractMesh,
    mask: Bool[Array, "*B N"] | None = None,
    key: Key[Array, ""] | None = None,
) -> Float[Array, "*B N O"]:
    """model(x, mask=mask, key=key), the points sharded over the axis 'context'.

    The numbers and all derivatives are those of one device up to rounding, but that
    dropout draws other numbers on each shard. Points meet in the reductions of the
    mixers alone, whose size does not depend on N; only full attention sends points
    themselves, around a ring. Parameters are the same on all devices; the first axis
    of x may be sharded over 'data' by the caller, which stays automatic.

    Where N is no multiple of the axis, padding evens the shards out: any N will do,
    also one below the number of devices. To be called inside `jax.jit`: outside, every
    operation is compiled for itself. A model that is committed to one device, such as a
    loaded one, goes on all first: `jax.device_put(model, parallel.replicated(mesh))`.

    Args:
        model: any of `flaxmix.models`.
        x: features of the points.
        mesh: from `make_mesh`. Where its axis 'context' is 1 this is the plain call.
        mask: True for real points.
        key: drives dropout and noise; without it there are none.

    Returns:
        The fields, sharded like x.

    Raises:
        ValueError: what `model(x, mask=mask)` raises.
    """
    shards, points = mesh.shape["context"], x.shape[-2]
    if shards == 1:
        return model(x, mask=mask, key=key)
    # Whatever is wrong with them is said of the arrays as they were given.
    jax.eval_shape(lambda *args: model(args[0], mask=args[1]), x, mask)
    if missing := -points % shards:
        mask = jnp.ones(x.shape[:-1], bool) if mask is None else mask
        widen = lambda a, axis: jnp.pad(
            a, [(0, missing if i == axis else 0) for i in range(a.ndim)]
        )
        x, mask = widen(x, x.ndim - 2), widen(mask, x.ndim - 2)

    def local(model, x, mask, key):
        # Their derivatives are then added up once at the end, not in each layer.
        model = jax.tree.map(lambda parameter: vary(parameter, ("context",)), model)
        return model(x, mask=mask, axis_name="context", key=key)

    spec = P(*(None,) * (x.ndim - 2), "context")
    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), spec, spec, P()),
        out_specs=spec,
        axis_names={"context"},
    )
    return sharded(model, x, mask, key)[..., :points, :]
