"""The mixers and models of the comparison: each against its oracle, and what all of
them share."""

import functools
import pickle

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

from flaxmix import mixers, models

import model_oracles
from baseline_cases import (
    CASES,
    DEEP,
    ERROR,
    HALF,
    KINDS,
    MODELS,
    SIZES,
    TIGHT,
    C,
    M,
    N,
    apply,
    inputs,
    module,
    numpy_params,
    value_and_grads,
)
from closeness import assert_close


def slow_but(default, names):
    """Parameters of all names, of which those that are no default are slow."""
    slow = functools.partial(pytest.param, marks=pytest.mark.slow)
    return [name if name in default else slow(name) for name in names]


LAYERS = [name for name in KINDS if name not in MODELS]


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


# The others without a mask come with padding below.
@pytest.mark.parametrize("name", slow_but(["gnot_grid"], CASES))
def test_a_mask_of_ones_is_no_mask(name):
    with jax.enable_x64(True):
        layer = module(name, jnp.float64)
        x, mask = inputs(name, dtype=jnp.float64)
        expected = apply(layer, x, jnp.ones_like(mask))
        assert_close(apply(layer, x, None), expected, error=TIGHT)


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


# All but the one whose points are those of a grid.
@pytest.mark.parametrize("name", [name for name in KINDS if name != "gnot_grid"])
def test_padding_and_any_batch(name):
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


@pytest.mark.parametrize(
    "name", slow_but(LAYERS, [name for name in KINDS if name != "gnot_grid"])
)
def test_one_point_is_a_mesh(name):
    x, _ = inputs(name)
    assert np.isfinite(apply(module(name), x[0, :1], None)).all()


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
    placed = jax.jit(lambda layer, x, given: layer(x, mask=mask, **given))
    run = lambda layer, x, given: (
        placed(layer, x, given) if given else apply(layer, x, mask)
    )
    y = run(layer, x, given)
    assert_close(run(layer, x[:, order], moved), y[:, order], error=ERROR)
    other = run(layer, x.at[1].set(7.0), given)
    assert_close(other[0], y[0], error=0.0)
    assert np.abs(other[1] - y[1]).max() > 1e-3


@pytest.mark.slow
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


MESHES = {"context": (4,), "both": (2, 4)}


@pytest.mark.parametrize(
    "shape", ["context", pytest.param("both", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", slow_but(LAYERS, KINDS))
def test_shards_equal_one_device(name, shape):
    """Values, and gradients of every parameter and of x, in float64."""
    axes = ("data", "context")[-len(MESHES[shape]) :]
    with jax.enable_x64(True):
        layer = module(name, jnp.float64)
        x, mask = inputs(name, dtype=jnp.float64)
        # The last of four shards is all padding.
        mask = mask.at[:, 9:].set(False)

        def loss(layer, x, mask, axis_name=None):
            y = layer(x, mask=mask, axis_name=axis_name)
            total = jnp.sum(jnp.where(mask[..., None], jnp.sin(y), 0))
            return total if axis_name is None else jax.lax.psum(total, axes)

        points = P("data" if "data" in axes else None, "context")
        sharded = jax.shard_map(
            functools.partial(loss, axis_name="context"),
            mesh=jax.make_mesh(
                MESHES[shape], axes, axis_types=(AxisType.Auto,) * len(axes)
            ),
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
        f.trace(layer, scale * x)
    state = nnx.state(nnx.eval_shape(CASES[name][0]))
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert leaves and {type(leaf) for leaf in leaves} == {nnx.Param}
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}
    # A module is a plain tree, also to pickle.
    again = pickle.loads(pickle.dumps(layer))
    assert jax.tree.structure(again) == jax.tree.structure(layer)
    assert_close(jax.tree.leaves(again), jax.tree.leaves(layer), error=0.0)


# One with the shared loop over blocks, and one with its own.
@pytest.mark.parametrize("name", slow_but(["luna", "lno"], MODELS))
def test_remat_changes_nothing(name):
    layer = module(name)
    x, mask = inputs(name)
    again = module(name)
    again.remat = True
    actual, expected = value_and_grads(again, x, mask), value_and_grads(layer, x, mask)
    assert_close(actual, expected, error=ERROR)


@pytest.mark.parametrize("name", MODELS)
def test_depth_is_scanned(name):
    layer = module(name)
    x, _ = inputs(name)
    for remat in (False, True):
        layer.remat = remat
        text = str(jax.make_jaxpr(lambda m, x: m(x))(layer, x))
        assert "scan" in text and ("remat" in text) == remat


@pytest.mark.parametrize("name", slow_but(["luna", "lno", "gnot"], MODELS))
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
        nnx.eval_shape(make)
