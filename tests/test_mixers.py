"""The layers against the formulas in their docstrings, and what all of them share."""

import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

from flaxmix import mixers, ops
from flaxmix.layers import Linear

import oracles
from closeness import assert_close

C, H, D, M, N = 21, 3, 7, 5, 11

# Of outputs that are sums of 21 terms, after up to 5 softmaxes and norms.
TIGHT = 1e-12
ERROR = {jnp.float32: 64 * 2**-23, jnp.bfloat16: 16 * 2**-8, jnp.float16: 16 * 2**-11}


# The oracle of each layer: parameters `p` as nested dictionaries, x, mask.


def split(x):
    return x.reshape(*x.shape[:-1], H, D)


def merge(x):
    return x.reshape(*x.shape[:-2], C)


def norm(p, x, kind):
    if kind == "layer":
        return oracles.layer_norm(x, p.get("scale"), p.get("bias"))
    return oracles.rms_norm(x, p.get("scale"))


def self_attention(p, x, mask, *, qk_norm=False, kind="layer"):
    y = oracles.linear(p["qkv"], x)
    q, k, v = (split(y[..., i * C : (i + 1) * C]) for i in range(3))
    if qk_norm:
        q, k = norm(p["query_norm"], q, kind), norm(p["key_norm"], k, kind)
    y, _ = oracles.attention(q, k, v, mask=mask)
    return oracles.linear(p["out"], merge(y))


def flare(p, x, mask, *, qk_norm=False, kind="layer"):
    q = p["latents"]
    k, v = (split(oracles.linear(p[name], x, skip=True)) for name in ("key", "value"))
    if qk_norm:
        q, k = norm(p["query_norm"], q, kind), norm(p["key_norm"], k, kind)
    return oracles.linear(p["out"], merge(oracles.flare(q, k, v, mask=mask)))


def original_flare(p, x, mask, *, layers=3, scale=1.0):
    def project(p):
        if layers is None:
            return split(oracles.linear(p, x, skip=True))
        options = {"input_residual": True, "output_residual": True}
        return split(oracles.residual_mlp(p, x, **options))

    k, v = project(p["key"]), project(p["value"])
    y = oracles.flare(p["latents"], k, v, mask=mask, scale=scale)
    return oracles.linear(p["out"], merge(y))


def flarepp(
    p, x, mask, *, share=True, key_norm=True, reference_norm=True, kind="layer"
):
    project = lambda name: split(oracles.linear(p[name], x))
    k0 = norm({}, project("synthesis_key"), kind)
    v0 = k0 if share else norm({}, project("synthesis_value"), kind)
    k, v = project("key"), project("value")
    k = norm(p["key_norm"], k, kind) if key_norm else k
    reference = p["reference"]
    reference = norm({}, reference, kind) if reference_norm else reference
    seeds = norm(p["seed_norm"], p["seeds"], kind)
    options = {"reference": reference, "gate": p["gate"], "mask": mask}
    return oracles.linear(
        p["out"], merge(oracles.flarepp(seeds, k0, v0, k, v, **options))
    )


def simplified(p, x, mask, *, share=False, qk_norm=False, kind="layer"):
    project = lambda name: split(oracles.linear(p[name], x, skip=True))
    k0 = project("synthesis_key")
    v0 = k0 if share else project("synthesis_value")
    k0 = norm(p["synthesis_norm"], k0, kind)
    seeds = norm(p["seed_norm"], p["seeds"], kind)
    q = oracles.synthesize(seeds, k0, v0, mask=mask)
    k, v = project("key"), project("value")
    if qk_norm:
        q, k = norm(p["query_norm"], q, kind), norm(p["key_norm"], k, kind)
    return oracles.linear(p["out"], merge(oracles.flare(q, k, v, mask=mask)))


