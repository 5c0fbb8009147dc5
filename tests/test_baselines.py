"""The mixers and models of the comparison: each against its oracle, and what all of
them share."""

import functools
import pickle

import baseline_oracles as mixer_oracles
import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import model_oracles
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

from flaxmix import mixers, models

from closeness import assert_close

# All different, so that no axis can be taken for another.
C, H, D, M, N, INPUTS, OUTPUTS = 24, 3, 8, 5, 12, 4, 2

# Of outputs after tens of sums of 24 terms; gradients besides.
TIGHT = 1e-12
ERROR = 128 * 2**-23
# A rounding to 8 or 11 bits after each of some tens of steps; models are deeper.
HALF = {jnp.bfloat16: 24 * 2**-8, jnp.float16: 24 * 2**-11}


class Packed(nnx.Module):
    """Luna's attention with a packed sequence of its own; both results in one."""

    def __init__(self, channels, *, heads, latents, rngs):
        self.mixer = mixers.LunaAttention(channels, heads=heads, rngs=rngs)
        self.packed = nnx.Param(jax.random.normal(rngs.params(), (latents, channels)))

    def __call__(self, x, *, mask=None, axis_name=None):
        p = self.packed[...].astype(x.dtype)
        p = jnp.broadcast_to(p, (*x.shape[:-2], *p.shape))
        y, packed = self.mixer(x, p, mask=mask, axis_name=axis_name)
        return y + packed.mean(-2, keepdims=True)


class Placed(nnx.Module):
    """Anchor attention with the first three channels as coordinates."""

    def __init__(self, channels, *, heads, latents, rngs):
        self.mixer = mixers.AnchorAttention(
            channels, heads=heads, latents=latents, coordinate_scale=7.0, rngs=rngs
        )

    def __call__(self, x, *, mask=None, axis_name=None, anchors=None):
        return self.mixer(
            x, coords=x[..., :3], mask=mask, axis_name=axis_name, anchors=anchors
        )


def packed_oracle(p, x, mask, module):
    packed = np.broadcast_to(p["packed"], (*x.shape[:-2], *p["packed"].shape))
    y, out = mixer_oracles.luna_attention(p["mixer"], x, packed, mask, heads=H)
    return y + out.mean(-2, keepdims=True)


def anchors_of(mixer, x, mask):
    """Anchors and which of them count, as the module draws them."""
    anchors, real = mixer.draw(x.shape[-2], mask=jnp.asarray(mask))
    anchors = np.broadcast_to(anchors, (*x.shape[:-2], anchors.shape[-1]))
    return {"anchors": anchors, "anchor_mask": None if real is None else np.array(real)}


def placed_oracle(p, x, mask, module):
    given = anchors_of(module.mixer, x, mask)
    return mixer_oracles.anchor_attention(
        p["mixer"], x, mask, heads=H, coords=x[..., :3], coordinate_scale=7.0, **given
    )


def abupt_oracle(p, x, mask, module):
    given = anchors_of(module.blocks.mixer, x, mask)
    options = {"columns": (0, 2), "coordinate_scale": 7.0, "kind": module.norm.kind}
    return model_oracles.abupt(p, x, mask, heads=H, **options, **given)


def simple(oracle, **options):
    return lambda p, x, mask, module: oracle(p, x, mask, heads=H, **options)


def gnot_oracle(p, x, mask, module):
    pos = None if module.grid is None else model_oracles.grid_distances(module.grid)
    return model_oracles.gnot(p, x, mask, heads=H, pos=pos)


def backbone_oracle(p, x, mask, module):
    mixer = functools.partial(mixer_oracles.transolver, heads=H)
    return model_oracles.surrogate(p, x, mask, mixer=mixer, kind="rms")


