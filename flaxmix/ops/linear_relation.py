"""Linear Relation: history as a state of fixed size, with a retention a channel.

`flaxmix.ops.retention` is its chunked form, for q = S p1 / |p1|, k = S p2 / |p2| and
v = I.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flaxmix.ops.attention import flat
from flaxmix.ops.causal import check_positions
from flaxmix.ops.norm import inner
from flaxmix.ops.relation import check_relation
from flaxmix.ops.retention import advance, scale
from flaxmix.ops.stream import accumulator, align

# Chunks that are worked on at once. One state is kept for each such group, and two
# chunks fill a CPU.
_GROUP = 2


class _Options(NamedTuple):
    chunk: int
    tau: float
    # Of the operands of products.
    dtype: jnp.dtype
    # Without it, only the state is advanced.
    read: bool = True


def linear_relation(
    p1: Float[Array, "*B T H D"],
    p2: Float[Array, "*B T H D"],
    identity: Float[Array, "*B T H E"],
    log_retention: Float[Array, "*B T H D"],
    *,
    state: Float[Array, "*B H D E"] | None = None,
    positions: Int[Array, "*B T"] | None = None,
    tau: float = 2.0,
    chunk: int | None = None,
    axis_name: str | None = None,
    implementation: Literal["scan", "chunked"] | None = None,
) -> tuple[Float[Array, "*B T H E"], Float[Array, "*B H D E"]]:
    """Relation whose history is a matrix of D x E a head.

    For tokens t = 1, 2, ... of one head (eqs. 15-17 and appendix A.4 of its paper),

        S_t = sigmoid(p1_t . p2_t / (tau sqrt(D)))
        E_t = S_t (diag(alpha_t) C_{t-1})^T p1_t / |p1_t|,   Y_t = I_t + E_t
        C_t = diag(alpha_t) C_{t-1} + S_t p2_t / |p2_t| I_t^T

    "chunked" takes O(T D (E + chunk)) time a head, in products of matrices, and keeps
    one state for every two chunks for the derivative, which recomputes the rest.
    "scan" is the definition, one token after the other; its derivative keeps T states.
    States, norms and retentions are float32 or wider.

    Over R devices, each first advances its two chunks of tokens from nothing; these
    2 R states and retentions, of H D (E + 1) numbers each, are gathered, so that each
    device knows the states that its chunks begin with.

    Args:
        p1: reading coordinates, after the rotary embedding.
        p2: writing coordinates, likewise. A coordinate of zeros reads or writes
            nothing.
        identity: information, after the mixing of heads.
        log_retention: log alpha <= 0; -inf forgets everything.
        state: C_0, such as the state that an earlier piece returned; None for zeros.
            Over devices, the one before all tokens, which all of them hold.
        positions: place of each token in its document, from 1; 0 for padding, which
            never matters, even NaN, leaves the state alone and gets 0. Documents are
            contiguous and begin from a state of zeros. None: all tokens continue the
            given state.
        tau: temperature of S.
        chunk: tokens of a chunk of "chunked", a power of two; None means 64.
        axis_name: mesh axis that T is sharded over, in the order of
            `flaxmix.ops.places`, inside `jax.shard_map`.
        implementation: None means "chunked".

    Returns:
        Y in the dtype of `identity`, and the state after the last token, float32 or
        wider; over devices, the last of all tokens, which all of them hold.

    Raises:
        ValueError: if `implementation` is none of these, `chunk` no power of two, `tau`
            not positive or the number of tokens of a shard odd.
        NotImplementedError: if "scan" is to be sharded.
    """
    if implementation not in (None, "scan", "chunked"):
        raise ValueError(
            f"implementation must be 'scan' or 'chunked', got {implementation!r}."
        )
    if chunk is not None and (chunk < 1 or chunk & (chunk - 1)):
        raise ValueError(f"chunk must be a power of two, got {chunk}.")
    check_relation(tau)
    if implementation == "scan" and axis_name is not None:
        raise NotImplementedError(
            f"the recurrence is not sharded, got axis_name={axis_name!r}."
        )
    same = p1.shape == p2.shape == log_retention.shape
    if not same or identity.shape[:-1] != p1.shape[:-1] or 0 in p1.shape:
        raise ValueError(
            "there must be tokens, each with an identity and p1, p2 and log_retention "
            f"of one width, got shapes {identity.shape}, {p1.shape}, {p2.shape} and "
            f"{log_retention.shape}."
        )
    if positions is not None:
        check_positions(positions, p1.shape[:-2])
    batch, dtype = p1.shape[:-3], jnp.result_type(p1, p2, identity)
    if state is None:
        state = jnp.zeros((*batch, *p1.shape[-2:], identity.shape[-1]))
    state = flat(state.astype(accumulator(dtype)), batch, 3)
    arrays = [flat(x, batch, 3) for x in (p1, p2, identity, log_retention)]
    place = None if positions is None else flat(positions, batch, 1)

    options = _Options(64 if chunk is None else chunk, tau, jnp.dtype(dtype))
    if implementation == "scan":
        y, end = _recurrence(arrays, place, state, options)
    elif axis_name is None:
        y, end = _chunked(arrays, place, state, options)
    else:
        y, end = _sharded(arrays, place, state, options, axis_name)
    return y.reshape(*batch, *y.shape[1:]), end.reshape(*batch, *end.shape[1:])


def _recurrence(arrays, positions, state, options: _Options):
    q, k, v, g = _operands(arrays, positions, options)

    def step(state, token):
        q, k, v, g = token
        old = jnp.exp(g)[..., None] * state
        read = jnp.einsum("bhd,bhde->bhe", q, old)
        return old + k[..., None] * v[..., None, :], read

    tokens = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (q, k, v, g))
    state, read = lax.scan(step, align(state, *tokens)[0], tokens)
    return (v + jnp.swapaxes(read, 0, 1)).astype(arrays[2].dtype), state


def _chunked(arrays, positions, state, options: _Options) -> Any:
    """Y, or None if it is not read, and the state after all of [B, T, H, ...]."""
    rows, tokens = arrays[0].shape[:2]
    # A short sequence, such as one new token, is one short chunk.
    chunk = min(options.chunk, 1 << (tokens - 1).bit_length())
    if tokens < _GROUP * chunk:
        # Zeros read and write nothing, and retain everything.
        fill = lambda x: jnp.pad(
            x, [(0, 0), (0, -tokens % chunk), *[(0, 0)] * (x.ndim - 2)]
        )
        arrays, positions = jax.tree.map(fill, (arrays, positions))
    elif positions is None and tokens % (_GROUP * chunk):
        # What the last group has in common with the one before is padding there.
        positions = jnp.broadcast_to(jnp.arange(tokens) + 2, (rows, tokens))
    *arrays, positions, state = align(*arrays, positions, state)
    options = options._replace(chunk=chunk)
    result: Any = _run(state, tuple(arrays), positions, options)
    state, y = result
    return y if y is None else y[:, :tokens], state


def _sharded(arrays, positions, state, options: _Options, axis_name: str):
    """`_chunked` of the chunks r and 2 R - 1 - r on device r, one after the other."""
    rows, tokens = arrays[0].shape[:2]
    if tokens % 2:
        raise ValueError(f"a shard needs an even number of tokens, got {tokens}.")
    if lax.axis_size(axis_name) == 1:
        y, end = _chunked(arrays, positions, state, options)
        return y, lax.psum(end, axis_name)
    # Chunks from other devices vary, even if all devices began with the same.
    shard, last = lax.axis_index(axis_name), 2 * lax.axis_size(axis_name) - 1
    *arrays, positions, _ = align(*arrays, positions, shard)
    halves = lambda x: x.reshape(2 * rows, tokens // 2, *x.shape[2:])
    arrays, positions = jax.tree.map(halves, (arrays, positions))

    nothing = jnp.zeros((2 * rows, *state.shape[1:]), state.dtype)
    _, written = _chunked(arrays, positions, nothing, options._replace(read=False))
    kept = jnp.exp(jnp.sum(_retention(arrays[3], positions, state.dtype), 1))
    split = lambda x: x.reshape(rows, 2, *x.shape[1:])
    parts = (split(kept[..., None]), split(written))
    parts = lax.all_gather(parts, axis_name, to="invarying")
    # The first chunks of all devices, then the second ones from the last device on.
    parts = jax.tree.map(lambda x: jnp.concatenate([x[:, :, 0], x[::-1, :, 1]]), parts)

    def step(state, part):
        kept, written = part
        return kept * state + written, state

    end, starts = lax.scan(step, align(state, parts[1])[0], parts)
    own = jnp.stack([starts[shard], starts[last - shard]], 1).reshape(nothing.shape)
    y, _ = _chunked(arrays, positions, own, options)
    return y.reshape(rows, tokens, *y.shape[2:]), end


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _run(state, arrays, positions, options: _Options):
    """The state after all tokens and Y, of whole chunks or at least one group."""
    return _run_forward(state, arrays, positions, options)[0]


def _run_forward(state, arrays, positions, options):
    group = _group(arrays, options)
    groups = -(-arrays[0].shape[1] // group)

    def body(i, loop):
        state, states, y = loop
        states = lax.dynamic_update_index_in_dim(states, state, i, 0)
        place = _places(positions, i, group)
        state, new = _advance(state, _cut(arrays, i, group), place, options)
        return state, states, _add(y, new, i, group)

    y = jnp.zeros_like(arrays[2]) if options.read else None
    states = jnp.broadcast_to(jnp.zeros_like(state), (groups, *state.shape))
    state, states, y = lax.fori_loop(0, groups, body, (state, states, y))
    return (state, y), (states, arrays, positions)


def _run_backward(options, saved, cotangents):
    states, arrays, positions = saved
    dstate, dy = cotangents
    group = _group(arrays, options)

    def body(i, loop):
        dstate, gradients = loop
        i = len(states) - 1 - i
        work = functools.partial(
            _advance, positions=_places(positions, i, group), options=options
        )
        _, back = jax.vjp(work, states[i], _cut(arrays, i, group))
        dstate, new = back((dstate, _cut(dy, i, group)))
        return dstate, _add(gradients, new, i, group)

    gradients = jax.tree.map(jnp.zeros_like, arrays)
    return *lax.fori_loop(0, len(states), body, (dstate, gradients)), None


_run.defvjp(_run_forward, _run_backward)


def _group(arrays, options: _Options) -> int:
    """Tokens of a group."""
    return min(_GROUP * options.chunk, arrays[0].shape[1])


def _cut(arrays, i, group: int) -> Any:
    """Group i of arrays [B, T, ...]. The last one begins early enough to be whole."""
    cut = lambda x: lax.dynamic_slice_in_dim(x, i * group, group, 1)
    return jax.tree.map(cut, arrays)


def _add(arrays, parts, i, group: int):
    """Adds group i to arrays: tokens that it has in common with another are 0 in it."""
    new = jax.tree.map(jnp.add, _cut(arrays, i, group), parts)
    put = lambda x, part: lax.dynamic_update_slice_in_dim(x, part, i * group, 1)
    return jax.tree.map(put, arrays, new)


def _places(positions, i, group: int):
    """Positions of group i, in which tokens of the group before are padding."""
    if positions is None:
        return None
    token = jnp.arange(positions.shape[1])[None]
    return jnp.where(_cut(token, i, group) >= i * group, _cut(positions, i, group), 0)


def _advance(state, arrays, positions, options: _Options):
    """The state after one group, and its Y, or None if it is not read."""

    def chunks(x):
        """[B, n, H, D] -> [B, H, chunks, tokens of a chunk, D]."""
        rows, tokens, heads, width = x.shape
        chunk = min(options.chunk, tokens)
        return jnp.swapaxes(x, 1, 2).reshape(rows, heads, -1, chunk, width)

    q, k, v, g = map(chunks, _operands(arrays, positions, options))
    state, read = advance(state, q, k, v, g, options.dtype, read=options.read)
    if read is None:
        return state, None
    y = (v + read).reshape(*v.shape[:2], -1, v.shape[-1])
    return state, jnp.swapaxes(y, 1, 2).astype(arrays[2].dtype)


def _operands(arrays, positions, options: _Options):
    """q, k, v and log alpha [B, T, H, ...] of the recurrence, in float32 or wider."""
    acc = accumulator(options.dtype)
    *arrays, log_retention = arrays
    if positions is not None:
        real = positions[..., None, None] > 0
        arrays = [jnp.where(real, x, 0) for x in arrays]
    p1, p2, v = (x.astype(acc) for x in arrays)
    own = jax.nn.sigmoid(inner(p1, p2) / (options.tau * p1.shape[-1] ** 0.5))
    q, k = scale(_unit(p1), own), scale(_unit(p2), own)
    return q, k, v, _retention(log_retention, positions, acc)


def _retention(log_retention, positions, acc):
    """log alpha: nothing is kept where a document begins, all at padding."""
    if positions is not None:
        place = positions[..., None, None]
        log_retention = jnp.where(place > 0, log_retention, 0)
        log_retention = jnp.where(place == 1, -jnp.inf, log_retention)
    return log_retention.astype(acc)


@jax.custom_vjp
def _unit(x) -> Any:
    """x / |x|; 0, with derivative 0, where the square of |x| is no normal number."""
    return _unit_forward(x)[0]


def _unit_forward(x):
    square = inner(x, x)
    some = square >= jnp.finfo(x.dtype).tiny
    r = jnp.where(some, lax.rsqrt(jnp.where(some, square, 1)), 0)[..., None]
    return r * x, (r * x, r)


def _unit_backward(kept, g):
    y, r = kept
    return (r * (g - inner(g, y)[..., None] * y),)


_unit.defvjp(_unit_forward, _unit_backward)
