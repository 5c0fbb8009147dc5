"""Causal models on sequences that are shared out over the devices of a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from jaxtyping import Array, Int

from flaxmix.ops.stream import vary


def apply_causal(
    function: Callable[..., Any],
    model: Any,
    tokens: Int[Array, "*B T"],
    *others: Array,
    mesh: Mesh | AbstractMesh,
    positions: Int[Array, "*B T"] | None = None,
) -> Any:
    """function(model, tokens, *others, positions=, axis_name=), T over 'context'.

    The numbers and derivatives are those of one device up to rounding. Tokens are cut
    into 2 R chunks, of which device r works on number r and number 2 R - 1 - r, so that
    all devices have the same causal work; padding at the end fills the last chunk. What
    each mixer sends around is said there.

    Results come back in the order of the tokens, for which all devices get all of
    them. That is cheap for a loss of each token, but not for its logits: let `function`
    return what is small, as in

        def losses(model, tokens, targets, *, positions, axis_name):
            logits = model(tokens, positions=positions, axis_name=axis_name)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets)

        losses = parallel.apply_causal(losses, model, tokens, targets, mesh=mesh)

    To be called inside `jax.jit`, like `apply`, which is for points.

    Args:
        function: returns arrays [*B, T, ...], or a tree of them. Means over tokens are
            taken of the results: here it sees those of one device.
        model: its first argument, the same on all devices.
        tokens: of the sequences.
        *others: further arrays [*B, T, ...], such as targets.
        mesh: from `make_mesh`. Where its axis 'context' is 1 this is the plain call.
        positions: place of each token in its document, from 1; 0 for padding.

    Returns:
        The results, of all tokens.

    Raises:
        ValueError: what `function` raises, or if `others`, `positions` or its results
            have other leading axes than `tokens`.
    """
    given = (tokens, *others) if positions is None else (tokens, *others, positions)
    for array in given:
        if array.shape[: tokens.ndim] != tokens.shape:
            raise ValueError(
                f"arrays of tokens begin with {tokens.shape}, got {array.shape}."
            )
    shards, length = mesh.shape["context"], tokens.shape[-1]
    if shards == 1:
        return function(model, tokens, *others, positions=positions, axis_name=None)
    expected = jax.eval_shape(
        lambda model, *arrays: function(
            model, *arrays, positions=positions, axis_name=None
        ),
        *(model, tokens, *others),
    )
    for result in jax.tree.leaves(expected):
        if result.shape[: tokens.ndim] != tokens.shape:
            raise ValueError(
                f"the function must return arrays that begin with {tokens.shape}, got "
                f"{result.shape}; means are taken of the results."
            )
    axis, missing = tokens.ndim - 1, -length % (2 * shards)
    if positions is None and missing:
        counted = jnp.arange(1, length + 1, dtype=jnp.int32)
        positions = jnp.broadcast_to(counted, tokens.shape)
    order = _order(length + missing, shards)

    def deal(x: Array) -> Array:
        widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
        return jnp.take(jnp.pad(x, widths), order, axis)

    def local(model, positions, arrays):
        # Their derivatives are then added up once at the end, not in each layer.
        model = jax.tree.map(lambda parameter: vary(parameter, ("context",)), model)
        return function(model, *arrays, positions=positions, axis_name="context")

    spec = P(*(None,) * axis, "context")
    results = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), spec, spec),
        out_specs=spec,
        axis_names={"context"},
    )(model, jax.tree.map(deal, positions), tuple(map(deal, (tokens, *others))))
    back = np.argsort(order)[:length]
    return jax.tree.map(lambda x: jnp.take(x, back, axis), results)


def _order(tokens: int, shards: int) -> np.ndarray:
    """The place of each token in the order of `flaxmix.ops.places`."""
    chunks = np.arange(tokens).reshape(2 * shards, -1)
    return np.concatenate([np.r_[chunks[r], chunks[-1 - r]] for r in range(shards)])
