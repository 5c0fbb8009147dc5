"""The shared backbone: depth, masks, precision, sizes and initial values."""

import functools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

from flaxmix import mixers, models
from flaxmix.models import Surrogate, apply_stack, stack

from closeness import assert_close

# Two blocks of sums of tens of terms: 64 ulps, gradients included.
ERROR = 64 * 2**-23
# A rounding to 8 bits after each of some 20 steps, most of which average out.
BFLOAT16 = 4 * 2**-8

INPUTS, OUTPUTS, C, H, M, N = 3, 2, 21, 3, 5, 11
MIXERS = {
    "attention": functools.partial(mixers.SelfAttention, heads=H),
    "flare": functools.partial(mixers.Flare, heads=H, latents=M),
}


def make(name="flare", **options):
    defaults = {"channels": C, "blocks": 2, "mixer": MIXERS[name], "io_layers": 1}
    return Surrogate(INPUTS, OUTPUTS, **defaults | options, rngs=nnx.Rngs(0))


@functools.cache
def randomized(name):
    """A network none of whose parameters is at a special value such as 0."""
    graph, params = nnx.split(jax.jit(lambda: make(name))(), nnx.Param)
    rng = np.random.default_rng(0)
    shift = lambda x: np.asarray(x) + rng.normal(size=x.shape) / 5
    cast = lambda x: jnp.asarray(shift(x), jnp.float32)
    return nnx.merge(graph, jax.tree.map(cast, params))


def inputs(batch=(2,), *, n=N, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(*batch, n, INPUTS)), jnp.float32)
    mask = rng.random((*batch, n)) < 0.7
    mask[..., :2] = True
    return x, jnp.asarray(mask)


@jax.jit
def apply(model, x, mask):
    return model(x, mask=mask)


@jax.jit
def run(model, x, mask):
    """Results, and gradients of a loss on the real points."""
    y, back = jax.vjp(lambda model, x: model(x, mask=mask), model, x)
    return y, back(jnp.where(mask[..., None], jnp.cos(y), 0))


def grads_of(result):
    y, (dmodel, dx) = result
    return y, jax.tree.leaves(dmodel), dx


def flat(leaves):
    """All gradients in one array, since some are zero by analysis."""
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def test_scan_equals_a_loop_over_blocks():
    model = randomized("flare")
    x, mask = inputs()

    @jax.jit
    def loop(model, x, mask):
        h = model.embed(jnp.where(mask[..., None], x, 0))
        for i in range(2):
            block = jax.tree.map(operator.itemgetter(i), model.blocks)
            h = h + block.mixer(block.mixer_norm(h), mask=mask)
            h = h + block.mlp(block.mlp_norm(h))
        return jnp.where(mask[..., None], model.head(model.norm(h)), 0)

    assert_close(apply(model, x, mask), loop(model, x, mask), error=ERROR)


def test_apply_stack_applies_layers_in_turn():
    layers = stack(lambda rngs: Affine(rngs), 3, nnx.Rngs(0))
    factors = np.asarray(layers.factor[...], np.float64)
    assert factors.shape == (3,) and len(set(factors)) == 3
    expected = 2.0
    for factor in factors:
        expected = factor * expected + 1
    for remat in (False, True):
        y = apply_stack(layers, jnp.asarray(2.0), remat=remat)
        assert_close(y, np.asarray(expected), error=ERROR)


class Affine(nnx.Module):
    """x -> a x + 1, which does not commute with itself."""

    def __init__(self, rngs):
        self.factor = nnx.Param(jax.random.normal(rngs.params(), ()))

    def __call__(self, x):
        return self.factor[...] * x + 1


def test_remat_changes_nothing():
    model = randomized("flare")
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(remat=True)), nnx.Param)
    again = nnx.merge(graph, nnx.state(model, nnx.Param))
    assert again.remat and not model.remat
    x, mask = inputs()
    actual, expected = run(again, x, mask), run(model, x, mask)
    assert_close(grads_of(actual), grads_of(expected), error=ERROR)
    assert "remat" in str(jax.make_jaxpr(lambda m, x: m(x))(again, x))


@pytest.mark.parametrize(
    "name", ["flare", pytest.param("attention", marks=pytest.mark.slow)]
)
def test_masked_points_never_matter(name):
    model = randomized(name)
    x, mask = inputs()
    for real in (mask, mask.at[1].set(False)):
        hide = lambda fill, real=real: jnp.where(real[..., None], x, fill)
        expected = grads_of(run(model, hide(0.0), real))
        assert not np.any(expected[0][~real]) and not np.any(expected[2][~real])
        assert np.all(np.any(expected[0][real], -1))
        for fill in (1.0, np.nan, np.inf):
            actual = grads_of(run(model, hide(fill), real))
            assert_close(actual, expected, error=0.0)


