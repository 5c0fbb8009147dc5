"""Attention whose points are sharded: keys travel around a ring of devices."""

import collections
import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from flaxmix import mixers, ops

import oracles
from closeness import assert_close

# Sums of up to 24 terms in another order; below float32, the roundings of operands,
# probabilities and results, as for one device.
ERROR = {
    jnp.float64: 1e-12,
    jnp.float32: 1e-5,
    jnp.bfloat16: 8 * 2**-8,
    jnp.float16: 8 * 2**-11,
}
B, Q, N, H, D, E = 2, 16, 24, 3, 4, 5


def new(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    widths = (Q, H, D), (N, H, D), (N, H, E)
    return tuple(new(rng, B, *shape, dtype=dtype) for shape in widths)


def masks():
    some = np.random.default_rng(1).random((B, N)) < 0.7
    # Whole shards of padding: one out of 2, two out of 4, four out of 8.
    half = some.copy()
    half[:, :12] = False
    # An item without points, and one with fewer than there are devices.
    few = np.zeros_like(some)
    few[0, [5, 6, 19]] = True
    return [jnp.asarray(mask) for mask in (some, half, few)]


def cotangents(dtype=jnp.float32):
    """Of y and L on all shards, on the first shard alone, and of L alone."""
    rng = np.random.default_rng(2)
    dy = new(rng, B, Q, H, E, dtype=dtype)
    dlog = new(rng, B, H, Q, dtype=jnp.promote_types(dtype, jnp.float32))
    here = jnp.arange(Q) < Q // 8
    one = jnp.where(here[:, None, None], dy, 0), jnp.where(here, dlog, 0)
    return [(dy, dlog), one, (jnp.zeros_like(dy), dlog)]


def make_mesh(shape):
    axes = ("data", "context")[-len(shape) :]
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(shape))


def run(q, k, v, mask, cotangent, key=None, **options):
    """Results and gradients of one shard."""
    f = functools.partial(
        ops.attention, mask=mask, key=key, axis_name="context", **options
    )
    result, back = jax.vjp(f, q, k, v)
    return result, back(cotangent)


def sharded(shape, **options):
    data = "data" if len(shape) == 2 else None
    points, rows = P(data, "context"), P(data, None, "context")
    return jax.shard_map(
        functools.partial(run, **options),
        mesh=make_mesh(shape),
        in_specs=(points, points, points, points, (points, rows), P()),
        out_specs=((points, rows), (points, points, points)),
    )


@functools.cache
def program(shape, dtype=jnp.float32, block=None):
    arguments = (*inputs(dtype), masks()[0], cotangents(dtype)[0], None)
    return jax.jit(sharded(shape, block=block)).lower(*arguments).compile()


def empty_apart(y, log_mass):
    """The -inf of empty rows as a pattern, so that everything else is finite."""
    log_mass = np.asarray(log_mass, np.float64)
    empty = np.isneginf(log_mass)
    return y, np.where(empty, 0, log_mass), empty


def operations(text):
    """Names of the collectives of a compiled program."""
    names = "all-reduce", "all-gather", "all-to-all", "collective-permute"
    names += ("reduce-scatter", "collective-broadcast")
    return {n for n in names if f" {n}(" in text or f" {n}-start(" in text}


@pytest.mark.parametrize(
    "shape, dtype, block",
    [
        ((1,), jnp.float64, 5),
        pytest.param((2,), jnp.float64, 5, marks=pytest.mark.slow),
        ((4,), jnp.float64, 3),
        pytest.param((8,), jnp.float64, None, marks=pytest.mark.slow),
        pytest.param((2, 4), jnp.float64, 4, marks=pytest.mark.slow),
        ((4,), jnp.float32, None),
        ((4,), jnp.bfloat16, 4),
        pytest.param((4,), jnp.float16, None, marks=pytest.mark.slow),
    ],
)
def test_shards_equal_one_device(shape, dtype, block):
    """Results and gradients, block by block or not, whatever is padding."""
    with jax.enable_x64(dtype == jnp.float64):
        args, step = inputs(dtype), program(shape, dtype, block)
        for mask in masks():
            for dy, dlog in cotangents(dtype):
                result, grads = step(*args, mask, (dy, dlog), None)
                assert [x.dtype for x in (result[0], *grads)] == [dtype] * 4
                assert result[1].dtype == dlog.dtype
                expected = oracles.attention(*args, mask=mask)
                actual = empty_apart(*result)
                assert_close(actual, empty_apart(*expected), error=ERROR[dtype])
                expected = oracles.attention_vjp(*args, dy, dlog, mask=mask)
                assert_close(grads, expected, error=ERROR[dtype])
        # The last mask leaves the second item without points.
        assert not np.any(result[0][1]) and not any(np.any(g[1]) for g in grads)
        assert operations(step.as_text()) == {"collective-permute"}