LATENT = {"latents": M}
CASES = {
    "attention": (mixers.SelfAttention, self_attention, {}, {}),
    "attention_layer": (mixers.SelfAttention, self_attention, {}, {"qk_norm": True}),
    "attention_rms": (
        *(mixers.SelfAttention, self_attention, {}),
        {"qk_norm": True, "kind": "rms"},
    ),
    "flare": (mixers.Flare, flare, LATENT, {}),
    "flare_layer": (mixers.Flare, flare, LATENT, {"qk_norm": True}),
    "flare_rms": (mixers.Flare, flare, LATENT, {"qk_norm": True, "kind": "rms"}),
    "original": (mixers.OriginalFlare, original_flare, LATENT, {}),
    "original_linear": (
        *(mixers.OriginalFlare, original_flare, LATENT),
        {"layers": None, "scale": 0.3},
    ),
    "flarepp": (mixers.FlarePP, flarepp, LATENT, {}),
    "flarepp_rms": (mixers.FlarePP, flarepp, LATENT, {"kind": "rms"}),
    "flarepp_unshared": (mixers.FlarePP, flarepp, LATENT, {"share": False}),
    "flarepp_bare": (
        *(mixers.FlarePP, flarepp, LATENT),
        {"key_norm": False, "reference_norm": False},
    ),
    "simplified": (mixers.SimplifiedFlarePP, simplified, LATENT, {}),
    "simplified_shared": (
        *(mixers.SimplifiedFlarePP, simplified, LATENT),
        {"share": True},
    ),
    "simplified_rms": (
        *(mixers.SimplifiedFlarePP, simplified, LATENT),
        {"qk_norm": True, "kind": "rms"},
    ),
}
MIXERS = ["attention", "flare", "original", "flarepp", "simplified"]


def make(name, *, channels=C, heads=H, seed=0):
    kind, _, sizes, options = CASES[name]
    options = {"norm" if k == "kind" else k: v for k, v in options.items()}
    return kind(channels, heads=heads, **sizes, **options, rngs=nnx.Rngs(seed))


def sharded_over(axis_name, layer, x, mask):
    """A loss that is reduced inside the sharded region."""
    y = layer(x, mask=mask, axis_name=axis_name)
    total = jnp.sum(jnp.where(mask[..., None], jnp.sin(y), 0))
    return total if axis_name is None else jax.lax.psum(total, axis_name)


@functools.cache
def randomized(name):
    """A layer none of whose parameters is at a special value such as 0, in NumPy."""
    graph, params = nnx.split(make(name), nnx.Param)
    rng = np.random.default_rng(0)
    shift = lambda x: np.asarray(x) + rng.normal(size=x.shape) / 4
    return graph, jax.tree.map(lambda x: shift(x).astype(np.float32), params)


def module(name, dtype=jnp.float32):
    graph, params = randomized(name)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(x, dtype), params))


def numpy_params(name):
    _, params = randomized(name)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))


def inputs(batch=(2,), *, n=N, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*batch, n, C)).astype(np.float32)
    mask = rng.random((*batch, n)) < 0.7
    mask[..., :2] = True
    return jnp.asarray(x, dtype), jnp.asarray(mask)


@jax.jit
def apply(layer, x, mask):
    return layer(x, mask=mask)


@pytest.mark.parametrize("name", CASES)
def test_matches_formula(name):
    with jax.enable_x64(True):
        x, mask = inputs(dtype=jnp.float64)
        y = apply(module(name, jnp.float64), x, mask)
        assert y.dtype == jnp.float64
        oracle, options = CASES[name][1], CASES[name][3]
        x = np.where(np.asarray(mask)[..., None], x, 0)
        expected = oracle(numpy_params(name), x, mask, **options)
        assert_close(y[mask], expected[np.asarray(mask)], error=TIGHT)


@pytest.mark.parametrize("name", MIXERS)
def test_keeps_the_dtype(name):
    x, mask = inputs()
    layer = module(name)
    expected = apply(layer, x, mask)
    with jax.enable_x64(True):
        exact = apply(module(name, jnp.float64), x.astype(jnp.float64), mask)
        assert_close(expected, exact, error=ERROR[jnp.float32])
    for dtype in (jnp.bfloat16, jnp.float16):
        y = apply(layer, x.astype(dtype), mask)
        assert y.dtype == dtype
        assert_close(y, expected, error=ERROR[dtype])


