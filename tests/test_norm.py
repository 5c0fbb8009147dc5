"""LayerNorm and RMSNorm: functions and layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from flaxmix import ops
from flaxmix.layers import Norm

import oracles
from closeness import assert_close

# Statistics are float32: 16 ulps. Below it the normalised row, the factor, its
# product and the offset are rounded once each.
ERROR = {
    jnp.float64: 16 * 2**-52,
    jnp.float32: 16 * 2**-23,
    jnp.bfloat16: 4 * 2**-8,
    jnp.float16: 4 * 2**-11,
}
KINDS = {"layer": (ops.layer_norm, 1e-5), "rms": (ops.rms_norm, 1e-6)}


def inputs(kind, dtype, axis=-1, affine=True):
    rng = np.random.default_rng(0)
    new = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    # An offset that LayerNorm takes out and RMSNorm does not.
    x = 3 * new(2, 5, 11, 7) + 1
    count = {"layer": 2, "rms": 1}[kind] if affine else 0
    return x, [1 + new(x.shape[axis]) / 4 for _ in range(count)], new(*x.shape)


def expected_of(kind, x, affine, dy, axis):
    oracle = {"layer": oracles.layer_norm, "rms": oracles.rms_norm}[kind]
    y = oracle(x, *affine, axis=axis)
    scale = affine[0] if affine else None
    center, eps = kind == "layer", KINDS[kind][1]
    grads = oracles.norm_vjp(x, scale, dy, axis=axis, eps=eps, center=center)
    return y, list(grads[: 1 + len(affine)])


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(kind, axis, x, affine, dy):
    f = lambda x, *affine: KINDS[kind][0](x, *affine, axis=axis)
    y, back = jax.vjp(f, x, *affine)
    return y, list(back(dy))


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_matches_oracle(kind, affine, axis, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        x, affine, dy = inputs(kind, dtype, axis, affine)
        y, grads = run(kind, axis, x, affine, dy)
        assert {y.dtype, *(g.dtype for g in grads)} == {jnp.dtype(dtype)}
        expected = expected_of(kind, x, affine, dy, axis)
        assert_close((y, grads), expected, error=ERROR[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_match_differences(kind):
    with jax.enable_x64(True):
        x, affine, _ = inputs(kind, jnp.float64)
        f = jax.jit(lambda x, *affine: KINDS[kind][0](x, *affine))
        keywords = {"order": 1, "modes": ["rev"], "atol": 1e-7, "rtol": 1e-7}
        check_grads(f, (x[0, 0], *affine), **keywords)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_parameters_keep_their_dtype(kind):
    """Master parameters are float32 whatever the inputs, and so are gradients."""
    x, affine, dy = inputs(kind, jnp.bfloat16)
    affine = [a.astype(jnp.float32) for a in affine]
    y, grads = run(kind, -1, x, affine, dy)
    assert y.dtype == grads[0].dtype == jnp.bfloat16
    assert all(g.dtype == jnp.float32 for g in grads[1:])
    expected = expected_of(kind, x, affine, dy, -1)
    assert_close((y, grads), expected, error=ERROR[jnp.bfloat16])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 3.0, 1e4])
def test_constant_rows_stay_finite(kind, value):
    _, _, dy = inputs(kind, jnp.float32)
    x = jnp.full(dy.shape, value)
    y, (dx,) = run(kind, -1, x, [], dy)
    assert np.all(np.isfinite(dx))
    if kind == "rms":
        expected = oracles.rms_norm(x)
        assert_close(y, expected, error=ERROR[jnp.float32])
    else:
        # The mean may round by one ulp, and a row without spread is multiplied by
        # 1 / sqrt(eps) = 316: 0 up to that, 0.3 at 1e4.
        assert np.abs(y).max() <= value * 2**-23 * 1e-5**-0.5


def test_one_channel():
    x = jnp.asarray([[3.0], [-2.0]])
    y = jax.jit(ops.layer_norm)(x)
    assert_close(y, np.zeros((2, 1)), error=0.0)
    assert_close(jax.jit(ops.rms_norm)(x), np.sign(x), error=ERROR[jnp.float32])


@pytest.mark.parametrize("offset, digits", [(1e2, 6e-6), (1e4, 6e-4)])
def test_layer_norm_subtracts_the_mean_before_squaring(offset, digits):
    """Unit spread around `offset`: x itself is known to 2^-24 offset, no better."""
    x, _, dy = inputs("layer", jnp.float32)
    x = x + jnp.float32(offset)
    y, (dx,) = run("layer", -1, x, [], dy)
    # x is exact here; what remains is the rounding of the float32 mean. E[x^2] -
    # mean^2 instead would lose all digits at 1e4.
    assert_close((y, [dx]), expected_of("layer", x, [], dy, -1), error=digits)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_equals_plain(kind, affine, dtype):
    x, parameters, dy = inputs(kind, dtype)
    norm = Norm(7, kind=kind, affine=affine)
    if affine:
        norm.scale[...] = parameters[0].astype(jnp.float32)
        if norm.bias is not None:
            norm.bias[...] = parameters[1].astype(jnp.float32)

    @jax.jit
    def both(norm, x, dy):
        results = []
        for f in (lambda norm, x: norm(x), lambda norm, x: norm.heads(x)):
            y, back = jax.vjp(f, norm, x)
            results.append((y, back(dy)))
        return results

    plain, heads = both(norm, x, dy)
    assert_close(heads, plain, error=ERROR[dtype])
    expected = expected_of(kind, x, parameters if affine else [], dy, -1)[0]
    assert_close(heads[0], expected, error=ERROR[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_layer_starts_as_the_plain_norm(kind):
    norm = Norm(7, kind=kind)
    assert_close(norm.scale[...], np.ones(7), error=0.0)
    if kind == "layer":
        assert norm.bias is not None and not np.any(norm.bias[...])
    else:
        assert norm.bias is None
    bare = Norm(7, kind=kind, affine=False)
    assert bare.scale is None and bare.bias is None


def test_unknown_kind():
    norm = Norm.__init__
    with pytest.raises(ValueError, match="kind must be 'layer' or 'rms', got 'batch'"):
        # Past the type checker, which tests have and users do not.
        norm.__wrapped__(object.__new__(Norm), 7, kind="batch")
