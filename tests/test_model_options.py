"""What single models have: noise, dropout, experts, anchors, initial values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

from flaxmix import mixers, models

from baseline_cases import ERROR, INPUTS, OUTPUTS, SIZES, C, H, M, N, inputs, module
from closeness import assert_close


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
    # Whatever the batch and the padding: for each point by its rank.
    assert_close(run(layer, x[1], None), noisy[1], error=ERROR)
    longer = jnp.concatenate([x, jnp.full((2, 4, C), jnp.nan)], 1)
    mask = jnp.broadcast_to(jnp.arange(N + 4) < N, (2, N + 4))
    padded = jax.jit(lambda m, x: m(x, mask=mask))(layer, longer)
    assert_close(padded[:, :N], noisy, error=ERROR)
    # The uniforms may be given.
    u = jax.random.uniform(key, (2, H, N, M))
    given = jax.jit(lambda m, x: m(x, gumbel_u=u))
    assert_close(given(plain, x), given(layer, x), error=0.0)

    make = lambda kind, option: jax.jit(
        lambda: models.Surrogate(
            *(INPUTS, OUTPUTS),
            **{"channels": C, "blocks": 3, "io_layers": 0},
            mixer=functools.partial(kind, **SIZES, evaluation_noise=option),
            rngs=nnx.Rngs(0),
        )
    )()
    seen = []

    class Spy(mixers.TransolverPP):
        def __call__(self, x, *, gumbel_u=None, **options):
            jax.debug.callback(lambda k: seen.append(k.tobytes()), key_data(gumbel_u))
            return super().__call__(x, gumbel_u=gumbel_u, **options)

    key_data = jax.random.key_data
    x, _ = inputs("luna")
    jax.block_until_ready(jax.jit(lambda m, x: m(x))(make(Spy, True), x))
    jax.effects_barrier()
    assert len(set(seen)) == 3
    noisy, plain = (make(mixers.TransolverPP, option) for option in (True, False))
    assert np.any(run(noisy, x, None) != run(plain, x, None))


def test_noise_of_shards_is_that_of_one_device():
    layer = module("transolverpp")
    x, mask = inputs("transolverpp")
    key = jax.random.key(3)
    run = lambda layer, x, mask, axis_name=None: layer(
        x, mask=mask, key=key, axis_name=axis_name
    )
    points = P(None, "context")
    sharded = jax.shard_map(
        functools.partial(run, axis_name="context"),
        mesh=jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,)),
        in_specs=(P(), points, points),
        out_specs=points,
    )
    actual, expected = (jax.jit(f)(layer, x, mask) for f in (sharded, run))
    assert_close(actual[mask], expected[mask], error=ERROR)


def test_noise_in_evaluation_is_no_dropout():
    make = lambda dropout: jax.jit(
        lambda: models.Surrogate(
            *(INPUTS, OUTPUTS),
            **{"channels": C, "blocks": 3, "io_layers": 0, "dropout": dropout},
            mixer=functools.partial(
                mixers.TransolverPP, **SIZES, evaluation_noise=True
            ),
            rngs=nnx.Rngs(0),
        )
    )()
    x, _ = inputs("luna")
    run = jax.jit(lambda m, x: m(x))
    assert_close(run(make(0.5), x), run(make(0.0), x), error=0.0)


@pytest.mark.parametrize(
    "name",
    [
        "backbone",
        "luna",
        pytest.param("abupt", marks=pytest.mark.slow),
        pytest.param("set_transformer", marks=pytest.mark.slow),
    ],
)
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
        pytest.param(mixers.SimplifiedFlarePP, marks=pytest.mark.slow),
        pytest.param(mixers.AblatedFlarePP, marks=pytest.mark.slow),
    ],
)
def test_attention_dropout_needs_a_key(kind):
    sizes = {"heads": H} | ({} if kind is mixers.SelfAttention else {"latents": M})
    make = lambda rate: jax.jit(
        lambda: kind(C, **sizes, attention_dropout=rate, rngs=nnx.Rngs(0))
    )()
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

    def initial(wanted, kind, *widths, **sizes):
        """The parameters with a name that ends as wanted: no other is compiled."""

        @jax.jit
        def make():
            module = kind(*widths, **sizes, rngs=nnx.Rngs(0))
            leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(module)))
            name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
            return {name(path): x for path, x in leaves if name(path).endswith(wanted)}

        found = jax.tree.map(np.asarray, make())
        assert found
        return found

    sizes = {"heads": 4, "latents": 40}
    for kind, name in (
        (mixers.Transolver, "temperature"),
        (mixers.Transolver3, "temperature"),
        (mixers.TransolverPP, "offset"),
    ):
        (actual,) = initial(name, kind, 32, **sizes).values()
        assert_close(actual, np.full(4, 0.5), error=0.0)
    (inducing,) = initial("inducing", mixers.InducedAttention, 32, **sizes).values()
    limit = np.sqrt(6 / (40 * 32 + 32))
    assert 0.99 * limit < np.abs(inducing).max() <= limit
    # A uniform deviates by limit / sqrt(3); 1,280 numbers, to 2 %.
    assert abs(inducing.std() / (limit / np.sqrt(3)) - 1) < 0.08
    ends = {"channels": 32, "blocks": 2, **sizes}
    (packed,) = initial("packed", models.Luna, 2, 1, **ends).values()
    assert abs(packed.std() * np.sqrt(32) - 1) < 0.08
    (latents,) = initial("encoder.latents", models.PerceiverIO, 2, 1, **ends).values()
    assert abs(latents.std() - 1) < 0.08
    score, query = ("score.first.kernel", "score.first.bias"), "mixer.query.kernel"
    lno = initial((*score, query), models.LNO, 2, 1, **ends)
    assert len(lno) == 3
    for name, x in lno.items():
        if name.endswith(score):
            assert 0.9 / np.sqrt(32) < np.abs(x).max() <= 1 / np.sqrt(32), name
        else:
            assert abs(x.std() * np.sqrt(3 * 32) - 1) < 0.08
    del ends["latents"]
    (placeholder,) = initial("placeholder", models.GNOT, 2, 1, **ends).values()
    assert placeholder.min() >= 0 and 0.8 / 32 < placeholder.max() < 1 / 32


def test_experts_and_grids_of_gnot():
    sizes = {"channels": C, "blocks": 1, "heads": H}
    make = lambda **options: models.GNOT(2, 1, **sizes, **options, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="experts must be at least 1, got 0"):
        make(experts=0)
    model = nnx.eval_shape(lambda: make(grid=(5, 7)))
    with pytest.raises(ValueError, match="12 points are not those of a 5 x 7 grid"):
        jax.eval_shape(lambda m, x: m(x), model, jnp.ones((12, 2)))


def test_anchor_coordinates():
    sizes = {"channels": C, "blocks": 1, "heads": H, "latents": M}
    make = lambda **options: models.ABUPT(3, 1, **sizes, **options, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"coordinates=\(0, 3\) must be some of 3"):
        nnx.eval_shape(lambda: make(coordinates=(0, 3)))
    with pytest.raises(ValueError, match=r"coordinates=\(\) must be some of 3"):
        nnx.eval_shape(lambda: make(coordinates=()))
    sizes["heads"] = 6
    with pytest.raises(ValueError, match="of 3 axes needs .* at least 6, got 4"):
        nnx.eval_shape(make)
    # A permutation names its first points.
    sizes["heads"] = H
    model, x = jax.jit(make)(), inputs("abupt")[0][..., :3]
    order = jnp.asarray(np.random.default_rng(0).permutation(N))
    run = jax.jit(lambda m, x, given: m(x, **given))
    actual = run(model, x, {"permutation": order})
    expected = run(model, x, {"anchors": order[:M]})
    assert_close(actual, expected, error=0.0)
    # Training draws others each time, evaluation the same.
    key = jax.random.key(9)
    assert np.any(run(model, x, {"key": key}) != run(model, x, {}))
