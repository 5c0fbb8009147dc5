"""Arrays that travel around the devices of a mesh axis, each to the next."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def hop(arrays: Any, axis_name: str) -> Any:
    """Sends arrays to the next device of the ring; None stays None."""
    size = lax.axis_size(axis_name)
    steps = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis_name, steps), arrays)


def around(visit: Callable, carry: Any, own: tuple, axis_name: str) -> Any:
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
    """

    def stop(i, state):
        carry, part = state
        # Independent of the visit, so that it can travel meanwhile.
        coming = hop(part, axis_name)
        return visit(i, carry, *part), coming

    hops = lax.axis_size(axis_name) - 1
    carry, part = lax.fori_loop(0, hops, stop, (carry, own))
    return visit(hops, carry, *part)
