"""Inference chunk by chunk equals the whole call, in few sweeps and little memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.tree_util import Partial

from flaxmix import mixers, models
from flaxmix.ops import stream
from flaxmix.parallel import chunked, sweeps
from flaxmix.parallel.chunked import predict_in_chunks

from baseline_cases import INPUTS, MODELS, OUTPUTS, TIGHT, module
from closeness import assert_close

# Sums of float32 in another order.
ERROR = 1e-5


def surrogate(mixer, dtype, *, depth=3, **options):
    inner = functools.partial(mixer, heads=3, latents=5, **options)
    sizes = {"channels": 12, "blocks": depth, "io_layers": 0, "mixer": inner}
    make = lambda: models.Surrogate(INPUTS, OUTPUTS, **sizes, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)

    def draw(path, a):
        # Temperatures stay well above 0.
        name = jax.tree_util.keystr(path)
        shift = any(part in name for part in ("scale", "temperature", "offset"))
        return jnp.asarray(shift + 0.2 * rng.normal(size=a.shape), dtype)

    return jax.tree.map_with_path(draw, nnx.eval_shape(make))


SURROGATES = {
    "flare": functools.partial(surrogate, mixers.Flare),
    "flare_original": functools.partial(surrogate, mixers.OriginalFlare),
    "flarepp": functools.partial(surrogate, mixers.FlarePP),
    "flarepp_simplified": functools.partial(surrogate, mixers.SimplifiedFlarePP),
    "ablated": functools.partial(surrogate, mixers.AblatedFlarePP),
    "transolver": functools.partial(surrogate, mixers.Transolver),
    "transolver3": functools.partial(surrogate, mixers.Transolver3),
    "transolverpp": functools.partial(surrogate, mixers.TransolverPP),
    "noise": functools.partial(surrogate, mixers.TransolverPP, evaluation_noise=True),
}
CHEAP = ("flarepp", "abupt")


def points(n, batch=(2,), *, features=INPUTS, dtype=np.float64):
    rng = np.random.default_rng(n)
    mask = rng.random((*batch, n)) < 0.7
    mask[..., 0] = True
    return rng.normal(size=(*batch, n, features)).astype(dtype), mask


@jax.jit
def apply(model, x, mask=None):
    return model(x, mask=mask)


def check(model, x, mask=None, *, chunk, error=TIGHT):
    expected = np.asarray(apply(model, x, mask))
    actual = predict_in_chunks(model, x, mask=mask, chunk=chunk)
    assert type(actual) is np.ndarray and actual.dtype == expected.dtype
    assert_close(actual, expected, error=error)
    return actual


@pytest.fixture
def calls(monkeypatch):
    """What every call of a compiled segment gets and returns."""
    made = []

    def compiled(equations, given, local, outputs, replaced=()):
        segment = original(equations, given, local, outputs, replaced)
        run = segment.run

        def record(shared, taken, rest, index):
            sizes = [a.size for a in [*shared, *taken, *rest]]
            results = run(shared, taken, rest, index)
            sizes += [a.size for a in results]
            live = sum(a.size for a in jax.live_arrays())
            made.append((run, max(sizes), live, taken))
            return results

        segment.run = record
        return segment

    original = sweeps.compiled
    monkeypatch.setattr(sweeps, "compiled", compiled)
    chunked._plan.cache_clear()
    yield made
    chunked._plan.cache_clear()


def steps_of(steps, kind):
    for step in steps:
        if isinstance(step, kind):
            yield step
        if isinstance(step, sweeps.Layers):
            yield from steps_of(step.steps, kind)


def planned(model, x, *, chunk):
    """The steps for a mesh without a mask."""
    leaves, tree = jax.tree.flatten(model)
    leaves = tuple((a.shape, a.dtype) for a in leaves)
    return chunked._plan(tree, leaves, (x.shape, x.dtype), False, chunk)[0]


@pytest.mark.parametrize(
    "name",
    [
        name if name in CHEAP else pytest.param(name, marks=pytest.mark.slow)
        for name in (*SURROGATES, *MODELS)
    ],
)
def test_equals_the_whole_call(name):
    with jax.enable_x64(True):
        make = SURROGATES.get(name, functools.partial(module, name))
        model = make(jnp.float64)
        # The grid's points are twelve.
        x, mask = points(12 if name == "gnot_grid" else 11)
        check(model, x, mask, chunk=4)


@pytest.mark.slow
@pytest.mark.parametrize("n,chunk", [(1, 2), (3, 1), (3, 2), (7, 2), (7, 64)])
@pytest.mark.parametrize("name", ["flarepp", "noise", "abupt"])
def test_any_number_of_points_in_any_chunks(name, n, chunk):
    make = SURROGATES.get(name, functools.partial(module, name))
    model = make(jnp.float32)
    x, mask = points(n, (2, 3), dtype=np.float32)
    check(model, x, mask, chunk=chunk, error=ERROR)
    check(model, x[0, 0], chunk=chunk, error=ERROR)


def test_padding_never_matters():
    """A chunk that is all padding, an item that is all padding, and NaN there."""
    with jax.enable_x64(True):
        model = surrogate(mixers.Flare, jnp.float64)
        x, mask = points(10, (3,))
        mask[:, 3:6] = False
        mask[1] = False
        actual = check(model, np.where(mask[..., None], x, 0), mask, chunk=3)
        assert not actual[1].any() and actual[0, 0].all()
        x[~mask] = np.nan
        again = predict_in_chunks(model, x, mask=mask, chunk=3)
        assert_close(again, actual, error=0.0)


def test_one_chunk_is_the_plain_call():
    """Even for a model whose points attend to each other."""
    inner = functools.partial(mixers.SelfAttention, heads=2)
    sizes = {"channels": 6, "blocks": 3, "io_layers": 0, "mixer": inner}
    model = models.Surrogate(INPUTS, OUTPUTS, **sizes, rngs=nnx.Rngs(0))
    x, mask = points(7, dtype=np.float32)
    for chunk in (7, 100):
        check(model, x, mask, chunk=chunk, error=ERROR)


def test_float32_in_blocks(monkeypatch):
    """Chunks are worked on in blocks, as on large meshes."""
    monkeypatch.setattr(stream, "_SCORES", {"cpu": 1})
    model = surrogate(mixers.Flare, jnp.float32)
    x, _ = points(1200, (1,), dtype=np.float32)
    text = str(jax.make_jaxpr(model)(x[:, :600]))
    assert text.count("= scan[") == 3
    check(model, x, chunk=600, error=ERROR)


@pytest.mark.slow
def test_keeps_the_dtype():
    model = surrogate(mixers.Transolver3, jnp.float32)
    x, _ = points(5, dtype=np.float32)
    actual = predict_in_chunks(model, x.astype(jnp.bfloat16), chunk=2)
    assert actual.dtype == jnp.bfloat16
    assert_close(actual, np.asarray(apply(model, x)), error=24 * 2**-8)


@pytest.mark.slow
def test_sweeps_compilations_and_memory(calls):
    x, _ = points(64 * 6, (1,), dtype=np.float32)
    runs = {}
    for depth, chunk, n in [(2, 64, 384), (5, 64, 384), (2, 64, 192)]:
        calls.clear()
        chunked._plan.cache_clear()
        model = surrogate(mixers.FlarePP, jnp.float32, depth=depth)
        predict_in_chunks(model, x[:, :n], chunk=chunk)
        runs[depth, n] = list(calls)
        steps = planned(model, x[:, :n], chunk=chunk)
        [layers] = steps_of(steps, sweeps.Layers)
        touching = [s for s in steps_of(layers.steps, sweeps.Sweep) if s.points]
        assert len(touching) == 3 and layers.length == depth
        assert chunked._sweeps(steps) == 1 + 3 * depth + 1
        # A mesh of the same size is not compiled again.
        predict_in_chunks(model, x[:, :n], chunk=chunk)
        assert {run for run, *_ in calls} == {run for run, *_ in runs[depth, n]}
        assert {run._cache_size() for run, *_ in calls} == {1}
    check(model, x[:, :n], chunk=chunk, error=ERROR)
    segments = {key: len({run for run, *_ in run_}) for key, run_ in runs.items()}
    assert segments[2, 384] == segments[5, 384] == segments[2, 192]
    # The same arrays for a mesh of twice the points, none as large as it.
    largest = {key: max(size for _, size, *_ in run_) for key, run_ in runs.items()}
    assert largest[2, 384] == largest[5, 384] == largest[2, 192] <= 64 * 12
    live = {key: max(size for _, _, size, _ in run_) for key, run_ in runs.items()}
    assert live[2, 384] <= live[2, 192] + 64
    # A layer's chunk takes the place of the one before.
    taken = [a for _, _, _, arrays in runs[2, 384] for a in arrays]
    assert taken and all(a.is_deleted() for a in taken)


def test_shared_values_are_computed_once():
    """All latent blocks of a Perceiver are outside of the loops over chunks."""
    x, _ = points(40, dtype=np.float32)
    steps = planned(module("perceiver_io"), x, chunk=10)
    abstract = lambda values: [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in values
    ]

    def scans(kind):
        parts = [step.segment for step in steps if isinstance(step, kind)]
        inputs = ([p.shared, p.replaced, p.local] for p in parts)
        texts = [
            str(jax.make_jaxpr(p.run)(*map(abstract, values), 0))
            for p, values in zip(parts, inputs, strict=True)
        ]
        return sum(text.count("= scan[") for text in texts)

    assert (scans(sweeps.Shared), scans(sweeps.Sweep)) == (1, 0)
    assert not list(steps_of(steps, sweeps.Layers))


def test_memory_maps(tmp_path):
    model = surrogate(mixers.Flare, jnp.float32)
    x, mask = points(13, dtype=np.float32)
    # Without 64 bits it is computed in float32.
    mapped = np.memmap(tmp_path / "x", np.float64, "w+", shape=x.shape)
    mapped[:] = x
    fields = np.memmap(tmp_path / "y", np.float32, "w+", shape=(2, 13, OUTPUTS))
    result = predict_in_chunks(model, mapped, mask=mask, chunk=5, out=fields)
    assert result is fields
    assert_close(np.array(fields), np.asarray(apply(model, x, mask)), error=ERROR)


def test_progress_on_standard_error(capsys):
    model = surrogate(mixers.Flare, jnp.float32)
    x, _ = points(13, dtype=np.float32)
    y = predict_in_chunks(model, x, chunk=5, progress=True)
    assert_close(y, np.asarray(apply(model, x)), error=ERROR)
    out, err = capsys.readouterr()
    assert not out and "points/s" in err and "0:00:00" in err
    predict_in_chunks(model, x, chunk=5)
    assert capsys.readouterr() == ("", "")


def total(x, axis):
    return x if axis is None else lax.psum(x, axis)


def swap(x, *, mask=None, axis_name=None):
    """Carries that change places, of the points and of what they share."""

    def step(carry, w):
        a, b, p, q = carry
        s = total(a.sum(-2), axis_name)
        return (b, a * w + q[:, None], q + jnp.sin(s), p), None

    one = jnp.ones((len(x), INPUTS))
    (a, b, p, q), _ = lax.scan(step, (x, 2 * x, one, 0 * one), jnp.arange(1.0, 4.0))
    return a - b + p[:, None] + 2 * q[:, None]


def grow(x, *, mask=None, axis_name=None):
    """Carries that are the same for all chunks at first, one of them for longer."""

    def step(carry, w):
        g, h, c = carry
        mean = total((g + x).sum(-2, keepdims=True), axis_name)
        return (2 * h, h * w + jnp.cos(mean) * x, 2.0 + 0 * w), None

    start = jnp.ones(x.shape), jnp.ones(x.shape), jnp.float32(3)
    (g, h, c), _ = lax.scan(step, start, jnp.arange(1.0, 5.0))
    return g + h * c


def nested(x, *, mask=None, axis_name=None):
    """Layers in layers, and reductions between and after them."""

    def inner(h, w):
        return h + jnp.tanh(total(h.sum(-2, keepdims=True), axis_name)) * w, None

    def outer(h, w):
        top = h.max(-2, keepdims=True)
        top = top if axis_name is None else lax.pmax(top, axis_name)
        h, _ = lax.scan(inner, h - top, w)
        return h / total(jnp.abs(h).sum(-2, keepdims=True), axis_name), None

    h, _ = lax.scan(outer, x, jnp.arange(6.0).reshape(2, 3))
    return h * total(h.sum(-2, keepdims=True), axis_name) + x


def gathered(x, *, mask=None, axis_name=None):
    """Parts of all chunks of 4, in both forms; the place of a chunk; the least."""
    first, low = x[:, ::4], x.min(-2, keepdims=True)
    stacked, chunks, index = first.max(-1), x.shape[-2] // 4, 0
    if axis_name is not None:
        first = lax.all_gather(first, axis_name, axis=1, tiled=True)
        stacked = lax.all_gather(stacked[:, 0], axis_name, axis=1)
        low, chunks = lax.pmin(low, axis_name), lax.psum(jnp.ones(()), axis_name)
        index = lax.axis_index(axis_name)
    weight = jnp.arange(1.0, 1 + first.shape[1])
    first = jnp.einsum("bpc,p->bc", first, weight) + (stacked @ weight)[:, None]
    place = jnp.arange(x.shape[-2]) + index * x.shape[-2]
    return (x - low) * first[:, None] * chunks + place[:, None]


def wrapped(x, *, mask=None, axis_name=None):
    """Reductions inside of functions that have a derivative of their own."""

    @jax.custom_jvp
    def mean(x):
        return total(x.sum(-2, keepdims=True), axis_name)

    mean.defjvp(lambda x, dx: (mean(*x), mean(*dx)))
    again = jax.checkpoint(jax.jit(lambda x: jnp.sin(mean(x)) * x))
    return again(jax.nn.relu(x)) + again(x)


def apart(x, *, mask=None, axis_name=None):
    return jnp.broadcast_to(jnp.arange(2.0), (*x.shape[:-1], 2))


@pytest.mark.parametrize("f", [swap, grow, nested, gathered, wrapped, apart])
def test_any_program_of_reductions(f):
    x, _ = points(12, dtype=np.float32)
    check(Partial(f), x, chunk=4, error=ERROR)


def scale(x, axis_name):
    top = x.max((1, 2), keepdims=True)
    return jnp.exp(-top if axis_name is None else -lax.pmax(top, axis_name))


def few(x, *, mask=None, axis_name=None):
    sums = x.sum(1, keepdims=True)
    return x * total(sums * scale(x, axis_name), axis_name)


def each(x, *, mask=None, axis_name=None):
    sums = jnp.square(x).sum(2, keepdims=True)
    return x * total((sums * scale(x, axis_name)).sum(1, keepdims=True), axis_name)


def many(x, *, mask=None, axis_name=None):
    sums = jnp.swapaxes(x, 1, 2) @ x
    return x @ total(sums * scale(x, axis_name), axis_name)


@pytest.mark.parametrize("f,count", [(few, 2), (each, 3), (many, 3)])
def test_small_values_alone_are_kept(f, count):
    """Neither a number for each point, nor more numbers than a chunk has."""
    x, _ = points(24, dtype=np.float32)
    check(Partial(f), x, chunk=8, error=ERROR)
    steps = planned(Partial(f), x, chunk=8)
    found = [s for s in steps_of(steps, sweeps.Sweep) if s.points]
    assert len(found) == chunked._sweeps(steps) == count
    assert sum(len(s.writes) for s in found) == 1 + (f is few)


def sends(x, *, mask=None, axis_name=None):
    return lax.ppermute(x, axis_name, [(0, 1), (1, 0)])


def trades(x, *, mask=None, axis_name=None):
    return lax.all_to_all(x, axis_name, 1, 1, tiled=True)


def loops(x, *, mask=None, axis_name=None):
    step = lambda x: x + lax.psum(x.sum(), axis_name)
    return lax.while_loop(lambda x: x.sum() < 9, step, x)


def collects(x, *, mask=None, axis_name=None):
    step = lambda h, w: (h, lax.psum(h.sum(), axis_name))
    return lax.scan(step, x, jnp.arange(3.0))[0]


def backwards(x, *, mask=None, axis_name=None):
    step = lambda h, w: (h + w * lax.psum(h.sum(), axis_name), None)
    return lax.scan(step, x, jnp.arange(3.0), reverse=True)[0]


def rows(x, *, mask=None, axis_name=None):
    step = lambda h, w: (h + lax.psum(w.sum(), axis_name), None)
    return lax.scan(step, x, x)[0]


def groups(x, *, mask=None, axis_name=None):
    return x + lax.psum(x, axis_name, axis_index_groups=[[0], [1]])


@pytest.mark.parametrize(
    "f,how",
    [
        (sends, "ppermute"),
        (trades, "all_to_all"),
        (loops, "psum in while"),
        (collects, "psum in scan"),
        (backwards, "psum in scan"),
        (rows, "points as layers"),
        (groups, "psum"),
    ],
)
def test_points_that_meet_directly(f, how):
    def either(x, *, mask=None, axis_name=None):
        return x if axis_name is None else f(x, axis_name=axis_name)

    x, _ = points(12, dtype=np.float32)
    with pytest.raises(ValueError, match=rf"directly \({how}\); only models"):
        predict_in_chunks(Partial(either), x, chunk=6)


def test_full_attention_is_refused():
    inner = functools.partial(mixers.SelfAttention, heads=2)
    sizes = {"channels": 6, "blocks": 3, "io_layers": 0, "mixer": inner}
    model = models.Surrogate(INPUTS, OUTPUTS, **sizes, rngs=nnx.Rngs(0))
    x, _ = points(7, dtype=np.float32)
    with pytest.raises(ValueError, match="attend to each other directly"):
        predict_in_chunks(model, x, chunk=4)


def test_bad_inputs(calls):
    model = surrogate(mixers.Flare, jnp.float32)
    x, mask = points(7, dtype=np.float32)
    predict = functools.partial(predict_in_chunks, model)
    with pytest.raises(ValueError, match="chunk must be a positive integer, got 0"):
        predict(x, chunk=0)
    for bad in (x[0, 0], x[:, :0]):
        with pytest.raises(ValueError, match="x must be points"):
            predict(bad, chunk=3)
    for bad in (mask[:, :5], mask.astype(int)):
        with pytest.raises(ValueError, match=r"mask must be .* \(2, 7\), got"):
            predict(x, mask=bad, chunk=3)
    for bad in (np.empty((2, 7, 3), np.float32), np.empty((2, 7, 2))):
        with pytest.raises(ValueError, match=r"out must be float32 of .* \(2, 7, 2\)"):
            predict(x, chunk=3, out=bad)
    with pytest.raises(ValueError, match="11 points are not those of a 3 x 4 grid"):
        predict_in_chunks(module("gnot_grid"), points(11)[0], chunk=6)
    assert not calls


def test_it_is_for_the_host():
    model = module("lno")
    x = jnp.ones((7, INPUTS))
    with pytest.raises(TypeError, match="outside of jax.jit"):
        jax.jit(lambda x: predict_in_chunks(model, x, chunk=4))(x)
