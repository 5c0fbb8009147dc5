"""Gather in splits side by side, and by a fused attention with its log-normaliser."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from test_latent import ERROR, TIGHT, empty_apart, inputs, like

from flaxmix import ops
from flaxmix.ops import latent, online, stream

import oracles
from closeness import assert_close

# Prime, so that no number of splits comes out even.
B, N = 3, 23


def points(n=N, dtype=jnp.float64, e=6):
    """q, k, v; masks: random, with a whole split of padding, an item of padding."""
    q, k, v, _, mask = inputs((B,), n=n, e=e, dtype=dtype)
    return q, k, v, mask.at[1, : n // 2].set(False).at[2].set(False)


def run(q, k, v, mask, **options):
    """Results and gradients; with L as a pattern and finite numbers."""
    f = functools.partial(ops.gather, mask=mask, **options)
    result, back = jax.vjp(f, *(x for x in (q, k, v) if x is not None))
    return result, back(like(result))


def apart(found):
    result, grads = found
    return empty_apart(*result), grads


@functools.cache
def expected(n, dtype, case, e):
    """Of a masked gather, a plain one, and one whose values are the keys."""
    q, k, v, mask = points(n, dtype, e)
    mask = mask if case == "masked" else None
    values = k if case == "keys" else v
    result = oracles.gather(q, k, values, mask=mask)
    types = (dtype, jnp.promote_types(dtype, jnp.float32))
    cotangents = like(
        tuple(np.asarray(x, t) for x, t in zip(result, types, strict=True))
    )
    dq, dk, dv = oracles.gather_vjp(q, k, values, *cotangents, mask=mask)
    grads = (dq, dk + dv) if case == "keys" else (dq, dk, dv)
    return empty_apart(*result), grads


CASES = "masked", "plain", "keys"


def three(q, k, v, mask, **options):
    return {
        "masked": run(q, k, v, mask, **options),
        "plain": run(q, k, v, None, **options),
        "keys": run(q, k, None, None, **options),
    }


def compare(found, n, dtype, error, e=6):
    for case in CASES:
        assert_close(apart(found[case]), expected(n, dtype, case, e), error=error)
    # The item of padding, bit for bit.
    (z, log_mass), (_, dk, dv) = found["masked"]
    assert not np.any(z[2]) and np.all(np.isneginf(log_mass[2]))
    assert not np.any(dk[2]) and not np.any(dv[2])


@pytest.mark.parametrize(
    "splits, block",
    [
        pytest.param(1, 4, marks=pytest.mark.slow),
        (2, None),
        pytest.param(3, 5, marks=pytest.mark.slow),
        pytest.param(5, None, marks=pytest.mark.slow),
        (5, 2),
        (N, None),
        pytest.param(N + 4, 1, marks=pytest.mark.slow),
    ],
)
def test_splits_and_blocks_change_nothing(splits, block):
    with jax.enable_x64(True):
        f = jax.jit(functools.partial(three, splits=splits, block=block))
        compare(f(*points()), N, jnp.float64, TIGHT)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16, jnp.float16],
)
def test_splits_keep_the_precision(dtype):
    f = jax.jit(functools.partial(three, splits=3))
    found = f(*points(dtype=dtype))
    (z, log_mass), grads = found["plain"]
    assert log_mass.dtype == jnp.float32
    assert {x.dtype for x in (z, *grads)} == {jnp.dtype(dtype)}
    compare(found, N, dtype, ERROR[dtype])


def sharded(f, shards):
    mesh = jax.make_mesh((shards,), ("context",), axis_types=(AxisType.Auto,))
    here = P(None, "context")
    both = (P(), P()), (P(), here, here)
    return jax.shard_map(
        functools.partial(f, axis_name="context"),
        mesh=mesh,
        in_specs=(P(), here, here, here),
        out_specs={"masked": both, "plain": both, "keys": (both[0], (P(), here))},
    )


@pytest.mark.parametrize("splits, block", [(4, None), (3, 1)])
def test_shards_in_splits_change_nothing(splits, block):
    """Six points a device: parts of two, or of two, two, two and none."""
    with jax.enable_x64(True):
        f = functools.partial(three, splits=splits, block=block)
        found = jax.jit(sharded(f, 4))(*points(24))
        compare(found, 24, jnp.float64, TIGHT)


def test_masked_points_never_matter_in_splits():
    q, k, v, mask = points(dtype=jnp.float32)
    f = jax.jit(functools.partial(run, splits=4, block=2))
    results = []
    for fill in (0.0, np.nan, np.inf):
        hide = lambda x, fill=fill: jnp.where(mask[..., None, None], x, fill)
        results.append(apart(f(q, hide(k), hide(v), mask)))
    for other in results[1:]:
        assert_close(other, results[0], error=0.0)


@pytest.mark.parametrize("splits", [1, 3])
def test_huge_scores_stay_exact_in_splits(splits):
    """Scores in the thousands: all but one probability is 0, in one split of all."""
    q, k, v, _ = points(dtype=jnp.float32)
    f = jax.jit(functools.partial(run, mask=None, splits=splits))
    (z, log_mass), (dq, dk, dv) = f(1e4 * q, k, v)
    best = np.einsum("hmd,bnhd->bhmn", q, k).argmax(-1)
    chosen = np.moveaxis(np.asarray(v), 1, 2)
    chosen = np.take_along_axis(chosen[:, :, None], best[..., None, None], 3)[..., 0, :]
    assert_close(z, chosen, error=1e-3)
    assert_close((log_mass, dq, dk, dv), (log_mass, dq, dk, dv), error=0.0)


# Dropout: which probabilities are dropped depends on the splits, nothing else does.


def test_dropout_is_the_same_in_both_directions():
    """The derivative is that of the forward pass with the key that it had."""
    with jax.enable_x64(True):
        q, k, v, _, mask = inputs((), n=7, m=2, dtype=jnp.float64)
        options = {"splits": 3, "block": 2, "dropout": 0.3, "key": jax.random.key(3)}
        both = functools.partial(run, mask=mask, **options)
        (z, log_mass), grads = jax.jit(both)(q, k, v)
        f = jax.jit(functools.partial(ops.gather, mask=mask, **options))
        dz, dlog = like((z, log_mass))
        # L knows no dropout; z is linear in v.
        _, plain = oracles.gather(q, k, v, mask=mask)
        assert_close(log_mass, plain, error=TIGHT)
        inner = lambda a, b: sum(np.sum(x * y) for x, y in zip(a, b, strict=True))
        np.testing.assert_allclose(inner([dz], [z]), inner([grads[2]], [v]), rtol=TIGHT)
        for i, argument in enumerate((q, k, v)):
            along = like(argument, seed=7)
            ends = []
            for step in (1e-5, -1e-5):
                steps = [q, k, v]
                steps[i] = argument + step * along
                ends.append(inner((dz, dlog), f(*steps)))
            slope = (ends[0] - ends[1]) / 2e-5
            np.testing.assert_allclose(inner([grads[i]], [along]), slope, rtol=1e-7)


RATE = 0.3


@functools.partial(jax.jit, static_argnames=("splits", "block"))
def kept(keys, splits, block):
    """Which of 12 equal probabilities are kept, [K, H, M, 12]."""
    k = jnp.zeros((12, 2, 3))
    eye = jnp.broadcast_to(jnp.eye(12)[:, None], (12, 2, 12))
    options = {"dropout": RATE, "splits": splits, "block": block}
    f = lambda key: ops.gather(jnp.zeros((2, 5, 3)), k, eye, key=key, **options)[0]
    return 12 * (1 - RATE) * jax.vmap(f)(keys)


@pytest.mark.parametrize("splits, block", [(1, None), (3, None), (3, 2)])
def test_dropout_of_each_part_is_its_own(splits, block):
    found = np.asarray(kept(jax.random.split(jax.random.key(0), 500), splits, block))
    assert np.abs(found * (found - 1)).max() < 1e-5
    found = found.round()
    # The expectation is the plain average: five standard errors of 5,000 draws.
    share = found.mean((0, 1, 2))
    error = (RATE * (1 - RATE) / 5000) ** 0.5
    assert np.abs(share - (1 - RATE)).max() < 5 * error
    # No two points, heads or latents fall together.
    flat = found.reshape(500, -1)
    together = np.corrcoef(flat.T) - np.eye(flat.shape[1])
    assert np.abs(together).max() < 0.35


# What is asked for.


@pytest.mark.parametrize("splits", [0, -2])
def test_splits_must_be_positive(splits):
    q, k, v, _ = points(dtype=jnp.float32)
    with pytest.raises(ValueError, match=f"splits must be at least 1, got {splits}"):
        ops.gather(q, k, v, splits=splits)


def test_unknown_implementation():
    q, k, v, _ = points(dtype=jnp.float32)
    # Past the check of types, which would be the first to object.
    gather = latent.gather.__wrapped__
    with pytest.raises(ValueError, match="no implementation='triton'; there are xla"):
        gather(q, k, v, implementation="triton")


@pytest.mark.parametrize(
    "dtype, backend, dropout, message",
    [
        (jnp.bfloat16, "cpu", 0.0, "got bfloat16 on cpu.$"),
        (jnp.float32, "gpu", 0.0, "got float32 on gpu.$"),
        (jnp.float16, "gpu", 0.1, "got float16 on gpu with dropout.$"),
    ],
)
def test_what_cudnn_does_not_do(monkeypatch, dtype, backend, dropout, message):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    q, k, v, _ = points(dtype=dtype)
    options = {"dropout": dropout, "key": jax.random.key(0)}
    with pytest.raises(ValueError, match="implementation='cudnn' needs .*" + message):
        ops.gather(q, k, v, implementation="cudnn", **options)


def test_cudnn_takes_values_as_wide_as_the_keys(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    q, k, v, _ = points(dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="values as wide as the keys, got 6 and 4"):
        ops.gather(q, k, v, implementation="cudnn")


def test_number_of_splits(monkeypatch):
    """One on CPUs; elsewhere the more, the fewer rows, and never of few points."""
    assert stream.split_count(1, 2**20) == 1
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    counts = [stream.split_count(rows, 2**20) for rows in (1, 8, 64, 256, 257, 1000)]
    assert counts == [256, 32, 4, 1, 1, 1]
    for n in (1, 1023, 1024, 2047, 2048, 100_000):
        for rows in (1, 8, 300):
            splits = stream.split_count(rows, n)
            assert splits == 1 or n // splits >= 1024
    assert stream.split_count(8, 2047) == 1 and stream.split_count(8, 2048) == 2


@pytest.mark.parametrize(
    "backend, batch, n, options, splits",
    [
        ("cpu", (), 5000, {}, 1),
        ("gpu", (), 5000, {}, 4),
        # 3 heads of 2 x 32 items are 192 rows.
        ("gpu", (2, 32), 5000, {}, 1),
        ("gpu", (2, 16), 5000, {}, 2),
        ("gpu", (), 5000, {"splits": 7}, 7),
        ("cpu", (), 5, {"splits": 7}, 5),
    ],
)
def test_gather_chooses_splits(monkeypatch, backend, batch, n, options, splits):
    class Called(Exception):
        pass

    def attend(q, k, v, mask, key, options):
        raise Called(options.splits)

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(latent, "attend", attend)
    shape = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    gather = functools.partial(ops.gather, **options)
    with pytest.raises(Called) as called:
        jax.eval_shape(gather, shape(3, 5, 4), shape(*batch, n, 3, 4))
    assert called.value.args == (splits,)


def test_splits_share_the_block_of_scores(monkeypatch):
    """Together they hold what one block without splits would."""
    monkeypatch.setitem(stream._SCORES, "cpu", 2**20)
    q = jnp.zeros((1, 8, 64, 2))
    for splits, n, block in ((1, 2**20, 2048), (4, 2**20, 512), (3, 2000, 667)):
        options = online.Options(splits=splits)
        assert online._of_each(options, q, n).block == block
    few = online._of_each(online.Options(splits=32), q, 2**20)
    assert few.block == 256
    given = online.Options(splits=32, block=7)
    assert online._of_each(given, q, 2**20) == given


# The fused forward pass, by JAX's own attention in place of cuDNN's.


@pytest.fixture
def fused(monkeypatch):
    """Lets `implementation="cudnn"` run here; returns the numbers of calls."""
    calls, original = [], online._fused

    def by_xla(q, k, v, mask, implementation):
        calls.append(implementation)
        return original(q, k, v, mask, "xla")

    monkeypatch.setattr(online, "_fused", by_xla)
    return calls


@pytest.mark.parametrize("case", CASES)
def test_fused_part_of_all_points(case):
    """Its maximum is the log-normaliser, its mass 1, its sum the average."""
    q, k, v, mask = points(dtype=jnp.float32, e=4)
    wide = jnp.broadcast_to(q / 2, (B, *q.shape))
    top, mass, y = jax.jit(online._fused, static_argnums=4)(
        wide,
        stream_layout(k),
        None if case == "keys" else stream_layout(v),
        mask if case == "masked" else None,
        "xla",
    )
    real = np.arange(B) < (2 if case == "masked" else B)
    assert np.array_equal(mass, np.broadcast_to(real[:, None, None], mass.shape))
    (z, log_mass, empty), _ = expected(N, jnp.float32, case, 4)
    assert np.array_equal(np.isneginf(top), empty)
    top = np.where(empty, 0, top)
    assert_close((y, top), (z, log_mass), error=ERROR[jnp.float32])


def test_fused_mask_has_a_row_for_each_latent(monkeypatch):
    """cuDNN takes no other."""
    q, k, v, mask = points(dtype=jnp.bfloat16, e=4)
    found = []

    def attention(query, key, value, *, mask, **options):
        found.append(mask.shape)
        return query, query[..., 0]

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    wide = jnp.broadcast_to(q, (B, *q.shape))
    online._fused(wide, stream_layout(k), stream_layout(v), mask, "cudnn")
    assert found == [(B, 1, 5, N)]


def stream_layout(x):
    return jnp.moveaxis(x, -3, -1)


def attend_fused(q, k, v, mask, axis_name=None):
    """Results and gradients of `attend` itself, which takes float32, too."""
    options = online.Options(implementation="cudnn", axis_name=axis_name, splits=2)
    if axis_name is not None:
        q = jax.lax.pcast(q, axis_name, to="varying")

    def f(q, k, v):
        wide = jnp.broadcast_to(q / 2, (B, *q.shape))
        k, v = stream_layout(k), None if v is None else stream_layout(v)
        return online.attend(wide, k, v, mask, None, options)

    given = [x for x in (q, k, v) if x is not None]
    result, back = jax.vjp(lambda q, k, v=None: f(q, k, v), *given)
    dq, *rest = back(like(result))
    if axis_name is not None:
        dq = jax.lax.psum(dq, axis_name)
    return result, (dq, *rest)


def attend_cases(q, k, v, mask, axis_name=None):
    return {
        "masked": attend_fused(q, k, v, mask, axis_name),
        "plain": attend_fused(q, k, v, None, axis_name),
        "keys": attend_fused(q, k, None, None, axis_name),
    }


def test_fused_equals_oracle(fused):
    found = jax.jit(attend_cases)(*points(dtype=jnp.float32, e=4))
    compare(found, N, jnp.float32, ERROR[jnp.float32], e=4)
    assert fused == ["cudnn"] * 3


def test_fused_shards_equal_oracle(fused):
    found = jax.jit(sharded(attend_cases, 4))(*points(24, jnp.float32, e=4))
    compare(found, 24, jnp.float32, ERROR[jnp.float32], e=4)
    assert fused == ["cudnn"] * 3


def test_gather_by_the_fused_pass(fused, monkeypatch):
    # JAX's own has no float16 on CPUs.
    dtype = jnp.bfloat16
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    f = functools.partial(three, implementation="cudnn")
    found = jax.jit(f)(*points(dtype=dtype, e=4))
    compare(found, N, dtype, ERROR[dtype], e=4)
    assert fused == ["cudnn"] * 3


@pytest.mark.parametrize("block", [0, -1])
def test_blocks_are_positive(block):
    q, k = jnp.ones((2, 3, 4)), jnp.ones((5, 2, 4))
    with pytest.raises(
        ValueError, match=f"block must be a positive integer, got {block}"
    ):
        ops.gather(q, k, block=block)
