import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.test_util import check_grads

from flaxmix import mixers
from flaxmix.layers import Linear, ResidualMLP
from flaxmix.layers.mlp import exact_gelu, gelu
from flaxmix.ops.affine import scale_and_shift
from flaxmix.parameters import named_parameters, with_parameters

from closeness import assert_close

HALF = {jnp.bfloat16: 2**-7, jnp.float16: 2**-10}
"""Two roundings of a result."""


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_of_parameters_are_long_sums_in_float32(dtype):
    y, scale, bias = jnp.ones((70_000, 3), dtype), jnp.ones(3), jnp.ones(3)
    # Ones added up in half precision stop at 256 or 2,048. The loss is small, or
    # its own sum would overflow float16.
    loss = lambda s, b: scale_and_shift(y, s, b).astype(jnp.float32).sum()
    for grad in jax.grad(loss, argnums=(0, 1))(scale, bias):
        assert grad.dtype == jnp.float32
        assert_close(grad, jnp.full(3, 7e4), error=1e-6)


@pytest.mark.parametrize("axis", [-1, -2, 0])
@pytest.mark.parametrize("with_scale", [False, True])
def test_scale_and_shift_gradients(axis, with_scale):
    with jax.enable_x64(True):
        y = jax.random.normal(jax.random.key(0), (3, 4, 5))
        n = y.shape[axis]
        scale = jnp.arange(1.0, n + 1) if with_scale else None
        bias = jnp.linspace(-1, 1, n)
        shape = [1] * 3
        shape[axis] = n
        expected = y * (scale.reshape(shape) if with_scale else 1)
        expected = expected + bias.reshape(shape)
        assert_close(scale_and_shift(y, scale, bias, axis=axis), expected, error=1e-14)
        given = (y, scale, bias) if with_scale else (y, bias)
        call = lambda y, *p: scale_and_shift(
            y, p[0] if with_scale else None, p[-1], axis=axis
        )
        check_grads(jax.jit(call), given, order=1, modes=["rev"])


def test_gelu_is_the_tanh_approximation():
    with jax.enable_x64(True):
        x = jnp.linspace(-30, 30, 61)
        tanh = jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3))
        assert_close(gelu(x), 0.5 * x * (1 + tanh), error=1e-14)
        check_grads(jax.jit(gelu), (x,), order=1, modes=["rev"])


@pytest.mark.parametrize("dtype", [jnp.float32, *HALF])
def test_skip_adds_the_input(dtype):
    layer = Linear(4, 4, skip=True, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (3, 4), dtype)
    y = layer(x)
    assert y.dtype == dtype
    exact = x.astype(jnp.float32) @ (jnp.eye(4) + layer.kernel[...])
    assert_close(y, exact, error=HALF.get(dtype, 1e-6))


def test_skip_needs_equal_widths():
    with pytest.raises(ValueError, match="equal widths, got 3 and 4"):
        Linear(3, 4, skip=True, rngs=nnx.Rngs(0))


PLAIN = """
import jax.numpy as jnp
from flax import nnx
from flaxmix import losses, mixers, ops
from flaxmix.layers import Linear, ResidualMLP
from flaxmix.layers.mlp import exact_gelu

def error(call):
    try:
        call()
    except (TypeError, ValueError) as error:
        print(error)

layer = Linear(3, 4, rngs=nnx.Rngs(0))
mixer = mixers.Flare(4, heads=2, latents=3, rngs=nnx.Rngs(0))
y = jnp.ones((2, 5, 4))
error(lambda: layer(jnp.ones((2, 3), jnp.int32)))
error(lambda: mixer(y, mask=jnp.ones((2, 5))))
error(lambda: mixer(y, mask=jnp.ones(5, bool)))
error(lambda: losses.relative_l2(y, y[..., :1]))
make = lambda **options: mixers.AblatedFlarePP(
    4, heads=2, latents=3, **options, rngs=nnx.Rngs(0)
)
ints = jnp.ones((3, 1, 4), jnp.int32)
error(lambda: ops.attention(ints, ints, ints))
error(lambda: ops.pool(ints, ints, ints))
error(lambda: make(gate="other"))
error(lambda: make(seed_norm="other"))
error(lambda: Linear(3, 4, init="other", rngs=nnx.Rngs(0)))
error(lambda: ResidualMLP(3, 4, 2, activation="other", rngs=nnx.Rngs(0)))
"""