@pytest.mark.parametrize("name", MIXERS)
def test_points_are_a_set_and_items_are_alone(name):
    layer = module(name)
    x, mask = inputs()
    y = apply(layer, x, mask)
    assert y.shape == x.shape
    p = np.random.default_rng(1).permutation(N)
    error = ERROR[jnp.float32]
    assert_close(apply(layer, x[:, p], mask[:, p]), y[:, p], error=error)
    # The first item does not see the second, nor does its place matter.
    other = apply(layer, x.at[1].set(7.0), mask.at[1].set(True))
    assert_close(other[0], y[0], error=0.0)
    assert_close(apply(layer, x[::-1], mask[::-1]), y[::-1], error=error)


@pytest.mark.parametrize("name", MIXERS)
def test_masked_points_never_matter(name):
    layer = module(name)
    x, mask = inputs()

    @jax.jit
    def run(layer, x, mask):
        y, back = jax.vjp(lambda layer, x: layer(x, mask=mask), layer, x)
        # The loss is on the real points.
        return y, back(jnp.where(mask[..., None], jnp.cos(y), 0))

    def result(fill, mask):
        y, (dlayer, dx) = run(layer, jnp.where(mask[..., None], x, fill), mask)
        return y[mask], dlayer, dx

    for real in (mask, mask.at[1].set(False)):
        expected = result(0.0, real)
        assert not np.any(expected[2][~real])
        for fill in (1.0, np.nan, np.inf):
            assert_close(result(fill, real), expected, error=0.0)


@pytest.mark.parametrize("name", MIXERS)
def test_padding_and_any_batch(name):
    layer = module(name)
    x, mask = inputs((2, 3))
    y = apply(layer, x, mask)
    expected = jnp.stack([apply(layer, *item) for item in zip(x, mask, strict=True)])
    error = ERROR[jnp.float32]
    assert_close(y, expected, error=error)
    # One item without batch axes, padding cut off and no mask.
    order = np.argsort(~np.asarray(mask[0, 0]), kind="stable")
    count = int(mask[0, 0].sum())
    single = apply(layer, x[0, 0, order[:count]], None)
    assert_close(single, y[0, 0, order[:count]], error=error)


@pytest.mark.parametrize("name", MIXERS)
def test_one_point(name):
    layer = module(name)
    x, _ = inputs((), n=1)
    oracle, options = CASES[name][1], CASES[name][3]
    expected = oracle(numpy_params(name), x, None, **options)
    assert_close(apply(layer, x, None), expected, error=ERROR[jnp.float32])


@pytest.mark.parametrize("name", MIXERS)
def test_shards_equal_one_device(name):
    """Values, and gradients of every parameter and of x, in float64."""
    with jax.enable_x64(True):
        layer = module(name, jnp.float64)
        x, mask = inputs(n=12, dtype=jnp.float64)
        # The last of four shards is all padding.
        mask = mask.at[:, 9:].set(False)
        points = P(None, "context")
        sharded = jax.shard_map(
            functools.partial(sharded_over, "context"),
            mesh=jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,)),
            in_specs=(P(), points, points),
            out_specs=P(),
        )
        whole = functools.partial(sharded_over, None)

        def run(f):
            f = jax.jit(jax.value_and_grad(f, argnums=(0, 1)))
            value, (dlayer, dx) = f(layer, x, mask)
            # Some gradients are zero by analysis: compare all with the largest.
            return value, jax.flatten_util.ravel_pytree(dlayer)[0], dx

        assert_close(run(sharded), run(whole), error=TIGHT)


@pytest.mark.parametrize("name", CASES)
def test_only_parameters(name):
    state = nnx.state(nnx.eval_shape(lambda: make(name)))
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert leaves and {type(leaf) for leaf in leaves} == {nnx.Param}
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}


