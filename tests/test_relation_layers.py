"""The causal mixers and SwiGLU as layers: values, gradients, padding, parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit as sigmoid

from flaxmix import layers, mixers
from flaxmix.mixers.causal_attention import real_tokens
from flaxmix.parameters import named_parameters, with_parameters

import relation_oracles as oracles
from closeness import assert_close
from relation_cases import documents, draw, filled, seen, whole

TIGHT = 1e-11
# Central differences of an oracle in float64.
DIFFERENCES = 1e-7
# A few dozen roundings of a chain of four products.
HALF = {jnp.bfloat16: 24 * 2**-8, jnp.float16: 24 * 2**-11}
B, T, C, HEADS = 2, 7, 24, 4
MIXERS = {
    "attention": mixers.CausalAttention,
    "relation": mixers.Relation,
    "linear": mixers.LinearRelation,
}
# The fast form has tests of its own; this one compiles faster.
PLAIN = {"implementation": "materialized"}
SLOW = pytest.mark.slow
SLOW_HALF = pytest.param(jnp.float16, marks=SLOW)
SLOW_LINEAR = pytest.param("linear", marks=SLOW)
OPTIONS = [
    ("attention", {}),
    ("relation", {}),
    ("relation", {"transport": "exchange", **PLAIN}),
    ("relation", {"identity_projection": False, **PLAIN}),
    ("relation", {"count": False, "tau": 0.7, **PLAIN}),
    ("relation", {"givens": False, **PLAIN}),
    ("relation", {"heads": 1, **PLAIN}),
    ("linear", {}),
    pytest.param("linear", {"identity_projection": False}, marks=SLOW),
    pytest.param("linear", {"givens": False, "tau": 0.7}, marks=SLOW),
    pytest.param("linear", {"heads": 1}, marks=SLOW),
]


def layer(name, dtype=jnp.float64, **options):
    """A mixer whose parameters are all far from 0 and from each other."""
    options = {"heads": HEADS, **options}
    make = lambda: MIXERS[name](C, rngs=nnx.Rngs(0), **options)
    return filled(make, dtype)


def rotary(x, positions):
    """Each pair (2 j, 2 j + 1) of channels turned by (i - 1) 10000^(-2 j / D)."""
    width = x.shape[-1]
    angles = (positions - 1)[..., None] * 1e4 ** (-np.arange(0, width, 2) / width)
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[..., None, :]
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def givens(x, theta, index):
    if theta is None:
        return x
    y, heads = x.copy(), x.shape[-2]
    for pair, angle in enumerate(theta):
        a = 2 * pair + index % 2
        b = (a + 1) % heads
        y[..., a, :] = np.cos(angle) * x[..., a, :] - np.sin(angle) * x[..., b, :]
        y[..., b, :] = np.sin(angle) * x[..., a, :] + np.cos(angle) * x[..., b, :]
    return y


def attention(q, k, v, positions):
    see = seen(positions, own=True)[:, None] & (positions > 0)[:, None, :, None]
    scores = np.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    p = np.where(see, np.exp(scores), 0)
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bhij,bjhd->bihd", p, v)


def linear_relation(p1, p2, identity, alpha, positions, tau):
    y, width = np.zeros_like(identity), p1.shape[-1]
    for b, h in np.ndindex(len(p1), p1.shape[2]):
        for t in np.flatnonzero(positions[b]):
            if positions[b, t] == 1:
                state = np.zeros((width, width))
            one, two, own = p1[b, t, h], p2[b, t, h], identity[b, t, h]
            s = sigmoid(one @ two / (tau * width**0.5))
            state = alpha[b, t, h][:, None] * state
            y[b, t, h] = own + s * (one / np.linalg.norm(one)) @ state
            state = state + s * np.outer(two / np.linalg.norm(two), own)
    return y


def oracle(name, parameters, x, positions, index, **options):
    """Y of a mixer from its parameters by name."""
    heads, tau = options.get("heads", HEADS), options.get("tau", 2.0)
    params = {k: np.asarray(p, np.float64) for k, p in parameters.items()}
    positions = np.asarray(positions)
    x = np.where(positions[..., None] > 0, np.asarray(x, np.float64), 0)
    split = lambda y: y.reshape(*y.shape[:2], heads, -1)
    project = lambda key: split(x @ params[f"{key}.kernel"])
    turn = lambda key: rotary(project(key), positions)
    if name == "attention":
        y = attention(turn("q"), turn("k"), project("v"), positions)
        return y.reshape(x.shape) @ params["out.kernel"]
    identity = project("identity") if "identity.kernel" in params else split(x)
    identity = givens(identity, params.get("angles"), index)
    if name == "relation":
        own = options.get("transport") != "exchange"
        more = {"tau": tau, "own": own}
        lam = params.get("lam", 0.0)
        y = oracles.relation(turn("p1"), turn("p2"), identity, lam, positions, **more)
    else:
        rate = np.einsum("bthd,hde->bthe", project("down"), params["up"])
        rate = np.log1p(np.exp(rate + params["dt_bias"]))
        alpha = np.exp(-np.exp(params["A_log"]) * rate)
        y = linear_relation(turn("p1"), turn("p2"), identity, alpha, positions, tau)
    return y.reshape(x.shape) @ params["out.kernel"]


@functools.partial(jax.jit, static_argnames="index")
def run(module, x, dy, positions=None, index=0):
    """Y, and the gradients of all parameters and of x."""
    f = lambda module, x: module(x, layer=index, positions=positions)
    y, back = jax.vjp(f, module, x)
    dmodule, dx = back(dy)
    return y, {**named_parameters(dmodule), "x": dx}


@pytest.mark.parametrize("name, options", OPTIONS, ids=str)
def test_matches_oracle(name, options):
    """Values, and gradients along a random direction by differences."""
    positions, index = documents([T], [4, -1, 2]), 1
    with jax.enable_x64(True):
        module, x, dy = layer(name, **options), draw(B, T, C), draw(B, T, C, seed=1)
        x, dy = jnp.asarray(x, jnp.float64), jnp.asarray(dy, jnp.float64)
        params = {**named_parameters(module), "x": x}
        along = {k: draw(*p.shape, seed=i) for i, (k, p) in enumerate(params.items())}

        def shifted(step):
            point = {k: np.asarray(p + step * along[k]) for k, p in params.items()}
            at = point.pop("x")
            return oracle(name, point, at, positions, index, **options)

        y, grads = run(module, x, dy, positions, index)
        assert_close(y, shifted(0.0), error=TIGHT)
        step = 1e-5
        slope = np.sum(dy * (shifted(step) - shifted(-step))) / (2 * step)
        actual = sum(np.sum(along[k] * g) for k, g in grads.items())
        scale = sum(np.abs(np.sum(along[k] * g)) for k, g in grads.items())
        assert abs(actual - slope) < DIFFERENCES * scale
        assert all(np.any(g != 0) for g in grads.values())


@pytest.mark.parametrize("name", ["attention", "relation", SLOW_LINEAR])
def test_none_is_one_document_and_batches_have_any_axes(name):
    x, module = draw(2, 3, T, C), layer(name, jnp.float32)
    y = jax.jit(lambda x: module(x))(x)
    f = jax.jit(lambda x, positions: module(x, positions=positions))
    flat = f(x.reshape(6, T, C), whole(6, T))
    assert_close(y, flat.reshape(x.shape), error=1e-5)


def test_layer_says_which_heads_are_neighbours():
    x, module = draw(B, T, C), layer("relation", jnp.float32, **PLAIN)
    f = jax.jit(lambda index: module(x, layer=index))
    even, odd, also_odd = f(0), f(1), f(3)
    np.testing.assert_array_equal(odd, also_odd)
    assert np.abs(even - odd).max() > 0.01


@pytest.mark.parametrize("name", MIXERS)
def test_padding_never_matters(name):
    """Neither for values nor for the gradients of parameters."""
    positions, results = documents([-2, 3, -1, 1], [7]), []
    for fill in (0.0, 5.0, np.nan, np.inf):
        x = jnp.where(positions[..., None] > 0, draw(B, T, C), fill)
        dy = draw(B, T, C, seed=1)
        results.append(run(layer(name, jnp.float32), x, dy, positions))
    for other in results:
        assert_close(other, results[0], error=0.0)
    y, grads = results[0]
    assert not np.any(y[0, [0, 1, 5]]) and not np.any(grads["x"][0, [0, 1, 5]])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, SLOW_HALF])
@pytest.mark.parametrize("name", MIXERS)
def test_half_precision(name, dtype):
    """Parameters stay float32; the result has the dtype of the tokens."""
    x, module = draw(B, T, C, dtype=dtype), layer(name, jnp.float32)
    y = jax.jit(lambda x: module(x))(x)
    assert y.dtype == dtype
    expected = oracle(name, named_parameters(module), x, whole(B, T), 0)
    assert_close(y, expected, error=HALF[dtype])


def test_retention_is_float32():
    """In half precision a retention near 1 would be 1."""
    module = layer("linear", jnp.float32)
    x = draw(B, T, C, dtype=jnp.bfloat16)
    assert module.log_retention(x).dtype == jnp.float32
    assert np.all(module.log_retention(x) <= 0)


def shapes(name, **options):
    options = {"heads": HEADS, **options}
    module = nnx.eval_shape(lambda: MIXERS[name](C, rngs=nnx.Rngs(0), **options))
    return {k: p.shape for k, p in named_parameters(module).items()}


def test_parameters():
    kernels = {f"{k}.kernel": (C, C) for k in ("p1", "p2", "identity", "out")}
    assert shapes("relation") == {**kernels, "angles": (2,), "lam": ()}
    assert shapes("relation", heads=1) == {**kernels, "lam": ()}
    assert shapes("relation", givens=False, count=False) == kernels
    raw = shapes("relation", identity_projection=False)
    assert kernels.keys() - raw.keys() == {"identity.kernel"}
    assert shapes("attention") == {
        f"{k}.kernel": (C, C) for k in ("q", "k", "v", "out")
    }
    assert shapes("linear") == {
        **kernels,
        "angles": (2,),
        "down.kernel": (C, C),
        "up": (4, 6, 6),
        "A_log": (4, 6),
        "dt_bias": (4, 6),
    }


def test_initial_parameters():
    """One call of its own for each: none repeats another one's numbers."""
    make = lambda cls: named_parameters(cls(64, heads=4, rngs=nnx.Rngs(0)))
    params = jax.jit(lambda: make(mixers.LinearRelation))()
    assert all(p.dtype == jnp.float32 for p in params.values())
    weights = [np.asarray(p).ravel() for k, p in params.items() if "kernel" in k]
    weights.append(np.asarray(params["up"]).ravel())
    for i, w in enumerate(weights):
        assert abs(w.std() / 0.02 - 1) < 0.05 and abs(w.mean()) < 0.002
        for other in weights[:i]:
            assert abs(np.corrcoef(w[:1024], other[:1024])[0, 1]) < 0.15
    a, dt = np.exp(params["A_log"]), np.log1p(np.exp(params["dt_bias"]))
    assert 1 <= a.min() < 3 and 14 < a.max() <= 16
    # Log-uniform: half of them lie below the geometric mean of the ends.
    assert 1e-3 * (1 - 1e-4) <= dt.min() and dt.max() <= 0.1 * (1 + 1e-4)
    assert abs(np.mean(dt < 1e-2) - 0.5) < 0.2
    assert not np.any(params["angles"])
    relation = jax.jit(lambda: make(mixers.Relation))()
    assert relation["lam"] == 0.5 and not np.any(relation["angles"])


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("attention", {"heads": 5}, "heads=5 must divide channels=24"),
        ("relation", {"heads": 5}, "heads=5 must divide channels=24"),
        ("attention", {"heads": 8}, "channels=24 and heads=8: 3 each"),
        ("relation", {"heads": 3}, "got heads=3 of channels=24"),
        ("linear", {"heads": 3}, "got heads=3 of channels=24"),
        ("linear", {"heads": 24}, "channels=24 and heads=24: 1 each"),
        ("relation", {"tau": 0.0}, "tau must be positive, got 0.0"),
        ("linear", {"tau": -1.0}, "tau must be positive, got -1.0"),
    ],
)
def test_wrong_sizes(name, options, message):
    with pytest.raises(ValueError, match=message):
        MIXERS[name](C, **{"heads": HEADS, **options}, rngs=nnx.Rngs(0))


