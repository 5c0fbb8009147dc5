import contextlib
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from flaxmix import kernels

from closeness import assert_close

# Newer versions of JAX say so whenever the back end lowers anything.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

SINGLE = 1e-5
# A result is rounded to eight or eleven binary digits, and gradients are sums of
# products of numbers so rounded.
HALF = {"bfloat16": 1e-2, "float16": 1.5e-3}


def oracle(q, k, v, start=None):
    """The definition, with all scores, by automatic differentiation."""
    u = jnp.einsum("bihd,bjhd->bhij", q, k)
    i, j = np.arange(q.shape[1])[:, None], np.arange(q.shape[1])
    seen = np.broadcast_to(j < i, u.shape)
    if start is not None:
        seen = seen & (j >= np.asarray(start)[:, None, :, None])
    some = seen.any(-1)
    e = jnp.where(seen, u / (1 + jnp.exp(-u)), -jnp.inf)
    top = jax.lax.stop_gradient(jnp.where(some, e.max(-1), 0))
    p = jnp.exp(e - top[..., None])
    mass = jnp.where(some, p.sum(-1), 1)
    y = jnp.einsum("bhij,bjhe->bihe", p / mass[..., None], v)
    return y, jnp.where(some, top + jnp.log(mass), -jnp.inf)