def test_padding_length_changes_nothing():
    model = randomized("flare")
    x, _ = inputs()
    longer = jnp.concatenate([x, jnp.full((2, 6, INPUTS), jnp.nan)], 1)
    mask = jnp.broadcast_to(jnp.arange(N + 6) < N, (2, N + 6))
    y, grads, dx = grads_of(run(model, longer, mask))
    expected = grads_of(run(model, x, mask[:, :N]))
    assert not np.any(y[:, N:]) and not np.any(dx[:, N:])
    actual = y[:, :N], flat(grads), dx[:, :N]
    assert_close(actual, (expected[0], flat(expected[1]), expected[2]), error=ERROR)
    # And a mask of ones is no mask.
    assert_close(apply(model, x, None), expected[0], error=ERROR)


@pytest.mark.slow
def test_shards_equal_one_device():
    model = randomized("flare")
    x, mask = inputs(n=12)
    mask = mask.at[:, 9:].set(False)

    def loss(model, x, mask, axis_name=None):
        total = jnp.sum(jnp.sin(model(x, mask=mask, axis_name=axis_name)))
        return total if axis_name is None else jax.lax.psum(total, axis_name)

    points = P(None, "context")
    sharded = jax.shard_map(
        functools.partial(loss, axis_name="context"),
        mesh=jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,)),
        in_specs=(P(), points, points),
        out_specs=P(),
    )

    def run(f):
        f = jax.jit(jax.value_and_grad(f, argnums=(0, 1)))
        value, (dmodel, dx) = f(model, x, mask)
        return value, flat(jax.tree.leaves(dmodel)), dx

    assert_close(run(sharded), run(loss), error=ERROR)


def test_points_are_a_set_and_items_are_alone():
    model = randomized("flare")
    x, mask = inputs()
    p = np.random.default_rng(1).permutation(N)
    y = apply(model, x, mask)
    assert y.shape == (2, N, OUTPUTS)
    assert_close(apply(model, x[:, p], mask[:, p]), y[:, p], error=ERROR)
    other = apply(model, x.at[1].set(7.0), mask.at[1].set(True))
    assert_close(other[0], y[0], error=0.0)


def test_one_point_and_no_batch():
    model = randomized("flare")
    x, _ = inputs(n=1)
    y = apply(model, x, None)
    assert y.shape == (2, 1, OUTPUTS)
    assert_close(apply(model, x[0], None), y[0], error=ERROR)


def test_blocks_compute_in_the_given_dtype():
    model = randomized("flare")
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(dtype=jnp.bfloat16)), nnx.Param)
    low = nnx.merge(graph, nnx.state(model, nnx.Param))
    x, mask = inputs()
    y, expected = apply(low, x, mask), apply(model, x, mask)
    assert_close(y, expected, error=BFLOAT16)
    assert np.any(y != expected)
    dtypes = {g.dtype for g in jax.tree.leaves(jax.eval_shape(run, low, x, mask))}
    assert dtypes == {jnp.dtype(jnp.float32)}
    # The blocks see bfloat16 alone: the scan carries it.
    closed = jax.make_jaxpr(lambda m, x: m(x))(low, x)
    (scan,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "scan")
    assert [v.aval.dtype for v in scan.outvars] == [jnp.bfloat16]
    # Coordinates keep their digits: the first layer is float32. A shift that
    # bfloat16 cannot hold reaches its output whole.
    one = jnp.full((1, 1, INPUTS), 1.0)
    embed = jax.jit(lambda m, x: m.embed(x))
    assert np.any(embed(low, one) != embed(low, one + 2**-12))


def test_one_trace_a_shape():
    chex.clear_trace_counter()
    model = randomized("flare")
    f = jax.jit(chex.assert_max_traces(lambda model, x: model(x), n=1))
    for seed in range(3):
        f(model, inputs(seed=seed)[0])


def test_compiled_size_does_not_grow_with_depth():
    def size(blocks):
        model = nnx.eval_shape(lambda: make(blocks=blocks))
        x = jax.ShapeDtypeStruct((2, N, INPUTS), jnp.float32)
        return len(jax.jit(lambda m, x: m(x)).lower(model, x).as_text().splitlines())

    assert size(2) == size(7)


@pytest.mark.parametrize("blocks", [0, -1])
def test_depth_must_be_positive(blocks):
    with pytest.raises(ValueError, match=f"depth must be at least 1, got {blocks}"):
        make(blocks=blocks)


def test_rejects_heads_of_the_mixer():
    with pytest.raises(ValueError, match="heads=4 must divide channels=21"):
        make(mixer=functools.partial(mixers.SelfAttention, heads=4))


