"""The decoder language model: sizes, numbers, causality, documents, devices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit as sigmoid

from flaxmix import models
from flaxmix.parameters import named_parameters

from closeness import assert_close
from relation_cases import documents, draw, filled, over_devices

TIGHT = 1e-11
ERROR = 1e-5
V, C, T = 11, 12, 8
SIZES = {"vocabulary": V, "channels": C, "heads": 2, "hidden": 10}
# The fast form has tests of its own; this one compiles faster.
PLAIN = {"implementation": "materialized"}


def model(layout, dtype=jnp.float32, compute=None, **options):
    """A model whose parameters are all far from 0 and from each other."""
    options = {**SIZES, **options, "layout": layout, "dtype": compute}
    make = lambda: models.LanguageModel(**options, rngs=nnx.Rngs(0))
    return filled(make, dtype)


def tokens(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, shape), jnp.int32)


@jax.jit
def logits(model, tokens, positions=None):
    return model(tokens, positions=positions)


@pytest.mark.parametrize(
    "size, layout, parameters",
    [
        ("10M", "A", 10_425_216),
        ("10M", "F", 10_425_246),
        ("30M", "A", 28_322_304),
        ("30M", "F", 28_322_354),
        ("100M", "A", 102_917_760),
        ("100M", "F", 102_917_860),
        ("hybrid-30M", "LLLF", 31_967_571),
    ],
)
def test_published_sizes(size, layout, parameters):
    make = functools.partial(models.LanguageModel, layout=layout)
    abstract = nnx.eval_shape(lambda: make(**models.SIZES[size], rngs=nnx.Rngs(0)))
    shapes = named_parameters(abstract).values()
    assert sum(math.prod(p.shape) for p in shapes) == parameters


def rms_norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


@pytest.mark.parametrize(
    "layout",
    ["F3", *[pytest.param(x, marks=pytest.mark.slow) for x in ("(FA)2", "(LA)2")]],
)
def test_matches_its_layers_in_turn(layout):
    """NumPy around the mixers, each told its place in the whole depth."""
    with jax.enable_x64(True):
        module, ids = model(layout, jnp.float64, **PLAIN), tokens(2, T)
        params = {k: np.asarray(p) for k, p in named_parameters(module).items()}
        blocks, period = module.groups.blocks, len(module.groups.blocks)
        x = params["embedding"][ids]
        for i in range(period * module.repeats):
            repeat, place = divmod(i, period)
            get = lambda k, r=repeat, p=place: params[f"groups.blocks.{p}.{k}"][r]
            mixer = jax.tree.map(lambda p, r=repeat: p[r], blocks[place].mixer)
            mix = jax.jit(lambda m, y, i=i: m(y, layer=i))
            x = x + np.asarray(mix(mixer, rms_norm(x, get("mixer_norm.scale"))))
            y = rms_norm(x, get("mlp_norm.scale"))
            gate, up = y @ get("mlp.gate.kernel"), y @ get("mlp.up.kernel")
            x = x + (gate * sigmoid(gate) * up) @ get("mlp.down.kernel")
        expected = rms_norm(x, params["norm.scale"]) @ params["embedding"].T
        actual = logits(module, ids)
        assert actual.dtype == jnp.float64
        assert_close(actual, expected, error=TIGHT)


def test_depth_is_scanned():
    """The program of six layers is that of two."""

    def size(layout):
        f = lambda m, x: m(x).sum()
        module = model(layout)
        return str(jax.make_jaxpr(jax.grad(f))(module, tokens(2, T))).count("\n")

    assert size("F2") == size("F6")


@pytest.mark.parametrize(
    "layout", ["F", *[pytest.param(x, marks=pytest.mark.slow) for x in ("A", "L")]]
)
def test_documents_padding_and_later_tokens(layout):
    module, positions = model(layout), documents([5, 3], [-2, 4, -2])
    ids = tokens(2, T)
    packed = logits(module, ids, positions)
    # Packed documents are what they are alone, padded on the right.
    alone, places = jnp.zeros((2, 2, T), jnp.int32), jnp.zeros((2, 2, T), jnp.int32)
    rows = {(0, 0): (0, 0, 5), (0, 1): (0, 5, 8), (1, 0): (1, 2, 6)}
    for at, (row, a, b) in rows.items():
        alone = alone.at[at].set(jnp.roll(ids[row], -a))
        places = places.at[at].set(documents([b - a, b - a - T])[0])
    alone = [
        logits(
            module,
            *pair,
        )
        for pair in zip(alone, places, strict=True)
    ]
    for (call, at), (row, a, b) in rows.items():
        assert_close(alone[call][at, : b - a], packed[row, a:b], error=ERROR)
    # What padding holds never matters, and its logits are 0.
    changed = jnp.where(positions > 0, ids, V + 5)
    np.testing.assert_array_equal(logits(module, changed, positions), packed)
    assert not np.any(packed[1, [0, 1, 6, 7]])
    # Nor do later tokens, bit for bit.
    later = logits(module, ids.at[:, 4:].add(1) % V, positions)
    np.testing.assert_array_equal(later[:, :4], packed[:, :4])
    assert np.all(np.any(later[:, 4] != packed[:, 4], -1))


@jax.jit
def gradients(module, ids, positions=None, dy=None):
    def loss(module):
        y = module(ids, positions=positions)
        y = jnp.where((positions > 0)[..., None], y, 0)
        return jnp.sum(y * dy)

    return jax.grad(loss)(module)


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_padding_and_recomputing_leave_gradients_alone(remat):
    """Also ids that no token has, whose embedding is NaN."""
    positions, ids = documents([5, -3], [-2, 6]), tokens(2, T)
    dy = draw(2, T, V)
    expected = gradients(model("F2", **PLAIN), ids, positions, dy)
    changed = jnp.where(positions > 0, ids, -1)
    actual = gradients(model("F2", **PLAIN, remat=remat), changed, positions, dy)
    assert_close(named_parameters(actual), named_parameters(expected), error=ERROR)


def test_unknown_ids_give_nan():
    """And not silently the logits of another id."""
    for bad in (V, -1):
        y = logits(model("F", **PLAIN), tokens(2, T).at[0, 3].set(bad))
        assert np.isnan(y[0, 3:]).all() and np.isfinite(y[1]).all()


def test_half_precision():
    module = model("F2", compute=jnp.bfloat16, **PLAIN)
    ids = tokens(2, T)

    @jax.jit
    def run(module):
        features = module.features(ids)
        return features, module.logits(features)

    features, y = run(module)
    assert (features.dtype, y.dtype) == (jnp.bfloat16, jnp.float32)
    # Some twenty roundings of the residual stream.
    expected = run(model("F2", **PLAIN))[1]
    assert_close(y, expected, error=24 * 2**-8)


@pytest.mark.slow
@pytest.mark.parametrize("devices, packed", [(2, False), (4, True)])
@pytest.mark.parametrize("layout", ["A2", "F3", "L2", "(LF)2"])
def test_devices_share_the_tokens(layout, devices, packed):
    check_devices(layout, devices, packed)


def test_devices_share_the_tokens_of_relation():
    check_devices("F", 2, True)


def check_devices(layout, devices, packed):
    with jax.enable_x64(True):
        ids, dy = tokens(2, 16), draw(2, 16, V, dtype=jnp.float64)
        positions = documents([5, 2, 9], [-1, 3, 12]) if packed else None
        module = model(layout, jnp.float64)

        def sharded(module):
            f = over_devices(
                lambda ids, positions, module, axis_name: module(
                    ids, positions=positions, axis_name=axis_name
                ),
                devices,
                tokens=16,
            )
            return f(ids, positions, module=module)

        whole = lambda module: module(ids, positions=positions)

        @functools.partial(jax.jit, static_argnums=0)
        def run(f, module):
            y, back = jax.vjp(f, module)
            return y, named_parameters(back(dy)[0])

        assert_close(run(sharded, module), run(whole, module), error=TIGHT)


@pytest.mark.parametrize(
    "ids, mask, expected",
    [
        ([7, 7, 7, 2, 2, 9], None, [1, 2, 3, 1, 2, 1]),
        ([0], None, [1]),
        # The last id is the first one again, as around a ring.
        ([1, 1, 2, 1], None, [1, 2, 1, 1]),
        ([3, 3, 3, 3], [0, 1, 1, 0], [0, 1, 2, 0]),
        # Padding ends a document, whatever its id.
        ([3, 3, 3, 3, 4], [1, 0, 1, 1, 1], [1, 0, 1, 2, 1]),
        ([3, 3], [0, 0], [0, 0]),
    ],
)
def test_document_positions(ids, mask, expected):
    mask = None if mask is None else jnp.asarray([mask], bool)
    actual = models.document_positions(jnp.asarray([ids], jnp.int32), mask)
    np.testing.assert_array_equal(actual, [expected])
    assert actual.dtype == jnp.int32


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layout": "LF", "depth": 5}, "depth=5 is no multiple of the 2 .*'LF'"),
        ({"layout": "F", "depth": 0}, "depth=0"),
        ({"layout": "X"}, "'X', character 1"),
        ({"layout": "F", "vocabulary": 0}, "vocabulary must be at least 1, got 0"),
        ({"layout": "F", "hidden": 0}, "hidden=0"),
        ({"layout": "F", "heads": 3, "channels": 12}, "heads=3 of channels=12"),
        ({"layout": "A", "heads": 5}, "heads=5 must divide channels=12"),
    ],
)
def test_wrong_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        models.LanguageModel(**{**SIZES, **options}, rngs=nnx.Rngs(0))


def test_wrong_tokens():
    module = model("A")
    # Without the checks of types that tests add.
    embed = module._embed
    with pytest.raises(ValueError, match="tokens must be integers, got float32"):
        embed(jnp.ones((2, T)), None)
    with pytest.raises(ValueError, match=r"shape \(2, 7\), but tokens \(2, 8\)"):
        embed(tokens(2, T), jnp.ones((2, 7), jnp.int32))


def test_layout_is_repeated_to_the_depth():
    module = model("(LF)2", depth=8)
    assert (module.layout, module.repeats) == ("LFLFLFLF", 4)


def test_parameters_have_a_type_of_their_own():
    """A weak one would change with the first update, and compile a step anew."""
    make = lambda: models.LanguageModel(**SIZES, layout="ALF", rngs=nnx.Rngs(0))
    leaves = jax.tree.leaves(nnx.eval_shape(make))
    assert leaves and not any(leaf.weak_type for leaf in leaves)
