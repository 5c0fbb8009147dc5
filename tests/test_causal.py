"""Causal attention: values, gradients, intervals of keys, extremes, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxmix import ops

import oracles
from closeness import assert_close
from relation_cases import DEVICES, documents, draw, over_devices, seen, whole

# As for `ops.attention`: sums of tens of terms; below float32, 8 roundings.
ERROR = {jnp.float32: 32 * 2**-23, jnp.bfloat16: 8 * 2**-8, jnp.float16: 8 * 2**-11}
TIGHT = 1e-12
B, H, D, E = 2, 3, 4, 5


def inputs(q, n=None, dtype=jnp.float32):
    n = q if n is None else n
    widths = (q, H, D), (n, H, D), (n, H, E)
    return tuple(draw(B, *w, seed=i, dtype=dtype) for i, w in enumerate(widths))


def cotangents(q, dtype=jnp.float32):
    wide = jnp.promote_types(dtype, jnp.float32)
    return draw(B, q, H, E, seed=7, dtype=dtype), draw(B, H, q, seed=8, dtype=wide)


@functools.partial(jax.jit, static_argnames="scale")
def run(args, cotangent, limits=None, *, scale=None):
    """Results and gradients."""
    f = functools.partial(ops.causal_attention, scale=scale, **(limits or {}))
    result, back = jax.vjp(f, *args)
    return result, back(cotangent)


def finite(y, log_mass):
    """The -inf of empty rows as a pattern, so that everything else is finite."""
    log_mass = np.asarray(log_mass, np.float64)
    empty = np.isneginf(log_mass)
    return y, np.where(empty, 0, log_mass), empty


def compare(args, dy, limits, seen, error, **options):
    result, grads = run(args, dy, limits, **options)
    expected = oracles.attention(*args, seen=seen, **options)
    assert_close(finite(*result), finite(*expected), error=error)
    assert {g.dtype for g in grads} == {args[0].dtype}
    expected = oracles.attention_vjp(*args, *dy, seen=seen, **options)
    assert_close(grads, expected, error=error)


def triangle(q, n):
    see = np.arange(n) <= n - q + np.arange(q)[:, None]
    return np.broadcast_to(see, (B, q, n))


@pytest.mark.parametrize("q, n", [(1, 1), (1, 4), (5, 7), (7, 5)])
def test_the_last_query_sees_every_key(q, n):
    args = inputs(q, n)
    compare(args, cotangents(q), None, triangle(q, n), ERROR[jnp.float32])


@pytest.mark.parametrize("dtype", ERROR)
def test_precisions(dtype):
    args, dy = inputs(11, dtype=dtype), cotangents(11, dtype)
    compare(args, dy, None, triangle(11, 11), ERROR[dtype], scale=0.3)
    (y, log_mass), _ = run(args, dy)
    assert y.dtype == dtype and log_mass.dtype == jnp.float32


def test_documents_and_intervals():
    with jax.enable_x64(True):
        args, dy = inputs(11, dtype=jnp.float64), cotangents(11, jnp.float64)
        positions = documents([4, -2, 1, 4], [-3, 8])
        start = jnp.arange(11) + 1 - positions
        see = seen(positions, own=True)
        compare(args, dy, {"start": start}, see, TIGHT)
        # Padding sees nothing, and nothing sees it.
        y, _ = run(args, dy, {"start": start})[0]
        assert not np.any(y[1, :3]) and not np.any(see[1, :, :3])
        # Any interval, of queries in any order, also empty ones.
        rng = np.random.default_rng(3)
        start, stop = rng.integers(-2, 9, (2, B, 11))
        n = np.arange(11)
        see = (start[..., None] <= n) & (n < stop[..., None])
        assert not see.any(-1).all() and see.any(-1).any()
        limits = {"start": jnp.asarray(start), "stop": jnp.asarray(stop)}
        compare(args, dy, limits, see, TIGHT)


@functools.cache
def long_run(tokens):
    """More than a bucket of tiles, and a rest; against one matrix of scores."""
    args, dy = inputs(tokens), cotangents(tokens)
    return args, dy, jax.tree.map(np.asarray, run(args, dy))


@pytest.mark.parametrize("tokens", [257, 600])
def test_tiles_change_nothing(tokens):
    args, dy, actual = long_run(tokens)

    @jax.jit
    def dense(q, k, v):
        s = jnp.einsum("bqhd,bnhd->bhqn", q, k) / 2
        s = jnp.where(jnp.tri(tokens, dtype=bool), s, -jnp.inf)
        y = jnp.einsum("bhqn,bnhe->bqhe", jax.nn.softmax(s), v)
        return y, jax.nn.logsumexp(s, -1)

    result, back = jax.vjp(dense, *args)
    # Gradients of keys are sums of hundreds of terms.
    assert_close(actual, (result, back(dy)), error=8 * ERROR[jnp.float32])


def test_later_keys_never_matter():
    (q, k, v), _, (result, _) = long_run(257)
    t = 131
    changed = [x.at[:, t:].set(3.0) for x in (q, k, v)]
    (y, log_mass), _ = run(tuple(changed), cotangents(257))
    assert_close(y[:, :t], result[0][:, :t], error=0.0)
    assert_close(log_mass[..., :t], result[1][..., :t], error=0.0)
    assert np.any(y[:, t:] != result[0][:, t:])


def test_float16_scores_beyond_its_range():
    x = jnp.full((1, 2, 1, 64), 40, jnp.float16)
    dy = jnp.ones((1, 2, 1, 64), jnp.float16), jnp.ones((1, 1, 2))
    (y, log_mass), grads = run((x, x, x), dy)
    expected = np.array([[[12800.0, 12800 + np.log(2)]]])
    assert_close((y, log_mass), (x, expected), error=ERROR[jnp.float32])
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in grads)


@pytest.mark.parametrize("devices, packed", DEVICES)
def test_devices_share_the_tokens(devices, packed):
    tokens = 16
    with jax.enable_x64(True):
        args, dy = inputs(tokens, dtype=jnp.float64), cotangents(tokens, jnp.float64)
        positions = documents([5, 2, 9], [-1, 3, 12]) if packed else whole(B, tokens)
        start = jnp.arange(tokens) + 1 - positions if packed else None
        f = over_devices(
            lambda q, k, v, start, axis_name: ops.causal_attention(
                q, k, v, start=start, axis_name=axis_name
            ),
            devices,
            tokens=tokens,
            out=(1, 2),
        )
        result, back = jax.jit(lambda *args: jax.vjp(f, *args))(*args, start)
        limits = {"start": start} if packed else None
        expected = run(args, dy, limits)
        assert_close(finite(*result), finite(*expected[0]), error=TIGHT)
        assert_close(back(dy)[:3], expected[1], error=TIGHT)


def test_shards_of_another_form():
    run = lambda q, k, v, axis_name: ops.causal_attention(
        q[:, :1], k, v, axis_name=axis_name
    )
    f = over_devices(run, 2, tokens=8, out=(1, 2))
    with pytest.raises(ValueError, match="as many queries as keys.* 1 queries, 4 keys"):
        jax.eval_shape(f, *inputs(8))


def test_small_gradients_in_float16():
    """Probabilities of 1 / 2,500 times 1e-4, which float16 has not."""
    ones = jnp.ones((1, 2500, 1, 2))
    dy = 1e-4 * ones, jnp.zeros((1, 1, 2500))
    expected = run((ones,) * 3, dy)[1][2]
    half = ones.astype(jnp.float16)
    grads = run((half,) * 3, (dy[0].astype(jnp.float16), dy[1]))[1]
    assert_close(grads[2], expected, error=ERROR[jnp.float16])


@pytest.mark.parametrize(
    "shapes, limits, message",
    [
        (((3, 4), (3, 4), (2, 4)), {}, "as many values as keys"),
        (((3, 4), (3, 5), (3, 4)), {}, "as wide as keys"),
        (((0, 4), (0, 4), (0, 4)), {}, "there must be queries"),
        (((3, 4), (3, 4), (3, 4)), {"start": jnp.zeros((2, 1), int)}, "start .* 3"),
        (((3, 4), (3, 4), (3, 4)), {"stop": jnp.zeros((2, 4), int)}, "stop .* 3"),
    ],
)
def test_shapes_that_do_not_match(shapes, limits, message):
    arrays = (jnp.zeros((2, n, 1, width)) for n, width in shapes)
    with pytest.raises(ValueError, match=message):
        # Without the checks of types that tests add.
        ops.causal_attention.__wrapped__(*arrays, **limits)


def test_shards_of_an_odd_number_of_tokens():
    with pytest.raises(ValueError, match="even number of tokens, got 3"):
        jax.make_jaxpr(lambda x: ops.places(3, "context"), axis_env=[("context", 2)])(
            0.0
        )


def test_places_balance_the_work():
    f = over_devices(
        lambda x, axis_name: ops.places(4, axis_name)[None] + 0 * x, 3, tokens=12
    )
    np.testing.assert_array_equal(f(jnp.zeros((1, 12), jnp.int32)), [np.arange(12)])