COUNTS = {
    "attention": 4 * C**2 + 4 * C,
    "attention_layer": 4 * C**2 + 4 * C + 4 * D,
    "flare": 3 * C**2 + 3 * C + M * C,
    "flare_rms": 3 * C**2 + 3 * C + M * C + 2 * D,
    "original": 10 * (C**2 + C) + C**2 + C + M * C,
    "original_linear": 3 * (C**2 + C) + M * C,
    "flarepp": 4 * C**2 + 4 * C + 2 * M * C + H + 4 * D,
    "flarepp_rms": 4 * C**2 + 4 * C + 2 * M * C + H + 2 * D,
    "flarepp_unshared": 5 * C**2 + 5 * C + 2 * M * C + H + 4 * D,
    "flarepp_bare": 4 * C**2 + 4 * C + 2 * M * C + H + 2 * D,
    "simplified": 5 * C**2 + 5 * C + M * C + 4 * D,
    "simplified_shared": 4 * C**2 + 4 * C + M * C + 4 * D,
    "simplified_rms": 5 * C**2 + 5 * C + M * C + 4 * D,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count(name):
    state = nnx.eval_shape(lambda: nnx.state(make(name)))
    assert sum(x.size for x in jax.tree.leaves(state)) == COUNTS[name]


@pytest.mark.parametrize("heads", [4, 0, -3])
@pytest.mark.parametrize("name", MIXERS)
def test_heads_must_divide_channels(name, heads):
    with pytest.raises(ValueError, match=f"heads={heads} must divide channels={C}"):
        make(name, heads=heads)


def test_sharing_is_the_only_difference():
    """An unshared layer whose two synthesis projections agree is a shared one."""
    x, mask = inputs()
    shared, unshared = module("flarepp"), module("flarepp_unshared")
    for name in ("seeds", "reference", "gate", "synthesis_key", "key", "value", "out"):
        setattr(unshared, name, getattr(shared, name))
    unshared.seed_norm, unshared.key_norm = shared.seed_norm, shared.key_norm
    different = apply(unshared, x, mask) - apply(shared, x, mask)
    assert np.abs(different).max() > 0.01
    unshared.synthesis_value = shared.synthesis_key
    actual, expected = apply(unshared, x, mask), apply(shared, x, mask)
    assert_close(actual, expected, error=ERROR[jnp.float32])


@jax.jit
def queries(layer, x, mask):
    return layer.queries(x, mask=mask)


@pytest.mark.parametrize("name", ["flarepp", "flarepp_rms"])
def test_rms_of_queries_stays_within_the_gate(name):
    layer = module(name)
    rng = np.random.default_rng(0)
    # Reference rows far above the norms' eps, which would otherwise lower their RMS.
    layer.reference[...] = jnp.asarray(rng.normal(size=(H, M, D)), jnp.float32)
    for logit in (-80.0, -2.0, 0.25, 2.0, 80.0):
        layer.gate[...] = jnp.asarray([logit, -logit, 0.0])
        g = 1 / (1 + np.exp(-np.asarray(layer.gate[...], np.float64)))[:, None]
        for seed, scale in ((0, 1e-3), (1, 1.0), (2, 1e3)):
            x, mask = inputs(seed=seed)
            q = np.asarray(queries(layer, scale * x, mask), np.float64)
            rms = np.sqrt(np.mean(q**2, -1))
            # Unit RMS of the reference up to eps / (its mean square).
            assert np.all(rms >= 1 - g - 1e-3) and np.all(rms <= 1 + g + 1e-5)
    # The gates do open: neither part is lost.
    assert rms.max() > 1.2


def test_closed_gate_makes_queries_independent_of_the_input():
    layer = module("flarepp")
    x, mask = inputs()
    other = inputs(seed=1)[0]
    open_queries = queries(layer, x, mask)
    assert np.abs(open_queries - queries(layer, other, mask)).max() > 0.1
    layer.gate[...] = jnp.full(H, -80.0)
    q = queries(layer, x, mask)
    assert_close(queries(layer, other, mask), q, error=0.0)
    reference = oracles.layer_norm(layer.reference[...])
    expected = np.broadcast_to(reference, q.shape)
    assert_close(q, expected, error=ERROR[jnp.float32])


def test_queries_are_the_ones_that_route():
    with jax.enable_x64(True):
        layer = module("flarepp", jnp.float64)
        x, mask = inputs(dtype=jnp.float64)
        q = queries(layer, x, mask)
        p = numpy_params("flarepp")
        x = np.where(np.asarray(mask)[..., None], x, 0)
        k, v = (split(oracles.linear(p[name], x)) for name in ("key", "value"))
        k = norm(p["key_norm"], k, "layer")
        y = oracles.linear(p["out"], merge(oracles.flare(q, k, v, mask=mask)))
        actual = apply(layer, jnp.asarray(x), mask)
        assert_close(actual[mask], y[np.asarray(mask)], error=TIGHT)


# Of 40 x 40 numbers or more: the standard deviation of a standard deviation is 2%.
STD = 0.08


def assert_normal(x, std):
    x = np.asarray(x)
    assert abs(x.std() / std - 1) < STD and abs(x.mean()) < 4 * std / x.size**0.5


def assert_initialised(layer, *, kernels, latents):
    """Kernels and latents normal with the given deviations, the rest plain."""
    found = []
    for path, x in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(layer))):
        name = path[-1].key
        if name == "kernel":
            eye = kernels == "near" and path[0].key != "out"
            assert_normal(x - (np.eye(len(x)) if eye else 0), 0.02)
        elif name in ("latents", "seeds", "reference"):
            assert_normal(x, latents)
            found.append(np.asarray(x).ravel())
        elif name == "gate":
            assert_close(x, np.full(x.shape, 0.25), error=0.0)
        elif name == "scale":
            assert_close(x, np.ones(x.shape), error=0.0)
        else:
            assert name == "bias" and not np.any(x)
    if len(found) == 2:
        assert abs(np.corrcoef(*found)[0, 1]) < 0.1