def test_odd_heads_without_pairs():
    assert "angles" not in shapes("relation", heads=3, givens=False)


def test_unknown_transport():
    with pytest.raises(ValueError, match="transport .* got 'self'"):
        mixers.Relation.__init__.__wrapped__(
            object.__new__(mixers.Relation), C, heads=4, transport="self", rngs=None
        )


@pytest.mark.parametrize(
    "positions, cache, axis_name, error, message",
    [
        (jnp.ones((2, 6), int), None, None, ValueError, r"\(2, 7\), got .*\(2, 6\)"),
        (jnp.ones((2, 7)), None, None, ValueError, "integers of .* got float32"),
        (None, (), None, ValueError, "there must be positions"),
        (jnp.ones((2, 7), int), (), "c", NotImplementedError, "axis_name='c'"),
    ],
)
def test_wrong_inputs(positions, cache, axis_name, error, message):
    with pytest.raises(error, match=message):
        # Without the checks of types that tests add.
        real_tokens.__wrapped__(draw(B, T, C), positions, axis_name, cache)


def test_swiglu():
    with jax.enable_x64(True):
        x, dy = (draw(2, 3, 5, seed=i, dtype=jnp.float64) for i in (0, 1))
        module = layers.SwiGLU(5, 7, rngs=nnx.Rngs(0))
        params = named_parameters(module)
        moved = {
            k: draw(*p.shape, seed=i, dtype=jnp.float64)
            for i, (k, p) in enumerate(params.items())
        }
        module = with_parameters(module, moved)

        def f(params, x):
            a = x @ params["gate.kernel"]
            hidden = a * (1 / (1 + jnp.exp(-a))) * (x @ params["up.kernel"])
            return hidden @ params["down.kernel"]

        y, back = jax.vjp(lambda module, x: module(x), module, x)
        expected, expected_back = jax.vjp(f, moved, x)
        dmodule, dx = back(dy)
        assert_close(y, expected, error=TIGHT)
        actual = named_parameters(dmodule), dx
        assert_close(actual, expected_back(dy), error=TIGHT)


@pytest.mark.parametrize("dtype", HALF)
def test_swiglu_in_half_precision(dtype):
    module = layers.SwiGLU(5, 7, rngs=nnx.Rngs(0))
    x = draw(3, 5, dtype=dtype)
    y, back = jax.vjp(lambda x: module(x), x)
    assert y.dtype == back(y)[0].dtype == dtype
    assert_close(y, module(x.astype(jnp.float32)), error=HALF[dtype])
    # Where SiLU saturates, it is x or 0, with a finite gradient.
    big = jnp.asarray([-200, 200.0], dtype)
    gated = layers.swiglu.gated
    y, back = jax.vjp(gated, big, jnp.ones(2, dtype))
    np.testing.assert_array_equal(y, jnp.asarray([0, 200], dtype))
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in back(y))


def test_swiglu_sizes():
    with pytest.raises(ValueError, match="channels=5 and hidden=0"):
        layers.SwiGLU(5, 0, rngs=nnx.Rngs(0))
