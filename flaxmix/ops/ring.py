"""Attention whose keys travel around the devices of a mesh axis, each to the next."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flaxmix.ops.online import (
    Options,
    absorb,
    gradients,
    normalise,
    nothing,
    per_query,
)
from flaxmix.ops.stream import accumulator, zeros


def hop(arrays: Any, axis_name: str) -> Any:
    """Sends arrays to the next device of the ring; None stays None."""
    size = lax.axis_size(axis_name)
    steps = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis_name, steps), arrays)


def around(
    visit: Callable, carry: Any, own: tuple, axis_name: str, *, first: int = 0
) -> Any:
    """Folds visit(i, carry, *part) over the parts of all R devices, i = 0 ... R - 1.

    Part i is what the device i places before this one brought along, part 0 this
    device's own. R - 1 hops; a device holds its own part, one that it works on and one
    that arrives. The code does not grow with R: a loop and, since the last part need
    not go on, one more visit.

    Args:
        visit: works on one part; returns the next carry.
        carry: varies over `axis_name`, as do the parts.
        own: what this device sends around.
        axis_name: mesh axis, inside `jax.shard_map`.
        first: the first i; `own` has then made that many hops, fewer than R.
    """

    def stop(i, state):
        carry, part = state
        # Independent of the visit, so that it can travel meanwhile.
        coming = hop(part, axis_name)
        return visit(i, carry, *part), coming

    hops = lax.axis_size(axis_name) - 1
    carry, part = lax.fori_loop(first, hops, stop, (carry, own))
    return visit(hops, carry, *part)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def ring_attend(q, k, v, mask, key, options: Options, axis_name: str):
    """`flaxmix.ops.online.attend` with the queries sharded, too."""
    return _forward(q, k, v, mask, key, options, axis_name)[0]


def _stop_key(key, i):
    """A key of its own for each stop, and so for each pair of shards."""
    return None if key is None else jax.random.fold_in(key, i)


def _forward(q, k, v, mask, key, options, axis_name):
    def visit(i, part, k, v, mask):
        return absorb(part, q, k, v, mask, _stop_key(key, i), options)

    part = around(visit, nothing(q, k, v.shape[2]), (k, v, mask), axis_name)
    result, kept = normalise(part, k.dtype)
    return result, (q, k, v, mask, key, kept)


def _backward(options, axis_name, saved, cotangents):
    q, k, v, mask, key, kept = saved
    queries, acc = per_query(kept, cotangents), accumulator(k.dtype)

    def visit(i, carry, k, v, mask):
        stop = _stop_key(key, i)
        new = gradients(q, k, v, mask, stop, queries, options, acc)
        dq, *sums = jax.tree.map(jnp.add, carry, new)
        # The sums follow their keys; the hop of the last visit takes them home.
        return dq, *hop(sums, axis_name)

    init = zeros(k, q.shape, acc), jnp.zeros_like(k, acc), jnp.zeros_like(v, acc)
    dq, dk, dv = around(visit, init, (k, v, mask), axis_name)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


ring_attend.defvjp(_forward, _backward)
