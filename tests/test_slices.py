"""Slices, noise, dropout, anchors and linear attention: the operators by themselves."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from jax.test_util import check_grads

from flaxmix import ops

from closeness import assert_close

B, N, H, D, M, E = 2, 11, 3, 4, 5, 6
TIGHT = 1e-12


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def weights(k, q, mask, u, rate):
    """softmax_M(k q^T + rate g) [B, N, H, M], 0 where masked."""
    s = jnp.einsum("bnhd,hmd->bnhm", k, q)
    if u is not None:
        g = -jnp.log(-jnp.log(u + 1e-8) + 1e-8)
        g = jnp.swapaxes(g, 1, 2)
        s = s + (g if rate is None else g * rate[..., None])
    w = jax.nn.softmax(s, -1)
    return w if mask is None else jnp.where(mask[..., None, None], w, 0)


def dense_pool(k, q, v, rate, mask, u):
    w = weights(k, q, mask, u, rate)
    mass = w.sum(1)
    return jnp.einsum("bnhm,bnhe->bhme", w, v) / (mass[..., None] + 1e-5), mass


def dense_scatter(k, q, z, rate, mask, u):
    return jnp.einsum("bnhm,bhme->bnhe", weights(k, q, mask, u, rate), z)


def value_and_pull(f, *args):
    """Results, and gradients at a cotangent of their cosines, in one compiled call."""

    @jax.jit
    def run(*args):
        y, back = jax.vjp(f, *args)
        return y, back(jax.tree.map(jnp.cos, y))

    return run(*args)


def default_of(cases, default):
    """Parameters of all cases, of which those that are no default are slow."""
    assert set(default) <= set(cases)
    slow = lambda case: pytest.param(*case, marks=pytest.mark.slow)
    return [case if case in default else slow(case) for case in cases]


@functools.cache
def _random():
    rng = np.random.default_rng(3)
    u = jnp.asarray(rng.uniform(size=(B, H, N, M)))
    mask = jnp.asarray(rng.random((B, N)) < 0.7).at[:, 0].set(True)
    return u, mask


@pytest.mark.parametrize(
    "block,noisy,masked",
    default_of(
        list(itertools.product([None, 4], ["no", "noise", "rate"], [False, True])),
        [
            (None, "no", False),
            (None, "noise", True),
            (4, "no", True),
            (4, "rate", True),
        ],
    ),
)
def test_pool_and_scatter_are_their_formulas(block, noisy, masked):
    with jax.enable_x64(True):
        k, q, v, z = arrays((B, N, H, D), (H, M, D), (B, N, H, E), (B, H, M, E))
        rate = jnp.exp(arrays((B, N, H), seed=1)[0]) if noisy == "rate" else None
        u, mask = _random()
        u, mask = (u if noisy != "no" else None), (mask if masked else None)
        options = {"mask": mask, "noise": u, "block": block}

        def pool(k, q, v, rate):
            return ops.pool(k, q, v, rate=rate, **options)

        def scatter(k, q, z, rate):
            return ops.scatter(k, q, z, scale=1.0, rate=rate, **options)

        for ours, dense, x in ((pool, dense_pool, v), (scatter, dense_scatter, z)):
            args = (k, q, x, rate)
            expected = value_and_pull(lambda *a, f=dense: f(*a, mask, u), *args)
            assert_close(value_and_pull(ours, *args), expected, error=TIGHT)


@pytest.mark.parametrize(
    "block,each,masked",
    default_of(
        list(itertools.product([None, 4], [False, True], [False, True])),
        [(None, False, False), (4, True, True)],
    ),
)
def test_noise_of_a_key_is_the_noise_of_its_uniforms(block, each, masked):
    """One for each point by its rank, in every block; a key for all items or each."""
    with jax.enable_x64(True):
        k, q, v = arrays((B, N, H, D), (H, M, D), (B, N, H, E))
        mask = _random()[1] if masked else None
        key = jax.random.key(7)
        keys = jax.random.split(key, B) if each else key
        ranks = np.cumsum(np.ones((B, N)) if mask is None else mask, -1) - 1
        u = np.empty((B, H, N, M))
        for b, n in np.ndindex(B, N):
            own = jax.random.fold_in(keys[b] if each else key, int(max(ranks[b, n], 0)))
            u[b, :, n] = jax.random.uniform(own, (H, M))
        options = {"mask": mask, "block": block}
        loss = lambda k, q, v, noise: ops.pool(k, q, v, noise=noise, **options)[0]
        expected = value_and_pull(lambda *a: loss(*a, jnp.asarray(u)), k, q, v)
        actual = value_and_pull(lambda *a: loss(*a, keys), k, q, v)
        assert_close(actual, expected, error=TIGHT)
        # And the points read with the same weights.
        z = jnp.swapaxes(v[:, :M], 1, 2)
        read = jax.jit(
            lambda noise: ops.scatter(k, q, z, scale=1.0, noise=noise, **options)
        )
        assert_close(read(keys), read(jnp.asarray(u)), error=TIGHT)


def test_masses_are_sums_of_more_than_half_precision_can_hold():
    k = jnp.ones((70_000, 1, 2), jnp.float16)
    q = jnp.ones((1, 2, 2), jnp.float16)
    tokens, mass = jax.jit(ops.pool)(k, q, k)
    assert_close(mass, np.full((1, 2), 35_000.0), error=1e-6)
    assert_close(tokens, np.ones((1, 2, 2)), error=1e-3)


def test_latents_that_may_not_be_read():
    with jax.enable_x64(True):
        k, q, z = arrays((B, N, H, D), (B, H, M, D), (B, H, M, E))
        keep = jnp.asarray([[True, False, True, True, False], [False] * M])

        def run(k, q, z):
            return ops.scatter(k, q, z, latent_mask=keep)

        few = lambda a: a[:1, :, np.asarray(keep[0])]
        # What they hold does not matter.
        hide = lambda a: jnp.where(keep[:, None, :, None], a, jnp.nan)
        q, z = hide(q), hide(z)
        y, (dk, dq, dz) = value_and_pull(run, k, q, z)
        expected, (ek, eq, ez) = value_and_pull(ops.scatter, k[:1], few(q), few(z))
        assert_close(y[:1], expected, error=TIGHT)
        assert not np.any(y[1])
        assert_close((dk[:1], few(dq), few(dz)), (ek, eq, ez), error=TIGHT)
        # Nothing to read: no derivative either, and nothing that is not finite.
        for gradient in (dk, dq, dz):
            assert not np.any(gradient[1])


def attention(q, k, v, **options):
    return ops.attention(q, k, v, **options)[0]


def gathered(q, k, v, **options):
    return ops.gather(jnp.swapaxes(q[0], 0, 1), k, v, **options)[0]


def scattered(q, k, v, **options):
    latents = lambda a: jnp.swapaxes(a, -3, -2)
    return ops.scatter(q, latents(k), latents(v), **options)


@pytest.mark.parametrize(
    "op,block",
    default_of(
        list(itertools.product([attention, gathered, scattered], [None, 4])),
        [(attention, 4), (gathered, None), (scattered, 4)],
    ),
)
def test_dropout(op, block):
    with jax.enable_x64(True):
        q, k = arrays((1, 7, H, D), (1, N, H, D))
        v = jnp.ones((1, N, H, 1))
        key = jax.random.key(3)
        run = jax.jit(functools.partial(op, block=block), static_argnames="dropout")
        # Nothing is dropped without a key, nor with a rate of 0.
        plain = run(q, k, v)
        assert_close(run(q, k, v, dropout=0.4), plain, error=0.0)
        assert_close(run(q, k, v, dropout=0.0, key=key), plain, error=0.0)
        # Rows of probabilities: what is kept is scaled up, and on average all is.
        draw = jax.jit(jax.vmap(lambda key: run(q, k, v, dropout=0.4, key=key)))
        y = np.asarray(draw(jax.random.split(key, 4000)))
        assert np.abs(y.std(0)).min() > 0.05
        # The mean of 4,000 sums, none of which deviates by more than 1.
        assert np.abs(y.mean(0) - 1).max() < 0.08
        # The derivative drops what the value dropped.
        (w,) = arrays((1, N, H, 2), seed=1)
        f = jax.jit(lambda q, k, w: op(q, k, w, dropout=0.4, key=key, block=block))
        check_grads(f, (q, k, w), order=1, modes=["rev"])


def test_dropout_differs_between_shards():
    key = jax.random.key(0)
    q, z = jnp.ones((1, 4, 2)), jnp.ones((1, 4, 64))
    # Equal points in every shard.
    k = jnp.ones((8, 1, 2))
    run = jax.shard_map(
        lambda k: ops.scatter(k, q, z, dropout=0.5, key=key, axis_name="context"),
        mesh=jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,)),
        in_specs=P("context"),
        out_specs=P("context"),
    )
    rows = np.asarray(jax.jit(run)(k))[:, 0, 0]
    assert len(np.unique(rows)) > 1
    y, again = jax.jit(run)(k), jax.jit(run)(k)
    assert_close(y, again, error=0.0)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 1.5])
def test_dropout_is_a_probability(dropout):
    q, k = jnp.ones((1, 2, 3)), jnp.ones((4, 1, 3))
    message = rf"dropout must be in \[0, 1\), got {dropout}"
    with pytest.raises(ValueError, match=message):
        ops.attention(k, k, k, dropout=dropout)
    with pytest.raises(ValueError, match=message):
        ops.gather(q, k, dropout=dropout)
    with pytest.raises(ValueError, match=message):
        ops.scatter(k, q, q, dropout=dropout)


def test_linear_attention_is_its_formula():
    with jax.enable_x64(True):
        q, k, v = arrays((B, N, H, D), (B, N, H, D), (B, N, H, D))
        mask = _random()[1]
        # A NaN behind the mask, and an item without real points.
        mask = mask.at[1].set(False)
        k = jnp.where(mask[..., None, None], k, jnp.nan)
        y = ops.linear_attention(q, k, v, mask=mask)
        a = np.exp(q) / np.exp(q).sum(-1, keepdims=True)
        assert_close(y[1], a[1], error=TIGHT)
        for n in range(N):
            for h in range(H):
                total, mass = np.zeros(D), 0.0
                for m in np.flatnonzero(mask[0]):
                    b = np.exp(k[0, m, h]) / np.exp(k[0, m, h]).sum()
                    total = total + (a[0, n, h] @ b) * v[0, m, h]
                    mass += a[0, n, h] @ b
                assert_close(y[0, n, h], total / mass + a[0, n, h], error=TIGHT)


draw_anchors = jax.jit(ops.draw_anchors, static_argnums=(1, 2))


def test_anchors_are_different_real_points():
    key, mask = jax.random.key(0), jnp.asarray([[True] * 9 + [False] * 3, [False] * 12])
    anchors, real = draw_anchors(key, 12, 5, mask=mask)
    assert anchors.shape == real.shape == (2, 5)
    assert real[0].all() and not real[1].any()
    assert len(set(anchors[0].tolist())) == 5 and anchors[0].max() < 9
    # The same points at every length of padding, and without any.
    alone, none = draw_anchors(key, 9, 5)
    assert none is None and set(alone.tolist()) == set(anchors[0].tolist())
    # Padding in between does not matter either.
    order = jnp.asarray([0, 9, 1, 2, 10, 3, 4, 5, 6, 7, 11, 8])
    mixed, _ = draw_anchors(key, 12, 5, mask=mask[:1, order])
    assert set(order[mixed[0]].tolist()) == set(alone.tolist())
    # All there are, where there are no more.
    few, real = draw_anchors(key, 12, 20, mask=mask)
    assert few.shape == (2, 12) and set(few[0][real[0]].tolist()) == set(range(9))
    assert set(draw_anchors(key, 3, 5)[0].tolist()) == {0, 1, 2}
    # Another key, another draw.
    other, _ = draw_anchors(jax.random.key(1), 1000, 5)
    assert set(other.tolist()) != set(draw_anchors(key, 1000, 5)[0].tolist())


def test_anchors_are_drawn_evenly():
    draw = lambda key: ops.draw_anchors(key, 10, 3)[0]
    drawn = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 3000))
    counts = np.bincount(np.ravel(drawn), minlength=10)
    # Binomial(3000, 0.3): standard deviation 25.
    assert np.abs(counts - 900).max() < 4.5 * 25


@pytest.mark.parametrize(
    "count,batch",
    default_of(
        list(itertools.product([3, 7, 30], [(2,), (2, 2), (2, 3)])),
        [(3, (2, 3)), (7, (2,)), (30, (2, 2))],
    ),
)
def test_sharded_anchors_are_those_of_one_device(count, batch):
    key = jax.random.key(2)
    mask = jnp.asarray(np.random.default_rng(0).random((*batch, 16)) < 0.6)

    def draw(mask):
        places, real = ops.draw_anchors(key, 4, count, mask=mask, axis_name="context")
        return places[None], real[None]

    sharded = jax.shard_map(
        draw,
        mesh=jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,)),
        in_specs=P(*[None] * len(batch), "context"),
        out_specs=P("context"),
    )
    places, real = jax.jit(sharded)(mask)
    expected, counted = draw_anchors(key, 16, count, mask=mask)
    for shard in range(4):
        for item in np.ndindex(*batch):
            ours = places[(shard, *item)][real[(shard, *item)]].tolist()
            theirs = expected[item][counted[item]].tolist()
            assert set(ours) == set(theirs) and len(ours) == len(theirs)


def test_rotation_turns_by_differences_alone():
    """q and k at x and y score like q and k at x + t and y + t."""
    with jax.enable_x64(True):
        q, k = arrays((N, H, 16), (N, H, 16))
        (coords,) = arrays((N, 3))
        score = lambda c: jnp.einsum(
            "nhd,mhd->nmh",
            ops.rotate(q, ops.rotary_angles(c, 16)),
            ops.rotate(k, ops.rotary_angles(c, 16)),
        )
        moved = score(coords + jnp.asarray([3.0, -7.0, 0.5]))
        assert_close(moved, score(coords), error=TIGHT)
        assert np.abs(score(2 * coords) - score(coords)).max() > 0.1


def test_rotary_angles_keep_their_digits_in_half_precision():
    """Positions up to 4,096 and 262,144, inputs in bfloat16."""
    place = jnp.asarray([[0.0], [4096.0], [262_144.0]])
    with jax.enable_x64(True):
        exact = ops.rotary_angles(place.astype(jnp.float64), 8)
    angles = ops.rotary_angles(place.astype(jnp.bfloat16), 8)
    assert angles.dtype == jnp.float32
    assert np.abs(angles[1] - np.asarray(exact[1])).max() < 3e-3
    x = jnp.ones((3, 1, 8), jnp.bfloat16)
    assert ops.rotate(x, angles).dtype == jnp.bfloat16


@pytest.mark.parametrize("width, axes", [(7, 1), (4, 3), (2, 2), (8, 0)])
def test_rotation_needs_two_channels_an_axis(width, axes):
    with pytest.raises(ValueError, match=f"of {axes} axes .* got {width}"):
        ops.rotary_frequencies(width, axes)


def test_float16_gradients_of_nearly_empty_slices_are_finite():
    k = jnp.zeros((1, 4, 1, 2), jnp.float16).at[..., 0].set(1)
    q = jnp.asarray([[[0, 0], [-20, 0]]], jnp.float16)
    for mask in (None, jnp.zeros((1, 4), bool)):
        loss = lambda k, q, v, mask=mask: ops.pool(k, q, v, mask=mask)[0].sum()
        grads = jax.jit(jax.grad(loss, (0, 1, 2)))(k, q, jnp.ones_like(k))
        assert all(np.isfinite(g).all() for g in grads)