SIZES = {"heads": H, "latents": M}
# Three blocks: a loop of two is unrolled, and compiles longer.
DEEP = {"channels": C, "blocks": 3, "io_layers": 1, **SIZES}
ABLATIONS = {
    "ablated": {},
    "ablated_all": {
        "seed_norm": True,
        "synthesis_key_norm": "affine",
        "synthesis_value_norm": "affine",
        "reference_norm": "affine",
        "query_norm": "affine",
        "key_norm": True,
        "gate": "raw",
        "share": False,
    },
    "ablated_bare": {
        "seed_norm": False,
        "synthesis_key_norm": False,
        "synthesis_value_norm": False,
        "query_norm": True,
        "key_norm": False,
        "gate": None,
    },
}
FLAREPP = {
    "seed_norm": "affine",
    "synthesis_key_norm": True,
    "synthesis_value_norm": True,
    "reference_norm": True,
    "key_norm": "affine",
    "gate": "sigmoid",
    "share": True,
}


def mixer(kind, **options):
    return lambda: kind(C, **SIZES, **options, rngs=nnx.Rngs(0))


def model(kind, **options):
    return lambda: kind(INPUTS, OUTPUTS, **DEEP | options, rngs=nnx.Rngs(0))


def gnot(**options):
    sizes = {"channels": C, "blocks": 3, "heads": H, "experts": 3}
    return lambda: models.GNOT(INPUTS, OUTPUTS, **sizes, **options, rngs=nnx.Rngs(0))


def backbone():
    inner = functools.partial(mixers.Transolver, **SIZES)
    sizes = {"channels": C, "blocks": 3, "io_layers": 1, "norm": "rms"}
    return models.Surrogate(INPUTS, OUTPUTS, **sizes, mixer=inner, rngs=nnx.Rngs(0))


CASES = {
    "transolver": (mixer(mixers.Transolver), simple(mixer_oracles.transolver)),
    "transolver_free": (
        mixer(mixers.Transolver, clamp=False),
        simple(mixer_oracles.transolver, clamp=False),
    ),
    "transolver3": (mixer(mixers.Transolver3), simple(mixer_oracles.transolver3)),
    "transolverpp": (mixer(mixers.TransolverPP), simple(mixer_oracles.transolverpp)),
    "luna_attention": (mixer(Packed), packed_oracle),
    "anchors": (mixer(Placed), placed_oracle),
    "induced": (
        mixer(mixers.InducedAttention),
        simple(mixer_oracles.induced_attention),
    ),
    **{
        name: (
            mixer(mixers.AblatedFlarePP, **options),
            simple(mixer_oracles.ablated_flarepp, **FLAREPP | options),
        )
        for name, options in ABLATIONS.items()
    },
    "ablated_rms": (
        mixer(mixers.AblatedFlarePP, norm="rms"),
        simple(mixer_oracles.ablated_flarepp, **FLAREPP, kind="rms"),
    ),
    "backbone": (backbone, backbone_oracle),
    "luna": (model(models.Luna), simple(model_oracles.luna)),
    "abupt": (
        model(models.ABUPT, coordinates=(0, 2), coordinate_scale=7.0),
        abupt_oracle,
    ),
    "set_transformer": (
        model(models.SetTransformer, norm="rms"),
        simple(model_oracles.set_transformer, kind="rms"),
    ),
    "perceiver_io": (
        model(models.PerceiverIO),
        simple(model_oracles.perceiver_io),
    ),
    "lno": (model(models.LNO), simple(model_oracles.lno)),
    "gnot": (gnot(), gnot_oracle),
    "gnot_grid": (gnot(grid=(3, 4)), gnot_oracle),
}
# One of each kind, for what does not depend on options.
KINDS = [
    name
    for name in CASES
    if name not in ("transolver_free", "ablated_all", "ablated_bare", "ablated_rms")
]
MODELS = KINDS[KINDS.index("backbone") :]


def features(name):
    return INPUTS if name in MODELS else C


@functools.cache
def randomized(name):
    """A module none of whose parameters is at a special value, in NumPy."""
    graph, params = nnx.split(jax.jit(CASES[name][0])(), nnx.Param)
    rng = np.random.default_rng(0)

    def shift(path, x):
        # Temperatures stay well above 0, where scores would have no bound.
        part = 0.02 if path[-2].key in ("temperature", "offset") else 0.2
        x = np.asarray(x) + part * rng.normal(size=x.shape)
        return x.astype(np.float32)

    return graph, jax.tree.map_with_path(shift, params)


def module(name, dtype=jnp.float32):
    graph, params = randomized(name)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(x, dtype), params))