def test_masked_keys_never_matter():
    q, k, v = inputs()
    dy = cotangents()[0]
    for mask in masks():
        results = []
        for fill in (0.0, 1.0, np.nan, np.inf, -np.inf):
            hide = lambda x, fill=fill, mask=mask: jnp.where(
                mask[..., None, None], x, fill
            )
            result, grads = program((4,))(q, hide(k), hide(v), mask, dy, None)
            results.append((empty_apart(*result), grads))
        for other in results[1:]:
            assert_close(other, results[0], error=0.0)


def test_large_scores_stay_finite():
    q, k, v = inputs()
    mask, (dy, dlog) = masks()[1], cotangents()[0]
    (y, log_mass), grads = program((4,))(1e4 * q, k, v, mask, (dy, dlog), None)
    expected = oracles.attention(1e4 * q, k, v, mask=mask)
    assert_close((y, log_mass), expected, error=ERROR[jnp.float32])
    assert all(np.all(np.isfinite(g)) for g in grads)


@pytest.mark.parametrize("masked", [False, True])
def test_shards_may_hold_the_same(masked):
    """Replicated keys count for each device; gradients add up."""
    args, (dy, dlog) = inputs(), cotangents()[0]
    mask = masks()[0] if masked else None
    both = jax.shard_map(
        lambda *args: ops.attention(*args, mask=mask, axis_name="context"),
        mesh=make_mesh((2,)),
        in_specs=P(),
        out_specs=(P(None, "context"), P(None, None, "context")),
    )

    @jax.jit
    def run(args, cotangent):
        result, back = jax.vjp(both, *args)
        return result, back(cotangent)

    twice = lambda x, axis=1: None if x is None else np.concatenate([x, x], axis)
    actual = run(args, (twice(dy), twice(dlog, 2)))
    larger, mask, error = [twice(x) for x in args], twice(mask), ERROR[jnp.float32]
    assert_close(actual[0], oracles.attention(*larger, mask=mask), error=error)
    expected = oracles.attention_vjp(*larger, twice(dy), twice(dlog, 2), mask=mask)
    expected = tuple(sum(np.split(g, 2, axis=1)) for g in expected)
    assert_close(actual[1], expected, error=error)


def count_hops(jaxpr, found, times=1):
    """Counts the arrays of each dtype that a program sends to the next device."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute":
            found[eqn.invars[0].aval.dtype.name] += times
        inner = times * eqn.params.get("length", 1)
        for param in eqn.params.values():
            for part in param if isinstance(param, tuple | list) else [param]:
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    count_hops(part, found, inner)
    return found


def test_traffic():
    """Keys and values in their dtype, R - 1 hops a direction; gradients in float32,
    R hops; and a program whose size is that for two devices."""
    sizes = set()
    for shards in (2, 8):
        # As many points on each device.
        rng = np.random.default_rng(0)
        q, k, v, dy = (
            new(rng, B, 3 * shards, H, D, dtype=jnp.bfloat16) for _ in range(4)
        )
        mask = jnp.ones((B, 3 * shards), bool)
        cotangent = dy, jnp.zeros((B, H, 3 * shards))
        f = sharded((shards,), block=2)
        jaxpr = jax.make_jaxpr(f)(q, k, v, mask, cotangent, None).jaxpr
        sizes.add(len(str(jaxpr).splitlines()))
        assert count_hops(jaxpr, collections.Counter()) == {
            "bfloat16": 2 * 2 * (shards - 1),
            "bool": 2 * (shards - 1),
            "float32": 2 * shards,
        }
    assert len(sizes) == 1


def dense(q, k, v, factors):
    """Attention with factors [B, H, Q, N] on its probabilities."""
    p = jax.nn.softmax(jnp.einsum("bqhd,bnhd->bhqn", q, k) / D**0.5)
    return jnp.einsum("bhqn,bnhe->bqhe", factors * p, v)


@pytest.mark.slow
def test_dropout():
    """Another pattern for each pair of shards, the same in both directions."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        wide = functools.partial(new, rng, dtype=jnp.float64)
        n, rate = 16, 0.4
        q, k, v, dy = (wide(B, n, H, d) for d in (D, D, n, n))
        dlog, mask = jnp.zeros((B, H, n)), jnp.ones((B, n), bool)
        step = jax.jit(sharded((4,), dropout=rate, block=3))
        # Equal scores and an identity read the pattern off.
        eye = jnp.broadcast_to(jnp.eye(n)[:, None], v.shape)
        read = lambda key: (
            n * jnp.swapaxes(step(0 * q, k, eye, mask, (dy, dlog), key)[0][0], 1, 2)
        )
        key = jax.random.key(3)
        factors = read(key)
        kept = np.asarray(factors > 0)
        assert_close(factors, np.where(kept, 1 / (1 - rate), 0), error=1e-12)
        # Its expectation is 1: 1536 draws, four standard deviations.
        assert (
            abs(kept.mean() - (1 - rate)) < 4 * (rate * (1 - rate) / kept.size) ** 0.5
        )
        pairs = kept.reshape(B, H, 4, 4, 4, 4).transpose(2, 4, 0, 1, 3, 5)
        patterns = {pair.tobytes() for pair in pairs.reshape(16, -1)}
        assert len(patterns) == 16
        assert np.any(read(jax.random.key(4)) != factors)

        (y, _), grads = step(q, k, v, mask, (dy, dlog), key)
        f = jax.jit(lambda *args: jax.vjp(dense, *args, factors)[1](dy)[:3])
        error = ERROR[jnp.float64]
        assert_close(y, jax.jit(dense)(q, k, v, factors), error=error)
        assert_close(grads, f(q, k, v), error=error)


