"""Gather, scatter, FLARE and FLARE++ on arrays, on one device and on many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from jax.test_util import check_grads

from flaxmix import ops

import oracles
from closeness import assert_close

# Gradients included. float32: 32 ulps, for sums of tens of terms. Below it the
# scaled queries, the probabilities and the result are rounded once each, and scores
# of size 4 multiply the first of these: 8 roundings.
ERROR = {jnp.float32: 32 * 2**-23, jnp.bfloat16: 8 * 2**-8, jnp.float16: 8 * 2**-11}
# Sharding only reorders sums, but float32 gradients of a loss that weighs empty and
# full shards alike cancel down to a tenth of their terms.
SHARDED = {jnp.float32: 1e-5, jnp.float64: 1e-12}
# Rounding of float64 in sums of up to 100 terms.
TIGHT = 1e-12


def inputs(batch=(2,), *, n=7, h=3, m=5, d=4, e=6, dtype=jnp.float32, seed=0):
    """q, k, v, z and a mask; the queries are shared by the batch."""
    rng = np.random.default_rng(seed)
    new = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    mask = rng.random((*batch, n)) < 0.7
    mask[..., -1] = True
    return (
        new(h, m, d),
        new(*batch, n, h, d),
        new(*batch, n, h, e),
        new(*batch, h, m, e),
        jnp.asarray(mask),
    )


def like(tree, seed=1):
    """Random cotangents."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)


def empty_apart(z, log_mass):
    """The -inf of empty rows as a pattern, so that everything else is finite."""
    log_mass = np.asarray(log_mass, np.float64)
    empty = np.isneginf(log_mass)
    return z, np.where(empty, 0, log_mass), empty


@functools.partial(jax.jit, static_argnames=("op", "block", "scale"))
def run(op, args, mask=None, *, block=None, scale=None):
    """Results and gradients."""
    options = {} if block is None else {"block": block}
    f = lambda *args: op(*args, mask=mask, scale=scale, **options)
    result, back = jax.vjp(f, *args)
    return result, back(like(result))


@functools.partial(jax.jit, static_argnums=0, static_argnames="scale")
def apply(op, *args, mask=None, scale=None, **options):
    options |= {} if scale is None else {"scale": scale}
    return op(*args, mask=mask, **options)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(
    "n, batch, masked", [(1, (2,), False), (64, (), False), (1000, (2, 3), True)]
)
def test_gather_and_scatter_match_oracles(dtype, n, batch, masked):
    q, k, v, z, mask = inputs(batch, n=n, m=5 if n < 1000 else 2, dtype=dtype)
    mask = mask if masked else None
    (actual, log_mass), read = both(q, k, v, z, mask)
    assert actual.dtype == read.dtype == dtype and log_mass.dtype == jnp.float32
    expected = oracles.gather(q, k, v, mask=mask)
    assert_close((actual, log_mass), expected, error=ERROR[dtype])
    assert_close(read, oracles.scatter(k, q, z, mask=mask), error=ERROR[dtype])


@jax.jit
def both(q, k, v, z, mask):
    return ops.gather(q, k, v, mask=mask), ops.scatter(k, q, z, mask=mask)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("own", [False, True])
def test_gradients_of_gather_match_oracle(dtype, own):
    """With queries that the batch shares, or one set for each item."""
    q, k, v, _, mask = inputs(dtype=dtype)
    q = jnp.stack([q, -q]) if own else q
    result, grads = run(ops.gather, (q, k, v), mask)
    expected = oracles.gather(q, k, v, mask=mask)
    assert_close(result, expected, error=ERROR[dtype])
    expected = oracles.gather_vjp(q, k, v, *like(result), mask=mask)
    assert {g.dtype for g in grads} == {jnp.dtype(dtype)}
    assert_close(grads, expected, error=ERROR[dtype])


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("own", [False, True])
def test_gradients_of_scatter_match_oracle(dtype, own):
    q, k, _, z, mask = inputs(dtype=dtype)
    q = jnp.stack([q, -q]) if own else q
    y, grads = run(ops.scatter, (k, q, z), mask)
    assert_close(y, oracles.scatter(k, q, z, mask=mask), error=ERROR[dtype])
    expected = oracles.scatter_vjp(k, q, z, like(y), mask=mask)
    assert {g.dtype for g in grads} == {jnp.dtype(dtype)}
    assert_close(grads, expected, error=ERROR[dtype])