def numpy_params(name):
    _, params = randomized(name)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))


def inputs(name, batch=(2,), *, n=N, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*batch, n, features(name))).astype(np.float32)
    mask = rng.random((*batch, n)) < 0.7
    mask[..., :2] = True
    return jnp.asarray(x, dtype), jnp.asarray(mask)


@jax.jit
def apply(module, x, mask):
    return module(x, mask=mask)


@jax.jit
def value_and_grads(module, x, mask):
    """Outputs, and gradients of a loss on the real points, in one vector."""
    y, back = jax.vjp(lambda module, x: module(x, mask=mask), module, x)
    dmodule, dx = back(jnp.where(mask[..., None], jnp.cos(y), 0))
    # Some gradients are zero by analysis: all are compared with the largest.
    return y, jax.flatten_util.ravel_pytree(dmodule)[0], dx


@pytest.mark.parametrize("name", CASES)
def test_matches_formula(name):
    with jax.enable_x64(True):
        layer = module(name, jnp.float64)
        x, mask = inputs(name, dtype=jnp.float64)
        y = apply(layer, x, mask)
        assert y.dtype == jnp.float64
        oracle, p = CASES[name][1], numpy_params(name)
        real = np.asarray(mask)
        expected = oracle(p, np.asarray(x), real, layer)
        assert_close(y[mask], expected[real], error=TIGHT)
        # And a mask of ones is no mask.
        whole = np.ones_like(real)
        expected = apply(layer, x, jnp.asarray(whole))
        assert_close(jax.jit(lambda m, x: m(x))(layer, x), expected, error=TIGHT)


@pytest.mark.parametrize("name", KINDS)
def test_masked_points_never_matter(name):
    layer = module(name)
    x, mask = inputs(name)

    def result(fill, mask):
        y, grads, dx = value_and_grads(layer, jnp.where(mask[..., None], x, fill), mask)
        return y[mask], grads, dx

    # The second time, an item is all padding.
    for real in (mask, mask.at[1].set(False)):
        expected = result(0.0, real)
        assert np.any(expected[1]) and not np.any(expected[2][~real])
        for fill in (1.0, np.nan, np.inf):
            assert_close(result(fill, real), expected, error=0.0)


@pytest.mark.parametrize("name", KINDS)
def test_padding_and_any_batch(name):
    if name == "gnot_grid":
        pytest.skip("its points are those of a grid")
    layer = module(name)
    x, mask = inputs(name, (2, 3))
    y = apply(layer, x, mask)
    single = apply(layer, x[1, 2], mask[1, 2])
    assert_close(y[1, 2], single, error=ERROR)
    # Real points first, then none at all after them.
    order = np.argsort(~np.asarray(mask[0, 0]), kind="stable")
    count = int(mask[0, 0].sum())
    cut = x[0, 0, order[:count]]
    expected = apply(layer, cut, None)
    assert expected.shape == (count, y.shape[-1])
    longer = jnp.concatenate([cut, jnp.full((N - count, cut.shape[-1]), jnp.nan)])
    actual = apply(layer, longer, jnp.arange(N) < count)
    assert_close(actual[:count], expected, error=ERROR)
    # One point is a mesh, too.
    assert np.isfinite(apply(layer, x[0, 0, :1], None)).all()


@pytest.mark.parametrize("name", KINDS)
def test_points_are_a_set_and_items_are_alone(name):
    layer = module(name)
    x, _ = inputs(name)
    mask = jnp.ones(x.shape[:-1], bool)
    order = np.random.default_rng(1).permutation(N)
    given, moved = {}, {}
    if name in ("anchors", "abupt"):
        given = {"anchors": jnp.asarray([7, 0, 11, 4, 3])}
        moved = {"anchors": jnp.asarray(np.argsort(order)[given["anchors"]])}
    if name == "gnot_grid":
        pos = jnp.asarray(model_oracles.grid_distances((3, 4)), jnp.float32)
        given, moved = {"pos": pos}, {"pos": pos[order]}
    run = jax.jit(lambda layer, x, given: layer(x, mask=mask, **given))
    y = run(layer, x, given)
    assert_close(run(layer, x[:, order], moved), y[:, order], error=ERROR)
    other = run(layer, x.at[1].set(7.0), given)
    assert_close(other[0], y[0], error=0.0)
    assert np.abs(other[1] - y[1]).max() > 1e-3