C, LAYERS = 15, 2


def make_layers(seed=0):
    """Layers in one, for a scan, whose parameters are at no special value."""
    layer = mixers.SelfAttention(
        C, heads=H, qk_norm=True, attention_dropout=0.4, rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(layer, nnx.Param)
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(x + rng.normal(size=(LAYERS, *x.shape)) / 2, float)
    return nnx.merge(graph, jax.tree.map(draw, params))


def deep(layers, x, mask, *, axis_name=None, key=None):
    """Layers in a scan, recomputed in the backward pass."""

    @jax.checkpoint
    def step(x, layer):
        return x + layer(x, mask=mask, axis_name=axis_name, key=key), None

    return jax.lax.scan(step, x, layers)[0]


@functools.cache
def layers_on_one_device(points):
    layers, x, mask, weights = layer_inputs(points)
    loss = lambda layers, x: jnp.sum(weights * jnp.sin(deep(layers, x, mask)))
    return flat(jax.jit(jax.value_and_grad(loss, (0, 1)))(layers, x))


def layer_inputs(points):
    rng = np.random.default_rng(5)
    x = new(rng, B, points, C, dtype=jnp.float64)
    mask = rng.random((B, points)) < 0.8
    # The last of four shards is all padding.
    mask[:, points - points // 4 :] = False
    weights = new(rng, B, points, C, dtype=jnp.float64) * mask[..., None]
    return make_layers(), x, jnp.asarray(mask), weights


def flat(result):
    """Some gradients are zero by analysis: all are compared with the largest."""
    value, (dlayers, dx) = result
    return value, jax.flatten_util.ravel_pytree(dlayers)[0], dx


SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in [(1,), (2,), (8,), (2, 4)]]


@pytest.mark.parametrize("shape", [(4,), *SLOW])
def test_layers_equal_one_device(shape):
    """Every parameter's gradient, in a scan of recomputed layers; of two mesh axes,
    only that of the points is manual, and the compiler splits the batch."""
    with jax.enable_x64(True):
        layers, x, mask, weights = layer_inputs(N)
        mesh, points = make_mesh(shape), P(None, "context")
        f = jax.shard_map(
            functools.partial(deep, axis_name="context"),
            mesh=mesh,
            axis_names={"context"},
            in_specs=(P(), points, points),
            out_specs=points,
        )
        loss = lambda layers, x, mask: jnp.sum(weights * jnp.sin(f(layers, x, mask)))
        if len(shape) == 2:
            points = P("data", "context")
        x, mask = jax.device_put((x, mask), NamedSharding(mesh, points))
        step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(layers, x, mask)
        step = step.compile()
        actual = flat(step(layers, x, mask))
        assert_close(actual, layers_on_one_device(N), error=ERROR[jnp.float64])
        assert operations(step.as_text()) <= {"collective-permute", "all-reduce"}
        assert "collective-permute" in operations(step.as_text())


def test_layers_drop_by_the_key():
    with jax.enable_x64(True):
        layers, x, mask, _ = layer_inputs(8)
        points = P(None, "context")
        f = jax.shard_map(
            lambda key, *args: deep(*args, axis_name="context", key=key),
            mesh=make_mesh((2,)),
            in_specs=(P(), P(), points, points),
            out_specs=points,
        )
        run = jax.jit(f)
        first, again, other = (
            run(jax.random.key(i), layers, x, mask) for i in (0, 0, 1)
        )
        plain = jax.jit(deep)(layers, x, mask)
        assert_close(again, first, error=0.0)
        real = np.asarray(mask)
        for y in (other, plain):
            assert np.all(np.any(y[real] != first[real], -1))