def test_initialisation():
    """Normal 0.02, biases 0, norms 1, and no two layers alike."""
    mixer = functools.partial(mixers.SelfAttention, heads=5)
    options = {"channels": 40, "blocks": 3, "mixer": mixer}
    build = lambda: Surrogate(41, OUTPUTS, **options, rngs=nnx.Rngs(0))
    model = jax.jit(build)()
    kernels = []
    state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    for path, x in jax.tree.leaves_with_path(state):
        name = path[-1].key
        if name == "kernel":
            layers = x if path[0].key == "blocks" else x[None]
            kernels += [np.ravel(layer)[:80] for layer in layers]
            # The standard deviation of a standard deviation is 1 / sqrt(2 size).
            assert abs(x.std() / 0.02 - 1) < 4 / (2 * x.size) ** 0.5, path
            assert abs(x.mean()) < 4 * 0.02 / x.size**0.5, path
        elif name == "scale":
            assert_close(x, np.ones(x.shape), error=0.0)
        else:
            assert name == "bias" and not np.any(x), path
    # Embedding and head: 4 each; three blocks of qkv, out and two of the MLP.
    assert len(kernels) == 4 + 4 + 3 * 4
    off = np.corrcoef(kernels) - np.eye(len(kernels))
    # 190 correlations of 80 numbers, each N(0, 1 / 80).
    assert np.abs(off).max() < 4.5 / 80**0.5


def count(kind, *, sizes=None, heads=8, **options):
    options = {"outputs": 1, "channels": 128} | options
    sizes = {"heads": heads, **(sizes or {})}
    if kind in (models.Luna, models.ABUPT, models.SetTransformer):
        build = functools.partial(kind, **sizes, **options)
    else:
        mixer = functools.partial(kind, **sizes)
        build = functools.partial(Surrogate, mixer=mixer, **options)
    state = nnx.eval_shape(lambda: nnx.state(build(rngs=nnx.Rngs(0))))
    return sum(x.size for x in jax.tree.leaves(state))


# inputs, blocks, latents.
TASKS = {
    "elasticity": (2, 8, 64),
    "darcy": (3, 8, 128),
    "airfoil": (2, 8, 64),
    "pipe": (2, 2, 64),
    "drivaer40k": (3, 4, 64),
}
COUNTS = {
    mixers.SelfAttention: (1159681, 1159809, 1159681, 364801, 629889),
    mixers.Flare: (1093121, 1158785, 1093121, 348161, 596609),
    mixers.FlarePP: (1291329, 1422529, 1291329, 397713, 695713),
    mixers.SimplifiedFlarePP: (1357825, 1423489, 1357825, 414337, 728961),
    mixers.AblatedFlarePP: (1291329, 1422529, 1291329, 397713, 695713),
    mixers.Transolver: (1042497, 1051329, 1042497, 335505, 571297),
    mixers.TransolverPP: (919625, 937673, 919625, 304787, 509861),
    mixers.Transolver3: (1042497, 1051329, 1042497, 335505, 571297),
    models.Luna: (1566209, 1574529, 1566209, 472577, 837249),
    models.SetTransformer: (1761793, 1827457, 1761793, 515329, 930945),
    models.ABUPT: (1159681, 1159809, 1159681, 364801, 629889),
}


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("task", TASKS)
def test_parameter_counts_of_the_study(task, kind):
    inputs, blocks, latents = TASKS[task]
    sizes = {} if kind is mixers.SelfAttention else {"latents": latents}
    sizes |= {"coordinates": range(inputs)} if kind is models.ABUPT else {}
    expected = COUNTS[kind][list(TASKS).index(task)]
    assert count(kind, sizes=sizes, inputs=inputs, blocks=blocks) == expected


def test_parameter_count_of_the_original_study():
    sizes = {"latents": 64}
    options = {"channels": 64, "mlp_ratio": 1.0, "mlp_layers": 3}
    actual = count(mixers.OriginalFlare, sizes=sizes, inputs=2, blocks=8, **options)
    assert actual == 592641


@pytest.mark.parametrize(
    "kind, latents, expected",
    [
        (mixers.SelfAttention, None, 1683969),
        (mixers.Flare, 64, 1617409),
        (mixers.Flare, 128, 1682945),
        (mixers.Flare, 256, 1814017),
        (mixers.FlarePP, 64, 1815361),
        (mixers.FlarePP, 128, 1946433),
        (mixers.FlarePP, 256, 2208577),
        (mixers.Transolver3, 64, 1566785),
        (mixers.Transolver3, 128, 1575489),
        (mixers.Transolver3, 256, 1592897),
    ],
)
def test_parameter_counts_with_rms_norm(kind, latents, expected):
    sizes = {} if latents is None else {"latents": latents}
    sizes |= {} if kind is mixers.Transolver3 else {"norm": "rms"}
    options = {"inputs": 3, "blocks": 8, "norm": "rms", "mlp_ratio": 4.0}
    assert count(kind, sizes=sizes, **options) == expected