def test_what_the_type_checker_finds_in_tests_is_refused_without_it():
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], capture_output=True, text=True, check=True
    )
    mask = "the mask must be a boolean array of shape (2, 5), got"
    assert done.stdout.splitlines() == [
        "a layer needs floating-point inputs, got int32.",
        f"{mask} float32 of shape (2, 5).",
        f"{mask} bool of shape (5,).",
        "prediction has shape (2, 5, 4), target (2, 5, 1).",
        "an operator needs floating-point inputs, got int32.",
        "an operator needs floating-point inputs, got int32.",
        "gate must be None, 'sigmoid' or 'raw', got 'other'.",
        "seed_norm must be True, False or 'affine', got 'other'.",
        "init must be 'normal', 'identity' or 'uniform', got 'other'.",
        "activation must be 'tanh' or 'exact', got 'other'.",
    ]


def test_sizes_of_an_mlp():
    with pytest.raises(ValueError, match="layers=-1"):
        ResidualMLP(3, 4, 2, layers=-1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="hidden=0"):
        ResidualMLP(3, 0, 2, rngs=nnx.Rngs(0))


def test_sizes_of_mixers():
    for make in (mixers.Flare, mixers.FlarePP, mixers.SimplifiedFlarePP):
        with pytest.raises(ValueError, match="latents must be at least 1, got 0"):
            make(4, heads=2, latents=0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="heads=2 must divide channels=0"):
        mixers.SelfAttention(0, heads=2, rngs=nnx.Rngs(0))
    mixer = mixers.Flare(4, heads=2, latents=3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no points"):
        mixer(jnp.ones((2, 0, 4)))


def test_residuals_between_unequal_widths_are_left_out():
    both = {"input_residual": True, "output_residual": True}
    x = jax.random.normal(jax.random.key(0), (5, 3))
    plain = ResidualMLP(3, 4, 2, rngs=nnx.Rngs(0))
    residual = ResidualMLP(3, 4, 2, **both, rngs=nnx.Rngs(0))
    assert_close(residual(x), plain(x), error=1e-7)
    square = ResidualMLP(3, 3, 3, **both, rngs=nnx.Rngs(0))
    h = jax.nn.gelu(square.first(x)) + x
    assert_close(square(x), square.last(h) + h, error=1e-6)


def test_parameters_by_name():
    layer = ResidualMLP(3, 4, 2, layers=1, rngs=nnx.Rngs(0))
    params = named_parameters(layer)
    assert list(params) == [
        "first.bias",
        "first.kernel",
        "hidden.0.bias",
        "hidden.0.kernel",
        "last.bias",
        "last.kernel",
    ]
    x = jnp.ones((5, 3))
    zero = {k: jnp.zeros_like(a) for k, a in params.items()}
    assert not with_parameters(layer, zero)(x).any()
    abstract = nnx.eval_shape(lambda: layer)
    assert_close(with_parameters(abstract, params)(x), layer(x), error=1e-7)
    fewer = {k: a for k, a in params.items() if k != "last.bias"}
    with pytest.raises(ValueError, match="'last.bias' is missing"):
        with_parameters(layer, fewer)
    with pytest.raises(ValueError, match="'other' is unexpected"):
        with_parameters(layer, params | {"other": jnp.ones(1)})
    with pytest.raises(ValueError, match=r"'last.bias' has shape \(3,\), expected"):
        with_parameters(layer, params | {"last.bias": jnp.ones(3)})


def test_parts_of_the_package_are_found():
    import flaxmix

    assert {"data", "interop", "mixers", "models", "ops"} <= set(dir(flaxmix))
    assert flaxmix.mixers is mixers
    with pytest.raises(AttributeError, match="no attribute 'mixer'"):
        flaxmix.mixer  # noqa: B018


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_derivative_of_exact_gelu(dtype):
    x = jnp.linspace(-6, 6, 101).astype(dtype)
    exact = jax.vmap(jax.grad(lambda x: jax.nn.gelu(x, approximate=False)))
    actual = jax.vmap(jax.grad(exact_gelu))(x)
    assert actual.dtype == dtype
    expected = exact(x.astype(jnp.float32))
    assert_close(actual, expected, error=HALF.get(dtype, 1e-6))