def test_values_that_are_the_keys():
    """z and L in float32, and gradients that come by both ways into the keys."""
    q, k, _, _, mask = inputs()
    result, (dq, dk) = run(ops.gather, (q, k), mask)
    error = ERROR[jnp.float32]
    assert_close(result, oracles.gather(q, k, mask=mask), error=error)
    expected = oracles.gather_vjp(q, k, k, *like(result), mask=mask)
    assert_close((dq, dk), (expected[0], expected[1] + expected[2]), error=error)


def test_scale():
    q, k, v, z, _ = inputs()
    error = ERROR[jnp.float32]
    actual = apply(ops.gather, q, k, v, scale=0.3)
    assert_close(actual, oracles.gather(q, k, v, scale=0.3), error=error)
    actual = apply(ops.scatter, k, q, z, scale=0.3)
    assert_close(actual, oracles.scatter(k, q, z, scale=0.3), error=error)
    v = v[..., :4]
    actual = apply(ops.flare, q, k, v, scale=0.3)
    assert_close(actual, oracles.flare(q, k, v, scale=0.3), error=error)


def gated(batch=(2,), *, dtype=jnp.float32, **sizes):
    """Arguments of `ops.flarepp`, with and without reference and gate."""
    seeds, k0, k, _, mask = inputs(batch, e=4, dtype=dtype, **sizes)
    reference, v0, v, _, _ = inputs(batch, e=4, dtype=dtype, seed=2, **sizes)
    gate = jnp.asarray([-2.0, 0.25, 1.5], dtype)
    return (seeds, k0, v0, k, v), {"reference": reference, "gate": gate}, mask


@pytest.mark.parametrize(
    "dtype, n, batch",
    [
        (jnp.float32, 7, (2,)),
        (jnp.bfloat16, 7, (2,)),
        (jnp.float16, 7, (2,)),
        (jnp.float32, 1, ()),
        (jnp.float32, 1000, (2, 1)),
    ],
)
def test_flare_and_flarepp_match_oracles(dtype, n, batch):
    args, options, mask = gated(batch, n=n, dtype=dtype)
    q, k, v = args[0], args[3], args[4]
    mixed = apply(ops.flare, q, k, v, mask=mask)
    assert mixed.dtype == dtype
    # A chain of two or three softmaxes: as many budgets.
    error = ERROR[dtype]
    assert_close(mixed, oracles.flare(q, k, v, mask=mask), error=2 * error)
    mixed = apply(ops.flarepp, *args, mask=mask, **options)
    assert mixed.dtype == dtype
    expected = oracles.flarepp(*args, mask=mask, **options)
    assert_close(mixed, expected, error=3 * error)


def test_flarepp_without_gate_and_with_values_that_are_the_keys():
    (seeds, k0, v0, k, v), options, mask = gated()
    error = 3 * ERROR[jnp.float32]
    for values, keywords in ((v0, {}), (None, options)):
        args = seeds, k0, values, k, v
        actual = apply(ops.flarepp, *args, mask=mask, **keywords)
        expected = oracles.flarepp(*args, mask=mask, **keywords)
        assert_close(actual, expected, error=error)
        actual = apply(ops.synthesize, *args[:3], mask=mask, **keywords)
        expected = oracles.synthesize(*args[:3], mask=mask, **keywords)
        assert_close(actual, expected, error=error)


@pytest.mark.parametrize("missing", ["reference", "gate"])
def test_reference_and_gate_go_together(missing):
    args, options, _ = gated()
    del options[missing]
    with pytest.raises(ValueError, match="reference and gate go together"):
        ops.flarepp(*args, **options)


@pytest.mark.parametrize("op", [ops.flare, ops.flarepp])
def test_gradients_match_differences(op):
    with jax.enable_x64(True):
        args, options, mask = gated((), n=6, m=2, dtype=jnp.float64)
        options = {} if op is ops.flare else options
        args = (args[0], *args[3:]) if op is ops.flare else args
        f = lambda args, options: op(*args, mask=mask, **options)
        keywords = {"order": 1, "modes": ["rev"], "atol": 1e-7, "rtol": 1e-7}
        check_grads(jax.jit(f), (args, options), **keywords)


def test_gradient_of_log_mass_matches_differences():
    with jax.enable_x64(True):
        q, k, v, _, mask = inputs((), n=6, m=2, dtype=jnp.float64)
        f = lambda q, k, v: ops.gather(q, k, v, mask=mask)
        keywords = {"order": 1, "modes": ["rev"], "atol": 1e-7, "rtol": 1e-7}
        check_grads(jax.jit(f), (q, k, v), **keywords)