@pytest.mark.parametrize("name", KINDS)
def test_keeps_the_dtype(name):
    layer = module(name)
    x, mask = inputs(name)
    # The values that half precision can hold.
    x = x.astype(jnp.bfloat16).astype(jnp.float32)
    expected = apply(layer, x, mask)
    for dtype, error in HALF.items():
        y = apply(layer, x.astype(dtype), mask)
        assert y.dtype == dtype
        assert_close(y, expected, error=error)


@pytest.mark.parametrize("name", KINDS)
def test_large_inputs_stay_finite(name):
    layer = module(name)
    x, mask = inputs(name)
    chex.assert_tree_all_finite(value_and_grads(layer, 1e4 * x, mask))


@pytest.mark.parametrize("name", KINDS)
def test_shards_equal_one_device(name):
    """Values, and gradients of every parameter and of x, in float64."""
    with jax.enable_x64(True):
        layer = module(name, jnp.float64)
        x, mask = inputs(name, dtype=jnp.float64)
        # The last of four shards is all padding.
        mask = mask.at[:, 9:].set(False)

        def loss(layer, x, mask, axis_name=None):
            y = layer(x, mask=mask, axis_name=axis_name)
            total = jnp.sum(jnp.where(mask[..., None], jnp.sin(y), 0))
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
            value, (dlayer, dx) = f(layer, x, mask)
            return value, jax.flatten_util.ravel_pytree(dlayer)[0], dx

        assert_close(run(sharded), run(loss), error=TIGHT)


@pytest.mark.parametrize("name", KINDS)
def test_one_trace_a_shape_and_only_parameters(name):
    chex.clear_trace_counter()
    layer = module(name)
    f = jax.jit(chex.assert_max_traces(lambda layer, x: layer(x), n=1))
    x, _ = inputs(name)
    for scale in (1, 2, 3):
        f(layer, scale * x)
    state = nnx.state(nnx.eval_shape(CASES[name][0]))
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert leaves and {type(leaf) for leaf in leaves} == {nnx.Param}
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}
    # A module is a plain tree, also to pickle.
    again = pickle.loads(pickle.dumps(layer))
    assert jax.tree.structure(again) == jax.tree.structure(layer)
    assert_close(jax.tree.leaves(again), jax.tree.leaves(layer), error=0.0)


@pytest.mark.parametrize("name", MODELS)
def test_remat_changes_nothing_and_depth_is_scanned(name):
    layer = module(name)
    x, mask = inputs(name)
    again = module(name)
    again.remat = True
    actual, expected = value_and_grads(again, x, mask), value_and_grads(layer, x, mask)
    assert_close(actual, expected, error=ERROR)
    text = str(jax.make_jaxpr(lambda m, x: m(x))(again, x))
    assert "remat" in text and "scan" in text


@pytest.mark.parametrize("name", MODELS)
def test_blocks_compute_in_the_given_dtype(name):
    layer = module(name)
    x, mask = inputs(name)
    low = module(name)
    low.dtype = jnp.dtype(jnp.bfloat16)
    y, expected = apply(low, x, mask), apply(layer, x, mask)
    assert y.dtype == jnp.float32 and np.any(y != expected)
    assert_close(y, expected, error=HALF[jnp.bfloat16])
    closed = jax.make_jaxpr(lambda m, x: m(x))(low, x)
    scans = [e for e in closed.jaxpr.eqns if e.primitive.name == "scan"]
    # Loops over blocks of points are no scans: they carry integers, too.
    carried = [{v.aval.dtype for v in e.outvars} for e in scans]
    assert {jnp.dtype(jnp.bfloat16)} in carried