@pytest.mark.parametrize(
    "kind, kernels, latents",
    [
        (mixers.SelfAttention, "plain", None),
        (mixers.Flare, "plain", 0.02),
        (mixers.OriginalFlare, "plain", 0.1),
        (mixers.FlarePP, "near", 0.02),
        (mixers.SimplifiedFlarePP, "plain", 0.02),
    ],
)
def test_initialisation(kind, kernels, latents):
    sizes = {} if latents is None else {"latents": 40}
    layer = jax.jit(lambda: kind(40, heads=5, **sizes, rngs=nnx.Rngs(0)))()
    assert_initialised(layer, kernels=kernels, latents=latents)


@pytest.mark.parametrize("heads, scale", [(2, 1.0), (1, 17**-0.5)])
def test_default_scale_of_the_original(heads, scale):
    """1 up to 16 channels a head, 1 / sqrt(D) above."""
    channels = 32 if heads == 2 else 17
    options = {"heads": heads, "latents": M, "layers": None, "rngs": nnx.Rngs(0)}
    layer = mixers.OriginalFlare(channels, **options)
    assert layer.scale == scale


def test_skip_is_folded_or_added():
    rngs = nnx.Rngs(0)
    layer = Linear(C, C, skip=True, rngs=rngs)
    p = {"kernel": np.asarray(layer.kernel[...]), "bias": np.asarray(layer.bias[...])}
    x, _ = inputs()
    for dtype in ERROR:
        y = layer(x.astype(dtype))
        assert y.dtype == dtype
        expected = oracles.linear(p, x.astype(dtype), skip=True)
        assert_close(y, expected, error=ERROR[dtype] / 4)


def test_skip_needs_equal_widths():
    with pytest.raises(ValueError, match="skip needs equal widths, got 3 and 4"):
        Linear(3, 4, skip=True, rngs=nnx.Rngs(0))


def test_identity_needs_a_square():
    with pytest.raises(ValueError, match="needs equal widths, got 3 and 4"):
        Linear(3, 4, init="identity", rngs=nnx.Rngs(0))


def test_flare_layer_is_the_op_between_projections():
    layer = module("flare")
    x, mask = inputs()

    @jax.jit
    def by_hand(layer, x, mask):
        x = jnp.where(mask[..., None], x, 0)
        k, v = split(layer.key(x)), split(layer.value(x))
        y = ops.flare(layer.latents[...], k, v, mask=mask)
        return layer.out(merge(y))

    expected = by_hand(layer, x, mask)
    assert_close(apply(layer, x, mask), expected, error=ERROR[jnp.float32])