def draw(tokens, channels, *, values=None, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    shape = 2, tokens, 3
    q, k = rng.normal(size=(2, *shape, channels))
    v, dy = rng.normal(size=(2, *shape, values or channels))
    q = q * 2 * channels**-0.5
    return [jnp.asarray(x, dtype) for x in (q, k, v, dy)]


@functools.partial(jax.jit, static_argnames="interpret")
def run(q, k, v, start, dy, dlog, interpret=True):
    f = lambda q, k, v: kernels.exchange(q, k, v, start, interpret=interpret)
    results, pullback = jax.vjp(f, q, k, v)
    return *results, *pullback((dy, dlog))


def check(arrays, start=None, *, error):
    """Compares values and gradients, of the very inputs and both results."""
    q, k, v, dy = arrays
    dlog = np.random.default_rng(9).normal(size=(len(q), q.shape[2], q.shape[1]))
    dlog = jnp.asarray(dlog, jnp.float32)
    y, log_mass, *gradients = run(q, k, v, start, dy, dlog)
    wide = lambda *arrays: [np.asarray(x, np.float64) for x in arrays]
    with jax.enable_x64(True):
        f = lambda q, k, v: oracle(q, k, v, start)
        (y_, log_mass_), pullback = jax.vjp(f, *map(jnp.asarray, wide(q, k, v)))
        gradients_ = pullback(tuple(map(jnp.asarray, wide(dy, dlog))))
    assert y.dtype == v.dtype and log_mass.dtype == jnp.float32
    assert [g.dtype for g in gradients] == [x.dtype for x in (q, k, v)]
    some = np.isfinite(log_mass_)
    np.testing.assert_array_equal(np.asarray(log_mass)[~some], -np.inf)
    assert_close(np.asarray(log_mass)[some], log_mass_[some], error=SINGLE)
    assert_close([y, *gradients], [y_, *gradients_], error=error)


def documents(tokens, *begins):
    """Start of each query where documents begin at these places."""
    place = np.arange(tokens)
    return np.max([np.where(place >= b, b, 0) for b in begins], 0)


def some_starts(tokens):
    """Short documents, one of them after padding; and a start for each query alone,
    some of them before the first key."""
    packed = documents(tokens, 7, 31, 32, 33, 60)
    packed[61:64] = np.arange(62, 65)[: len(packed[61:64])]
    alone = np.random.default_rng(5).integers(-70, tokens, tokens)
    return jnp.asarray(np.stack([packed, alone]), jnp.int32)


@pytest.mark.parametrize(
    "tokens, channels, values, starts",
    [
        (63, 60, 60, False),
        (64, 64, 64, True),
        (65, 80, 7, True),
        (130, 48, 48, True),
        pytest.param(65, 48, 48, False, marks=pytest.mark.slow),
        pytest.param(130, 80, 80, False, marks=pytest.mark.slow),
        pytest.param(33, 9, 128, True, marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients(tokens, channels, values, starts):
    start = some_starts(tokens) if starts else None
    check(draw(tokens, channels, values=values), start, error=SINGLE)


@pytest.mark.parametrize(
    "dtype, tokens, channels, starts",
    [
        ("bfloat16", 130, 80, True),
        ("float16", 65, 48, False),
        pytest.param("bfloat16", 130, 60, False, marks=pytest.mark.slow),
        pytest.param("float16", 130, 80, True, marks=pytest.mark.slow),
    ],
)
def test_half_precision(dtype, tokens, channels, starts):
    start = some_starts(tokens) if starts else None
    check(draw(tokens, channels, dtype=dtype), start, error=HALF[dtype])


def test_scores_in_the_hundreds():
    # Of integers, so that what is compared is not the rounding of the scores. Sharper
    # than elsewhere: the rounding of L alone would cost 2e-6.
    q, k, v, dy = draw(65, 16, seed=2)
    q, k = jnp.round(4 * q), jnp.round(8 * k)
    assert 250 < np.einsum("bihd,bjhd->bhij", q, k).max() < 1000
    check([q, k, v, dy], error=1e-6)


def test_first_token_reads_nothing():
    q, k, v, dy = draw(1, 48)
    dlog = jnp.zeros((2, 3, 1))
    y, log_mass, *gradients = run(q, k, v, None, dy, dlog)
    np.testing.assert_array_equal(log_mass, -np.inf)
    for x in (y, *gradients):
        np.testing.assert_array_equal(x, 0)


def test_documents_equal_separate_runs():
    q, k, v, dy = draw(82, 20)
    start = jnp.asarray(np.stack([documents(82, 41)] * 2), jnp.int32)
    together = run(q, k, v, start, dy, jnp.ones((2, 3, 82)))
    for s in (slice(41), slice(41, 82)):
        q_, k_, v_, dy_ = (x[:, s] for x in (q, k, v, dy))
        alone = run(q_, k_, v_, None, dy_, jnp.ones((2, 3, 41)))
        for a, b in zip(together, alone, strict=True):
            if a.ndim == 4:
                assert_close(a[:, s], b, error=SINGLE)
            else:
                # The first token's are -inf.
                assert_close(a[:, :, s][..., 1:], b[..., 1:], error=SINGLE)


def test_tiles_that_nothing_sees_are_skipped():
    # Tiles of 32 tokens: with NaN, each would show in what it takes part in.
    q, k, v, dy = draw(130, 16)
    dlog = jnp.ones((2, 3, 130))
    start = jnp.asarray(np.stack([documents(130, 64)] * 2), jnp.int32)
    others = [start, dy, dlog]
    clean = run(q, k, v, *others)
    for spoilt, rest in ((slice(0, 64), slice(64, 130)), (slice(64, 130), slice(64))):
        dirty = run(*[x.at[:, spoilt].set(jnp.nan) for x in (q, k, v)], *others)
        for a, b in zip(dirty, clean, strict=True):
            a, b = (x[:, rest] if x.ndim == 4 else x[:, :, rest] for x in (a, b))
            np.testing.assert_array_equal(a, b)
    others = [None, dy, dlog]
    clean = run(q, k, v, *others)
    dirty = run(*(x.at[:, 96:].set(jnp.nan) for x in (q, k, v)), *others)
    for a, b in zip(dirty[:3], clean[:3], strict=True):
        a, b = (x[:, :96] if x.ndim == 4 else x[:, :, :96] for x in (a, b))
        np.testing.assert_array_equal(a, b)


def test_later_tokens_do_not_matter():
    q, k, v, dy = draw(70, 16)
    others = [None, dy, jnp.ones((2, 3, 70))]
    before = run(q, k, v, *others)[:2]
    after = run(*(x.at[:, 41:].add(3) for x in (q, k, v)), *others)[:2]
    np.testing.assert_array_equal(after[0][:, :41], before[0][:, :41])
    np.testing.assert_array_equal(after[1][..., :41], before[1][..., :41])
    assert np.abs(after[0][:, 42:] - before[0][:, 42:]).min() > 0


@pytest.mark.parametrize("batch", [(), (2, 1)])
def test_batch_axes(batch):
    q, k, v, _ = (x[: 2 if batch else 1] for x in draw(37, 16))
    start = jnp.asarray(documents(37, 20), jnp.int32)
    f = jax.jit(functools.partial(kernels.exchange, interpret=True))
    expected = f(q, k, v, jnp.broadcast_to(start, q.shape[:2]))
    shape = lambda x: x.reshape(*batch, *x.shape[1:])
    actual = f(*map(shape, (q, k, v)), jnp.broadcast_to(start, (*batch, 37)))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, shape(b))


def test_inside_shard_map():
    """Each device's part of the batch, also where all have some of it alike."""
    q, k, v, dy = draw(37, 16)
    start = jnp.asarray(np.stack([documents(37, 20)] * 2), jnp.int32)
    arrays = q, k, v, start, dy, jnp.ones((2, 3, 37))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    cut, alike = PartitionSpec("data"), PartitionSpec()
    # The interpreter mixes arrays that vary with such that do not.
    options = {"mesh": mesh, "in_specs": cut, "out_specs": cut, "check_vma": False}
    expected = run(*arrays)
    for a, b in zip(jax.shard_map(run, **options)(*arrays), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    f = jax.shard_map(
        functools.partial(run, interpret=False),
        mesh=mesh,
        in_specs=(cut, alike, cut, alike, cut, cut),
        out_specs=(cut, cut, cut, alike, cut),
    )
    shapes = jax.eval_shape(f, q, k[:1], v, start[:1], *arrays[4:])
    assert [x.shape for x in shapes] == [
        *(x.shape for x in expected[:3]),
        k[:1].shape,
        v.shape,
    ]


def on_a_cuda_device():
    """Where newer versions of JAX find the device that they lower for."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice

    options: dict[str, Any] = {
        "abstract_device": AbstractDevice("NVIDIA H200", 132, "cuda")
    }
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), **options)
    return jax.sharding.use_abstract_mesh(mesh)


def trace(dtype, channels, starts):
    x = jax.ShapeDtypeStruct((2, 1000, 4, channels), dtype)
    start = jax.ShapeDtypeStruct((2, 1000), jnp.int32) if starts else None
    dlog = jax.ShapeDtypeStruct((2, 4, 1000), jnp.float32)
    return run.trace(x, x, x, start, x, dlog, interpret=False)


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("channels", [48, 80])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowers_for_cuda(dtype, channels, starts):
    with on_a_cuda_device():
        traced = trace(dtype, channels, starts)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3
    for name in ("forward", "dq", "dkv"):
        assert f"{name}_kernel" in text
    # All products are inside, and no operand is copied to a wider or longer one.
    assert "stablehlo.dot" not in text and "stablehlo.pad" not in text
    # Triton takes TF32 for anything less.
    program = str(traced.jaxpr)
    assert program.count("dot_general[") == 2 + 3 + 4
    assert program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 9


def test_narrow_heads_are_widened():
    # What is shorter than 16 lowers, but Triton does not multiply it.
    program = str(trace("bfloat16", 5, True).jaxpr)
    assert "bf16[64,16]" in program and "bf16[64,8]" not in program


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowers_where_integers_are_wide(dtype):
    with on_a_cuda_device(), jax.enable_x64(True):
        text = trace(dtype, 48, True).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3


def test_available(monkeypatch):
    assert not kernels.available()

    def device(platform, version, capability):
        client = types.SimpleNamespace(platform_version=version)
        return types.SimpleNamespace(
            platform=platform, client=client, compute_capability=capability
        )

    for given, expected in (
        (("gpu", "PJRT C API\ncuda 13000", "9.0"), True),
        (("gpu", "PJRT C API\ncuda 13000", "12.0"), True),
        (("gpu", "PJRT C API\ncuda 12090", "7.5"), False),
        (("gpu", "PJRT C API\nrocm 60000", "gfx942"), False),
        (("tpu", "libtpu", None), False),
    ):
        monkeypatch.setattr(jax, "devices", lambda given=given: [device(*given)])
        assert kernels.available() == expected


def test_errors():
    q, k, v, _ = draw(5, 16)
    with pytest.raises(ValueError, match=r"k \(2, 4, 3, 16\)"):
        kernels.exchange(q, k[:, :4], v[:, :4], interpret=True)
    with pytest.raises(ValueError, match="one dtype, got float32 and bfloat16"):
        kernels.exchange(q, k.astype(jnp.bfloat16), v, interpret=True)
    with pytest.raises(NotImplementedError, match="128 channels, got 129"):
        kernels.exchange(q, k, jnp.zeros((2, 5, 3, 129)), interpret=True)
    with jax.enable_x64(True):
        wide = jnp.zeros((2, 5, 3, 16))
        with pytest.raises(NotImplementedError, match="no float64"):
            kernels.exchange(wide, wide, v, interpret=True)