@functools.partial(jax.jit, static_argnames="block")
def blocked(q, k, v, z, mask, block):
    """Results and gradients of the three forms, 67 points."""
    return [
        run(ops.gather, (q, k, v), mask, block=block),
        run(ops.gather, (q, k), None, block=block),
        run(ops.scatter, (k, q, z), mask, block=block),
    ]


@functools.cache
def whole():
    args = inputs(n=67, dtype=jnp.float64)
    results = blocked(*args, block=67)
    q, k, v, z, mask = args
    (result, grads), (shared, shared_grads), (y, back) = results
    assert_close(result, oracles.gather(q, k, v, mask=mask), error=TIGHT)
    expected = oracles.gather_vjp(q, k, v, *like(result), mask=mask)
    assert_close(grads, expected, error=TIGHT)
    assert_close(shared, oracles.gather(q, k), error=TIGHT)
    dq, dk, dv = oracles.gather_vjp(q, k, k, *like(shared))
    assert_close(shared_grads, (dq, dk + dv), error=TIGHT)
    assert_close(y, oracles.scatter(k, q, z, mask=mask), error=TIGHT)
    expected = oracles.scatter_vjp(k, q, z, like(y), mask=mask)
    assert_close(back, expected, error=TIGHT)
    return args, results


@pytest.mark.parametrize("block", [1, 3, 64, 66, None])
def test_blocks_change_nothing(block):
    with jax.enable_x64(True):
        args, expected = whole()
        assert_close(blocked(*args, block=block), expected, error=TIGHT)


@jax.jit
def masked(q, k, v, z, mask):
    """Results and gradients of everything that takes a mask."""
    result, grads = run(ops.gather, (q, k, v), mask)
    shared, shared_grads = run(ops.gather, (q, k), mask)
    return (
        result,
        shared,
        [
            (grads, shared_grads),
            run(ops.scatter, (k, q, z), mask),
            run(ops.flare, (q, k, v[..., :4]), mask),
        ],
    )


def test_masked_points_never_matter():
    q, k, v, z, mask = inputs()
    # The second item is all padding.
    mask = mask.at[1].set(False)
    results = []
    for fill in (0.0, 1.0, np.nan, np.inf, -np.inf):
        points = [jnp.where(mask[..., None, None], x, fill) for x in (k, v)]
        result, shared, rest = masked(q, *points, z, mask)
        for _, log_mass in (result, shared):
            assert np.all(np.isneginf(log_mass[1]))
            assert np.all(np.isfinite(log_mass[0]))
        assert not np.any(result[0][1]) and not np.any(shared[0][1])
        _, (y, _), (mixed, (_, dk, dv)) = rest
        for points in (y, mixed, dk, dv):
            assert not np.any(points[~mask])
        results.append((empty_apart(*result), empty_apart(*shared), rest))
    for other in results[1:]:
        assert_close(other, results[0], error=0.0)


def test_masked_points_never_matter_to_synthesis():
    (seeds, k0, v0, k, v), options, mask = gated()
    mask = mask.at[1].set(False)

    @jax.jit
    def f(points):
        g = lambda seeds, points, options: ops.flarepp(
            seeds, *points, mask=mask, **options
        )
        y, back = jax.vjp(g, seeds, points, options)
        return y, back(like(y))

    results = []
    for fill in (0.0, np.nan, np.inf):
        hide = lambda x, fill=fill: jnp.where(mask[..., None, None], x, fill)
        results.append(f([hide(x) for x in (k0, v0, k, v)]))
    for other in results[1:]:
        assert_close(other, results[0], error=0.0)


def test_shifting_every_score_shifts_only_the_log_mass():
    q, k, v, _, _ = inputs()
    z, log_mass = apply(ops.gather, q, k, v)
    shift = jnp.asarray(np.random.default_rng(5).normal(size=4), jnp.float32)
    actual = apply(ops.gather, q, k + shift, v)
    # Scores grow, so their rounding does too: twice the usual budget.
    error = 2 * ERROR[jnp.float32]
    assert_close(actual, (z, log_mass + q @ shift / 2), error=error)


def test_permuting_points_permutes_what_they_read():
    q, k, v, _, mask = inputs(e=4)
    p = np.random.default_rng(3).permutation(7)
    actual = apply(ops.flare, q, k[:, p], v[:, p], mask=mask[:, p])
    expected = apply(ops.flare, q, k, v, mask=mask)[:, p]
    assert_close(actual, expected, error=2 * ERROR[jnp.float32])