@pytest.mark.parametrize("heads", [5, 0])
@pytest.mark.parametrize("name", KINDS)
def test_heads_must_divide_channels(name, heads, monkeypatch):
    monkeypatch.setitem(SIZES, "heads", heads)
    monkeypatch.setitem(DEEP, "heads", heads)
    make = CASES[name][0]
    if name.startswith("gnot"):
        make = lambda: models.GNOT(
            2, 1, channels=C, blocks=1, heads=heads, rngs=nnx.Rngs(0)
        )
    if name == "backbone":
        inner = functools.partial(mixers.Transolver3, heads=heads, latents=M)
        make = lambda: models.Surrogate(
            2, 1, channels=C, blocks=1, mixer=inner, rngs=nnx.Rngs(0)
        )
    with pytest.raises(ValueError, match=f"heads={heads} must divide channels={C}"):
        make()


def test_a_module_sums_itself_up():
    text = nnx.tabulate(module("luna"), inputs("luna")[0], depth=1)
    for part in ("LunaBlock", "packed", "Total Parameters"):
        assert part in text


def test_noise_in_evaluation():
    """None by default; with the option the same every time, another in each block."""
    x, _ = inputs("transolverpp")
    plain, layer = module("transolverpp"), module("transolverpp")
    layer.evaluation_noise = True
    run = jax.jit(lambda m, x, key: m(x, key=key))
    y = run(plain, x, None)
    assert_close(run(plain, x, None), y, error=0.0)
    noisy = run(layer, x, None)
    assert_close(run(layer, x, None), noisy, error=0.0)
    assert np.abs(noisy - y).max() > 1e-3
    key = jax.random.key(5)
    assert np.abs(run(plain, x, key) - run(layer, x, None)).max() > 1e-3
    assert_close(run(plain, x, key), run(layer, x, key), error=0.0)
    # The uniforms may be given.
    u = jax.random.uniform(key, (2, H, N, M))
    given = jax.jit(lambda m, x: m(x, gumbel_u=u))
    assert_close(given(plain, x), given(layer, x), error=0.0)

    make = lambda option: models.Surrogate(
        *(INPUTS, OUTPUTS),
        **{"channels": C, "blocks": 3, "io_layers": 0},
        mixer=functools.partial(mixers.TransolverPP, **SIZES, evaluation_noise=option),
        rngs=nnx.Rngs(0),
    )
    seen = []

    class Spy(mixers.TransolverPP):
        def __call__(self, x, *, key=None, **options):
            jax.debug.callback(lambda k: seen.append(k.tobytes()), key_data(key))
            return super().__call__(x, key=key, **options)

    key_data = jax.random.key_data
    spy = models.Surrogate(
        *(INPUTS, OUTPUTS),
        **{"channels": C, "blocks": 3, "io_layers": 0},
        mixer=functools.partial(Spy, **SIZES, evaluation_noise=True),
        rngs=nnx.Rngs(0),
    )
    x, _ = inputs("luna")
    jax.block_until_ready(jax.jit(lambda m, x: m(x))(spy, x))
    jax.effects_barrier()
    assert len(set(seen)) == 3
    assert np.any(run(make(True), x, None) != run(make(False), x, None))


@pytest.mark.parametrize("name", ["backbone", "luna", "abupt", "set_transformer"])
def test_dropout_of_blocks_needs_a_key(name):
    layer = module(name)
    x, _ = inputs(name)
    run = jax.jit(lambda m, x, key: m(x, key=key))
    # The anchors of AB-UPT are drawn by the key, too: all points, then.
    if name == "abupt":
        layer.blocks.mixer.latents = N
    keys = [None, jax.random.key(0), jax.random.key(1)]
    plain = [run(layer, x, key) for key in keys]
    assert_close(plain[1], plain[0], error=ERROR)
    layer.blocks.dropout = 0.3
    none, first, second = (run(layer, x, key) for key in keys)
    assert_close(none, plain[0], error=0.0)
    assert np.any(first != none) and np.any(first != second)
    assert_close(run(layer, x, keys[1]), first, error=0.0)


