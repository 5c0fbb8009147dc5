"""Softmax attention: values, gradients, masks, blocks and extremes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from flaxmix import ops

import oracles
from closeness import assert_close

# Gradients included. float32: 32 ulps, for sums of tens of terms. Below it the
# scaled queries, the probabilities and the result are rounded once each, and scores
# of size 4 multiply the first of these: 8 roundings.
ERROR = {jnp.float32: 32 * 2**-23, jnp.bfloat16: 8 * 2**-8, jnp.float16: 8 * 2**-11}
# Rounding of float64 in sums of up to 100 terms.
TIGHT = 1e-12


def inputs(batch=(2,), *, q=5, n=7, h=3, d=4, e=6, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    new = lambda *shape: jnp.asarray(rng.normal(size=(*batch, *shape)), dtype)
    mask = rng.random((*batch, n)) < 0.7
    mask[..., -1] = True
    return (new(q, h, d), new(n, h, d), new(n, h, e)), jnp.asarray(mask)


def cotangents(batch=(2,), *, q=5, h=3, e=6, dtype=jnp.float32, seed=1):
    rng = np.random.default_rng(seed)
    dlog = jnp.promote_types(dtype, jnp.float32)
    return (
        jnp.asarray(rng.normal(size=(*batch, q, h, e)), dtype),
        jnp.asarray(rng.normal(size=(*batch, h, q)), dlog),
    )


def empty_apart(y, log_mass):
    """The -inf of empty rows as a pattern, so that everything else is finite."""
    log_mass = np.asarray(log_mass, np.float64)
    empty = np.isneginf(log_mass)
    return y, np.where(empty, 0, log_mass), empty


@functools.partial(jax.jit, static_argnames="block")
def run(args, cotangent, mask=None, *, block=None):
    """Results and gradients."""
    f = functools.partial(ops.attention, mask=mask, block=block)
    result, back = jax.vjp(f, *args)
    return result, back(cotangent)


@functools.partial(jax.jit, static_argnames="scale")
def attention(q, k, v, mask=None, *, scale=None):
    return ops.attention(q, k, v, mask=mask, scale=scale)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(
    "n, batch, masked", [(1, (2,), False), (64, (), False), (1000, (2, 3), True)]
)
def test_matches_oracle(dtype, n, batch, masked):
    args, mask = inputs(batch, n=n, q=5 if n < 1000 else 2, dtype=dtype)
    mask = mask if masked else None
    y, log_mass = attention(*args, mask)
    assert y.dtype == dtype and log_mass.dtype == jnp.float32
    expected = oracles.attention(*args, mask=mask)
    assert_close((y, log_mass), expected, error=ERROR[dtype])


@pytest.mark.parametrize("dtype", ERROR)
def test_gradients_match_oracle(dtype):
    args, mask = inputs(dtype=dtype)
    dy, dlog = cotangents(dtype=dtype)
    result, grads = run(args, (dy, dlog), mask)
    expected = oracles.attention(*args, mask=mask)
    assert_close(empty_apart(*result), empty_apart(*expected), error=ERROR[dtype])
    assert {g.dtype for g in grads} == {jnp.dtype(dtype)}
    expected = oracles.attention_vjp(*args, dy, dlog, mask=mask)
    assert_close(grads, expected, error=ERROR[dtype])


def test_gradients_match_differences():
    with jax.enable_x64(True):
        args, mask = inputs((), n=5, q=3, h=2, d=3, e=2, dtype=jnp.float64)
        check_grads(
            jax.jit(functools.partial(ops.attention, mask=mask)),
            args,
            order=1,
            modes=["rev"],
            atol=1e-7,
            rtol=1e-7,
        )


@functools.cache
def whole():
    """The result and the gradients without blocks: 67 keys, some masked."""
    args, mask = inputs(n=67, dtype=jnp.float64)
    dy = cotangents(dtype=jnp.float64)
    result, grads = run(args, dy, mask, block=67)
    expected = oracles.attention(*args, mask=mask)
    assert_close(result, expected, error=TIGHT)
    expected = oracles.attention_vjp(*args, *dy, mask=mask)
    assert_close(grads, expected, error=TIGHT)
    return args, dy, mask, result, grads


@pytest.mark.parametrize("block", [1, 3, 64, 66, None])
def test_blocks_change_nothing(block):
    with jax.enable_x64(True):
        args, dy, mask, *expected = whole()
        actual = run(args, dy, mask, block=block)
        assert_close(list(actual), expected, error=TIGHT)


@pytest.mark.parametrize("block", [None, 3])
def test_masked_keys_never_matter(block):
    args, mask = inputs()
    mask = mask.at[1].set(False)
    results = []
    for fill in (0.0, 1.0, np.nan, np.inf, -np.inf):
        q, k, v = args
        k, v = (jnp.where(mask[..., None, None], x, fill) for x in (k, v))
        result, grads = run((q, k, v), cotangents(), mask, block=block)
        results.append((empty_apart(*result), grads))
    for other in results[1:]:
        assert_close(other, results[0], error=0.0)


@pytest.mark.parametrize("block", [None, 3])
def test_empty_item_gives_zero_and_finite_gradients(block):
    args, mask = inputs()
    mask = mask.at[1].set(False)
    (y, log_mass), (dq, dk, dv) = run(args, cotangents(), mask, block=block)
    assert not np.any(y[1]) and np.all(np.isneginf(log_mass[1]))
    assert np.all(np.isfinite(log_mass[0]))
    zeros = jax.tree.map(lambda g: np.zeros(g[1].shape), (dq, dk, dv))
    assert_close((dq[1], dk[1], dv[1]), zeros, error=0.0)
    # The other item is what it is alone.
    alone = oracles.attention_vjp(
        *(x[0] for x in args), *(x[0] for x in cotangents()), mask=mask[0]
    )
    assert_close((dq[0], dk[0], dv[0]), alone, error=ERROR[jnp.float32])


def test_padding_length_changes_nothing():
    args, _ = inputs(n=7)
    longer, _ = inputs(n=12, seed=2)
    (q, k, v), (_, k2, v2) = args, longer
    k2, v2 = k2.at[:, :7].set(k), v2.at[:, :7].set(v)
    mask = jnp.arange(12) < 7
    actual = attention(q, k2, v2, jnp.broadcast_to(mask, (2, 12)))
    assert_close(actual, attention(q, k, v), error=ERROR[jnp.float32])


def test_scale():
    args, _ = inputs()
    expected = oracles.attention(*args, scale=0.3)
    assert_close(attention(*args, scale=0.3), expected, error=ERROR[jnp.float32])


def test_shifting_every_score_shifts_only_the_log_mass():
    (q, k, v), _ = inputs()
    y, log_mass = attention(q, k, v)
    shift = jnp.asarray(np.random.default_rng(5).normal(size=4), jnp.float32)
    shifted, moved = attention(q, k + shift, v)
    # Scores grow, so their rounding does too: twice the usual budget.
    error = 2 * ERROR[jnp.float32]
    assert_close(shifted, y, error=error)
    by = jnp.swapaxes(q @ shift, -1, -2) / 2
    assert_close(moved, log_mass + by, error=error)


def test_permuting_keys_changes_nothing_and_queries_permute():
    (q, k, v), mask = inputs()
    p, r = np.random.default_rng(3).permutation(7), [3, 0, 4, 1, 2]
    y, log_mass = attention(q, k, v, mask)
    actual = attention(q[:, r], k[:, p], v[:, p], mask[:, p])
    assert_close(actual, (y[:, r], log_mass[..., r]), error=ERROR[jnp.float32])


@pytest.mark.parametrize("dtype", ERROR)
def test_large_logits_stay_finite(dtype):
    args, mask = inputs(dtype=dtype)
    # float16 ends at 65504.
    q = args[0] * (1e4 if dtype != jnp.float16 else 1e3)
    (y, log_mass), grads = run((q, *args[1:]), cotangents(dtype=dtype), mask)
    expected = oracles.attention(q, *args[1:], mask=mask)
    # A sharp softmax reads one key, and rounding of the score, not of the result,
    # would decide between equal ones; these are far apart.
    assert_close((y, log_mass), expected, error=ERROR[dtype])
    for g in grads:
        assert np.all(np.isfinite(np.asarray(g, np.float32)))


def test_float16_scores_beyond_its_range():
    """The products sum to 102,400, past float16; scaled, to 12,800."""
    x = jnp.full((1, 1, 1, 64), 40, jnp.float16)
    dy = jnp.ones((1, 1, 1, 64), jnp.float16), jnp.ones((1, 1, 1))
    (y, log_mass), grads = run((x, x, x), dy)
    assert_close((y, log_mass), (x, np.full((1, 1, 1), 12800.0)), error=0.0)
    # dL/dq = k / 8, rounded once at most.
    expected = (x / 8, x / 8, jnp.ones_like(x))
    assert_close(grads, expected, error=ERROR[jnp.float16])


@pytest.mark.parametrize("block", [None, 999])
def test_many_equal_keys_in_float16(block):
    n = 70_000
    q, k, v = (jnp.full((n, 1, d), x, jnp.float16) for d, x in ((4, 1), (4, 2), (1, 3)))
    dy = jnp.ones((1, 1, 1), jnp.float16), jnp.ones((1, 1))
    (y, log_mass), grads = run((q[:1], k, v), dy, block=block)
    # The score is exact, 4; the sum and the logarithm are float32.
    assert_close(y, np.full((1, 1, 1), 3.0), error=0.0)
    expected = np.full((1, 1), 4 + np.log(n))
    assert_close(log_mass, expected, error=ERROR[jnp.float32])
    # Gradients of the keys are 1 / n each, which float16 holds to its last bit only
    # as a subnormal number, 2^-24.
    assert_close(grads[0], np.full((1, 1, 4), 1.0), error=ERROR[jnp.float16])
    assert_close(grads[2], np.full((n, 1, 1), 1 / n), error=2**-24 * n)