def test_permuting_latents_changes_nothing():
    q, k, v, _, mask = inputs(e=4)
    actual = apply(ops.flare, q[:, [3, 0, 4, 1, 2]], k, v, mask=mask)
    expected = apply(ops.flare, q, k, v, mask=mask)
    assert_close(actual, expected, error=2 * ERROR[jnp.float32])


@pytest.mark.parametrize("dtype", ERROR)
def test_large_logits_stay_finite(dtype):
    q, k, v, _, mask = inputs(e=4, dtype=dtype)
    # float16 ends at 65504.
    q = q * (1e4 if dtype != jnp.float16 else 1e3)
    y, grads = run(ops.flare, (q, k, v), mask)
    for x in (y, *grads):
        assert np.all(np.isfinite(np.asarray(x, np.float32)))


def test_float16_scores_beyond_its_range():
    """The products sum to 102,400, past float16; scaled, to 12,800."""
    q, k = jnp.full((1, 1, 64), 40, jnp.float16), jnp.full((1, 1, 64), 40, jnp.float16)
    y, grads = run(ops.flare, (q, k, k))
    assert_close(y, k, error=0.0)
    for g in grads:
        assert np.all(np.isfinite(np.asarray(g, np.float32)))


def test_many_equal_keys_in_float16():
    n = 70_000
    q, k, v = (
        jnp.full(shape, x, jnp.float16)
        for shape, x in (((1, 1, 4), 1), ((n, 1, 4), 2), ((n, 1, 1), 3))
    )
    z, log_mass = apply(ops.gather, q, k, v)
    assert_close(z, np.full((1, 1, 1), 3.0), error=0.0)
    # The score is exact, 4; the sum and the logarithm are float32.
    expected = np.full((1, 1), 4 + np.log(n))
    assert_close(log_mass, expected, error=ERROR[jnp.float32])


def test_mixing_matrix_has_the_rank_of_the_latents():
    with jax.enable_x64(True):
        q, k, v, _, _ = inputs((), n=11, m=3, e=4, dtype=jnp.float64)
        jacobian = jax.jit(jax.jacobian(lambda v: ops.flare(q, k, v)))(v)
        for head in range(3):
            matrix = jacobian[:, head, 1, :, head, 1]
            eye = np.zeros((11, 3, 11))
            eye[:, head] = np.eye(11)
            expected = oracles.flare(q, k, eye)[:, head]
            assert_close(matrix, expected, error=TIGHT)
            assert_close(matrix.sum(1), np.ones(11), error=TIGHT)
            sizes = np.linalg.svd(matrix, compute_uv=False)
            assert sizes[2] > 1e-4 and np.all(sizes[3:] < TIGHT)
        # Heads and channels do not mix.
        assert not np.any(jacobian[:, 0, :, :, 1:]) and not np.any(
            jacobian[:, 0, 0, :, 0, 1:]
        )


# Sharded over N = 24 points. The loss is reduced inside the region. Latents are used
# both by every shard (`share`, whose weights differ) and as they are.


def gather_loss(args, weights, mask, axis_name=None):
    q, k, v = args
    z, log_mass = ops.gather(q, k, v, mask=mask, axis_name=axis_name)
    shared, other = ops.gather(q, k, mask=mask, axis_name=axis_name)
    return latents_loss((z, shared), (log_mass, other), weights, axis_name)


def latents_loss(read, log_masses, weights, axis_name):
    share = weights["points"].sum()
    total = 0.0
    for z in read:
        w = weights["latents"][..., : z.shape[-1]]
        total += jnp.sum(w * z**2) + reduce(share * jnp.sum(w * jnp.sin(z)), axis_name)
    for log_mass in log_masses:
        log_mass = jnp.where(jnp.isfinite(log_mass), log_mass, 0)
        w = weights["latents"][..., 0]
        total += jnp.sum(w * log_mass) + reduce(
            share * jnp.sum(w * jnp.sin(log_mass)), axis_name
        )
    return total


def reduce(x, axis_name):
    return x if axis_name is None else jax.lax.psum(x, axis_name)


def points_loss(y, weights, axis_name):
    return reduce(jnp.sum(jnp.sin(y) * weights["points"][..., None, None]), axis_name)


def scatter_loss(args, weights, mask, axis_name=None):
    q, k, z = args
    y = ops.scatter(k, q, z, mask=mask, axis_name=axis_name)
    return points_loss(y, weights, axis_name)


def flare_loss(args, weights, mask, axis_name=None):
    y = ops.flare(*args, mask=mask, axis_name=axis_name)
    return points_loss(y, weights, axis_name)