@pytest.mark.parametrize(
    "kind",
    [
        mixers.SelfAttention,
        mixers.Flare,
        mixers.FlarePP,
        mixers.SimplifiedFlarePP,
        mixers.AblatedFlarePP,
    ],
)
def test_attention_dropout_needs_a_key(kind):
    sizes = {"heads": H} | ({} if kind is mixers.SelfAttention else {"latents": M})
    make = lambda rate: kind(C, **sizes, attention_dropout=rate, rngs=nnx.Rngs(0))
    x = inputs("transolver")[0]
    run = jax.jit(lambda m, x, key: m(x, key=key))
    key = jax.random.key(0)
    plain, layer = make(0.0), make(0.5)
    assert_close(run(plain, x, key), run(plain, x, None), error=0.0)
    assert_close(run(layer, x, None), run(plain, x, None), error=0.0)
    y = run(layer, x, key)
    assert np.any(y != run(plain, x, None))
    assert_close(run(layer, x, key), y, error=0.0)
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\), got 1.0"):
        make(1.0)


def test_initial_values():
    """Of what is no plain weight; at sizes where a deviation shows."""
    flat = lambda module: {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x)
        for path, x in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(module)))
    }
    sizes = {"heads": 4, "latents": 40, "rngs": nnx.Rngs(0)}
    for kind, name in (
        (mixers.Transolver, "temperature"),
        (mixers.Transolver3, "temperature"),
        (mixers.TransolverPP, "offset"),
    ):
        assert_close(flat(kind(32, **sizes))[name], np.full(4, 0.5), error=0.0)
    inducing = flat(mixers.InducedAttention(32, **sizes))["inducing"]
    limit = np.sqrt(6 / (40 * 32 + 32))
    assert 0.99 * limit < np.abs(inducing).max() <= limit
    # A uniform deviates by limit / sqrt(3); 1,280 numbers, to 2 %.
    assert abs(inducing.std() / (limit / np.sqrt(3)) - 1) < 0.08
    ends = {"channels": 32, "blocks": 2, **sizes}
    packed = flat(models.Luna(2, 1, **ends))["packed"]
    assert abs(packed.std() * np.sqrt(32) - 1) < 0.08
    latents = flat(models.PerceiverIO(2, 1, **ends))["encoder.latents"]
    assert abs(latents.std() - 1) < 0.08
    for name, x in flat(models.LNO(2, 1, **ends)).items():
        if name.endswith(("score.first.kernel", "score.first.bias")):
            assert 0.9 / np.sqrt(32) < np.abs(x).max() <= 1 / np.sqrt(32), name
        if name.endswith("mixer.query.kernel"):
            assert abs(x.std() * np.sqrt(3 * 32) - 1) < 0.08
    del ends["latents"]
    placeholder = flat(models.GNOT(2, 1, **ends))["placeholder"]
    assert placeholder.min() >= 0 and 0.8 / 32 < placeholder.max() < 1 / 32


def test_experts_and_grids_of_gnot():
    sizes = {"channels": C, "blocks": 1, "heads": H, "rngs": nnx.Rngs(0)}
    with pytest.raises(ValueError, match="experts must be at least 1, got 0"):
        models.GNOT(2, 1, **sizes, experts=0)
    model = models.GNOT(2, 1, **sizes, grid=(5, 7))
    with pytest.raises(ValueError, match="12 points are not those of a 5 x 7 grid"):
        model(jnp.ones((12, 2)))


def test_anchor_coordinates():
    sizes = {"channels": C, "blocks": 1, "heads": H, "latents": M}
    make = lambda **options: models.ABUPT(3, 1, **sizes, **options, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"coordinates=\(0, 3\) must be some of 3"):
        make(coordinates=(0, 3))
    with pytest.raises(ValueError, match=r"coordinates=\(\) must be some of 3"):
        make(coordinates=())
    sizes["heads"] = 6
    with pytest.raises(ValueError, match="of 3 axes needs .* at least 6, got 4"):
        make()
    # A permutation names its first points.
    sizes["heads"] = H
    model, x = make(), inputs("abupt")[0][..., :3]
    order = jnp.asarray(np.random.default_rng(0).permutation(N))
    run = jax.jit(lambda m, x, given: m(x, **given))
    actual = run(model, x, {"permutation": order})
    expected = run(model, x, {"anchors": order[:M]})
    assert_close(actual, expected, error=0.0)
    # Training draws others each time, evaluation the same.
    key = jax.random.key(9)
    assert np.any(run(model, x, {"key": key}) != run(model, x, {}))
