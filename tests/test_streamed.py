"""Mixers on many points, whose keys and values exist for one block at a time."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flaxmix import mixers, ops, parallel
from flaxmix.mixers import streamed as layers
from flaxmix.ops import streamed

from closeness import assert_close

C, H, M, N = 24, 3, 5, 33
MIXERS = {
    "flare": lambda **o: mixers.Flare(C, heads=H, latents=M, **o),
    "flare_normed": lambda **o: mixers.Flare(C, heads=H, latents=M, qk_norm=True, **o),
    "original": lambda **o: mixers.OriginalFlare(C, heads=H, latents=M, **o),
    "flarepp": lambda **o: mixers.FlarePP(C, heads=H, latents=M, **o),
    "flarepp_apart": lambda **o: mixers.FlarePP(
        C, heads=H, latents=M, share=False, norm="rms", **o
    ),
    "simplified": lambda **o: mixers.SimplifiedFlarePP(C, heads=H, latents=M, **o),
    "simplified_normed": lambda **o: mixers.SimplifiedFlarePP(
        C, heads=H, latents=M, share=True, qk_norm=True, **o
    ),
}
ERROR = {
    jnp.float64: 1e-12,
    jnp.float32: 1e-5,
    # Sums over points are in float32 either way; the rest is rounded in turn.
    jnp.bfloat16: 24 * 2**-8,
    jnp.float16: 24 * 2**-11,
}


@pytest.fixture
def streaming(monkeypatch):
    """Streams any number of points, in blocks of eight."""

    def start():
        monkeypatch.setitem(streamed._LARGE, "cpu", 1)
        monkeypatch.setattr(streamed, "free_block", lambda rows, points: 8)
        eight = lambda q, points, block: min(block or 8, points)
        monkeypatch.setattr(streamed, "block_size", eight)
        monkeypatch.setattr(layers, "block_size", eight)

    return start


def module(name, dtype):
    layer = MIXERS[name](rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    move = lambda p: jnp.asarray(p + 0.1 * rng.normal(size=p.shape), dtype)
    return jax.tree.map(move, layer)


def inputs(dtype, batch=(2, 2)):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(*batch, N, C)), dtype)
    mask = rng.random((*batch, N)) < 0.7
    mask[..., -1, :] = False  # An item of padding.
    return x, jnp.asarray(mask)


def run(layer, x, mask, apply=lambda layer, x, mask: layer(x, mask=mask)):
    """Outputs, and gradients of all parameters and of x."""

    def loss(layer, x):
        y = apply(layer, x, mask)
        real = y if mask is None else jnp.where(mask[..., None], y, 0)
        return jnp.sin(real.astype(jnp.promote_types(y.dtype, "float32"))).sum(), real

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, y), (dlayer, dx) = step(layer, x)
    return y, jax.flatten_util.ravel_pytree(dlayer)[0], dx


QUICK = ("flarepp",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in MIXERS
    ],
)
def test_streaming_changes_no_number(name, streaming):
    with jax.enable_x64(True):
        layer, (x, mask) = module(name, jnp.float64), inputs(jnp.float64)
        expected = [run(layer, x, mask), run(layer, x[0, 0], None)]
        before = str(jax.make_jaxpr(lambda layer, x: layer(x))(layer, x))
        streaming()
        after = str(jax.make_jaxpr(lambda layer, x: layer(x))(layer, x))
        assert "while" not in before and "scan" not in before
        assert "while" in after or "scan" in after
        actual = [run(layer, x, mask), run(layer, x[0, 0], None)]
        assert_close(actual, expected, error=ERROR[jnp.float64])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_other_dtypes(dtype, streaming):
    # Master weights are float32.
    layer, (x, mask) = module("flarepp", jnp.float32), inputs(dtype)
    expected = run(layer, x.astype(jnp.float32), mask)
    streaming()
    y, dlayer, dx = run(layer, x, mask)
    assert y.dtype == dx.dtype == dtype and dlayer.dtype == jnp.float32
    assert_close((y, dlayer, dx), expected, error=ERROR[dtype])


@pytest.mark.parametrize(
    "name,shape",
    [
        pytest.param("flarepp", (2, 4), marks=pytest.mark.slow),
        pytest.param("original", (1, 4), marks=pytest.mark.slow),
        pytest.param("simplified", (1, 2), marks=pytest.mark.slow),
    ],
)
def test_shards_stream(name, shape, streaming):
    with jax.enable_x64(True):
        layer, (x, mask) = module(name, jnp.float64), inputs(jnp.float64, (2,))
        expected = run(layer, x, mask)
        streaming()
        mesh = parallel.make_mesh(data=shape[0], context=shape[1])
        apply = lambda layer, x, mask: parallel.apply(layer, x, mesh=mesh, mask=mask)
        assert_close(run(layer, x, mask, apply), expected, error=ERROR[jnp.float64])


def test_masked_points_never_matter(streaming):
    streaming()
    layer, (x, mask) = module("flarepp", jnp.float32), inputs(jnp.float32)
    expected = run(layer, x, mask)
    for fill in (np.nan, 7.0):
        actual = run(layer, jnp.where(mask[..., None], x, fill), mask)
        assert_close(actual, expected, error=0.0)


def test_dropout_needs_the_points_whole(streaming):
    layer = MIXERS["flarepp"](attention_dropout=0.5, rngs=nnx.Rngs(0))
    x, mask = inputs(jnp.float32)
    key = jax.random.key(0)
    expected = layer(x, mask=mask, key=key)
    streaming()
    assert_close(layer(x, mask=mask, key=key), expected, error=0.0)


def test_gather_from_is_gather_with_its_log_normaliser():
    rng = np.random.default_rng(2)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))
    with jax.enable_x64(True):
        q, x, w = draw(2, H, M, 4), draw(2, N, C), draw(C, H, 4)
        mask = jnp.asarray(rng.random((2, N)) < 0.7)
        cotangents = draw(2, H, M, 4), draw(2, H, M)

        def streamed_form(q, x, w):
            return streamed.gather_from(
                _project, w, q, x, mask=mask, scale=0.7, block=8
            )

        def plain(q, x, w):
            return ops.gather(q, _project(w, x)[0], mask=mask, scale=0.7)

        def both(f):
            y, pull = jax.vjp(f, q, x, w)
            return y, pull(cotangents)

        assert_close(
            jax.jit(both, static_argnums=0)(streamed_form), both(plain), error=1e-12
        )


def _project(w, x):
    return jnp.einsum("bnc,chd->bnhd", x, w), None


def test_memory_is_that_of_the_points(monkeypatch):
    points = 2**16
    layer = mixers.FlarePP(64, heads=4, latents=32, rngs=nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((1, points, 64), jnp.float32)

    def temporary():
        def passes(layer, x):
            y, pull = jax.vjp(lambda layer, x: layer(x), layer, x)
            return pull(y)

        memory = jax.jit(passes).lower(layer, x).compile().memory_analysis()
        return memory.temp_size_in_bytes

    streaming = temporary()
    # Points and gradients of three parts, and a block; keys and values are more.
    assert streaming < 6 * points * 64 * 4
    monkeypatch.setitem(streamed._LARGE, "cpu", 2**40)
    assert temporary() > 2 * streaming