def flarepp_loss(args, weights, mask, axis_name=None):
    *args, reference, gate = args
    options = {"reference": reference, "gate": gate}
    y = ops.flarepp(*args, **options, mask=mask, axis_name=axis_name)
    return points_loss(y, weights, axis_name)


POINTS, WHOLE = P(None, "context"), P()
LOSSES = {
    gather_loss: (WHOLE, POINTS, POINTS),
    scatter_loss: (WHOLE, POINTS, WHOLE),
    flare_loss: (WHOLE, POINTS, POINTS),
    flarepp_loss: (WHOLE, POINTS, POINTS, POINTS, POINTS, WHOLE, WHOLE),
}


def shard_inputs(loss, dtype):
    b, n, h, m, e = 3, 24, 3, 5, 6
    q, k, v, z, mask = inputs((b,), n=n, dtype=dtype)
    # The second item is all padding; of the others, so are the first 12 points: the
    # whole of one shard out of 2, of two out of 4 and of four out of 8.
    mask = mask.at[1].set(False).at[:, :12].set(False)
    # And one with three real points, for eight devices.
    few = jnp.zeros_like(mask).at[:, jnp.asarray([5, 6, 19])].set(True)
    weights = {
        "points": like(jnp.zeros((b, n), dtype), seed=4),
        "latents": like(jnp.zeros((h, m, e), dtype), seed=5),
    }
    pp, options, _ = gated((b,), n=n, dtype=dtype)
    args = {
        gather_loss: (q, k, v),
        scatter_loss: (q, k, z),
        flare_loss: (q, k, v[..., :4]),
        flarepp_loss: (*pp, options["reference"], options["gate"]),
    }[loss]
    return args, weights, (mask, few)


@functools.cache
def one_device(loss, dtype):
    args, weights, masks = shard_inputs(loss, dtype)
    f = jax.jit(jax.value_and_grad(loss))
    return [f(args, weights, mask) for mask in masks]


def context_mesh(shards):
    return jax.make_mesh((shards,), ("context",), axis_types=(AxisType.Auto,))


def operations(text):
    """Collectives of a compiled program, by name."""
    names = "all-reduce", "all-gather", "all-to-all", "collective-permute"
    names += ("reduce-scatter",)
    count = lambda name: text.count(f" {name}(") + text.count(f" {name}-start(")
    return {name: count(name) for name in names if count(name)}


@pytest.mark.parametrize(
    "dtype, shards",
    [(jnp.float32, 4)] + [(jnp.float64, shards) for shards in (1, 2, 4, 8)],
)
@pytest.mark.parametrize("loss", LOSSES)
def test_shards_equal_one_device(loss, dtype, shards):
    with jax.enable_x64(dtype == jnp.float64):
        args, weights, masks = shard_inputs(loss, dtype)
        sharded = jax.shard_map(
            functools.partial(loss, axis_name="context"),
            mesh=context_mesh(shards),
            in_specs=(LOSSES[loss], {"points": POINTS, "latents": WHOLE}, POINTS),
            out_specs=P(),
        )
        step = jax.jit(jax.value_and_grad(sharded))
        step = step.lower(args, weights, masks[0]).compile()
        for mask, expected in zip(masks, one_device(loss, dtype), strict=True):
            actual = step(args, weights, mask)
            assert_close(actual, expected, error=SHARDED[dtype])
        assert set(operations(step.as_text())) == {"all-reduce"}


def test_forward_collectives():
    """Gather: one maximum, one sum. Scatter: none."""
    q, k, v, z, mask = inputs((3,), n=24)
    over = functools.partial(jax.shard_map, mesh=context_mesh(4))
    gather = over(
        lambda q, k, v, mask: ops.gather(q, k, v, mask=mask, axis_name="context"),
        in_specs=(WHOLE, POINTS, POINTS, POINTS),
        out_specs=WHOLE,
    )
    compiled = jax.jit(gather).lower(q, k, v, mask).compile()
    assert operations(compiled.as_text()) == {"all-reduce": 2}
    error = ERROR[jnp.float32]
    assert_close(
        compiled(q, k, v, mask), oracles.gather(q, k, v, mask=mask), error=error
    )
    scatter = over(
        lambda k, q, z, mask: ops.scatter(k, q, z, mask=mask, axis_name="context"),
        in_specs=(POINTS, WHOLE, WHOLE, POINTS),
        out_specs=POINTS,
    )
    compiled = jax.jit(scatter).lower(k, q, z, mask).compile()
    assert operations(compiled.as_text()) == {}
    expected = oracles.scatter(k, q, z, mask=mask)
    assert_close(compiled(k, q, z, mask), expected, error=error)
