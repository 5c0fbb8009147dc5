"""Full Relation: its definition, its fast form, their gradients and properties."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxmix import ops

import relation_oracles as oracles
from closeness import assert_close
from relation_cases import DEVICES, documents, draw, over_devices, seen, whole

DATA = pathlib.Path(__file__).parent / "data"
TIGHT = 1e-11
# Sums of tens of terms, some of which cancel; below it a dozen roundings.
ERROR = {jnp.float32: 1e-5, jnp.bfloat16: 12 * 2**-8, jnp.float16: 12 * 2**-11}
B, H, D, E = 2, 3, 4, 5
LAM = 0.7
FORMS = (None, "materialized")


def inputs(tokens, dtype=jnp.float32, width=D):
    widths = width, width, E
    return tuple(
        draw(B, tokens, H, w, seed=i, dtype=dtype) for i, w in enumerate(widths)
    )


def cotangent(tokens, dtype=jnp.float32):
    return draw(B, tokens, H, E, seed=7, dtype=dtype)


@functools.partial(jax.jit, static_argnames=("transport", "implementation", "tau"))
def run(args, dy, positions=None, *, lam=LAM, **options):
    """Y, and the gradients of p1, p2, identity and lambda."""
    f = lambda *args: ops.relation(*args, positions=positions, **options)
    y, back = jax.vjp(f, *args, jnp.asarray(lam, jnp.promote_types(dy.dtype, "f4")))
    return y, back(dy)


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize(
    "name, transport", [("full", "full"), ("exchange_only", "exchange")]
)
def test_golden(name, transport, implementation):
    with jax.enable_x64(True), np.load(DATA / f"relation_{name}.npz") as file:
        arrays = {k: jnp.asarray(v) for k, v in file.items() if k != "meta"}
        args = [arrays[f"input/{k}"] for k in ("p1", "p2", "I")]
        y, grads = run(
            tuple(args),
            arrays["cotangent/Y"],
            lam=arrays["input/lam"],
            transport=transport,
            implementation=implementation,
        )
        expected = tuple(arrays[f"grad/{k}"] for k in ("p1", "p2", "I", "lam"))
        assert_close(y, arrays["output/Y"], error=TIGHT)
        assert_close(grads, expected, error=TIGHT)
        if transport == "full":
            _, log_mass = ops.exchange(*args)
            assert np.all(np.isneginf(log_mass[..., 0]))
            assert_close(log_mass[..., 1:], arrays["output/L"][..., 1:], error=TIGHT)


@pytest.mark.parametrize("layer", [0, 1])
def test_golden_givens(layer):
    file = DATA / f"relation_givens_layer{layer}.npz"
    with jax.enable_x64(True), np.load(file) as arrays:
        f = jax.jit(functools.partial(ops.givens, layer=layer))
        y, back = jax.vjp(
            f, *(jnp.asarray(arrays[f"input/{k}"]) for k in ("I", "theta"))
        )
        assert_close(y, arrays["output/Y"], error=TIGHT)
        expected = arrays["grad/I"], arrays["grad/theta"]
        assert_close(back(jnp.asarray(arrays["cotangent/Y"])), expected, error=TIGHT)
        # The index may be traced, and only its parity counts.
        x, theta = (jnp.asarray(arrays[f"input/{k}"]) for k in ("I", "theta"))
        traced = jax.jit(lambda layer: ops.givens(x, theta, layer=layer))
        assert_close(traced(jnp.int32(layer + 4)), y, error=TIGHT)
        assert_close((y**2).sum(-2), (x**2).sum(-2), error=TIGHT)


@pytest.mark.parametrize("heads, angles", [(3, 1), (4, 1)])
def test_pairs_of_heads(heads, angles):
    x, theta = jnp.ones((2, heads, 5)), jnp.zeros(angles)
    with pytest.raises(ValueError, match=f"pairs of {heads} heads .*{angles},"):
        ops.givens(x, theta, layer=0)


def compare(args, dy, positions, error, **options):
    """Both forms and the oracle."""
    own = options.get("transport") != "exchange"
    place = whole(B, dy.shape[1]) if positions is None else positions
    given = {"own": own, "tau": options.get("tau", 2.0)}
    expected = oracles.relation(*args, LAM, place, **given)
    grads = oracles.relation_vjp(*args, LAM, place, dy, **given)
    for implementation in FORMS:
        y, actual = run(args, dy, positions, implementation=implementation, **options)
        assert y.dtype == dy.dtype
        assert_close(y, expected, error=error)
        assert_close(actual[:3], grads[:3], error=error)
        # A sum over all tokens, whose terms cancel.
        largest = max(np.abs(g).max() for g in grads)
        assert abs(float(actual[3]) - grads[3]) <= error * largest


@pytest.mark.parametrize("tokens", [1, pytest.param(2, marks=pytest.mark.slow), 11])
def test_matches_oracle(tokens):
    args, dy = inputs(tokens), cotangent(tokens)
    compare(args, dy, None, ERROR[jnp.float32])
    with jax.enable_x64(True):
        args, dy = inputs(tokens, jnp.float64), cotangent(tokens, jnp.float64)
        compare(args, dy, None, TIGHT)


@pytest.mark.parametrize("options", [{"transport": "exchange"}, {"tau": 0.6}])
def test_options_match_oracle(options):
    with jax.enable_x64(True):
        args, dy = inputs(7, jnp.float64), cotangent(7, jnp.float64)
        compare(args, dy, None, TIGHT, **options)


def test_documents_match_oracle():
    with jax.enable_x64(True):
        args, dy = inputs(13, jnp.float64), cotangent(13, jnp.float64)
        compare(args, dy, documents([4, -2, 1, 6], [-3, 10]), TIGHT)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype):
    args, dy = inputs(23, dtype), cotangent(23, dtype)
    compare(args, dy, None, ERROR[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("width", [48, 60, 80])
@pytest.mark.parametrize("tokens", [63, 64, 65, 127, 257])
def test_long_matches_oracle(tokens, width):
    for dtype, error in ((jnp.float32, ERROR[jnp.float32]), (jnp.float64, TIGHT)):
        with jax.enable_x64(dtype == jnp.float64):
            args, dy = inputs(tokens, dtype, width), cotangent(tokens, dtype)
            positions = documents([tokens], [tokens // 3, tokens - tokens // 3])
            compare(args, dy, positions, error)


@pytest.mark.parametrize("tokens", [257, 600])
def test_tiles_equal_the_definition(tokens):
    args, dy = inputs(tokens), cotangent(tokens)
    positions = documents([tokens], [201, -1, tokens - 202])
    actual = run(args, dy, positions)
    expected = run(args, dy, positions, implementation="materialized")
    # Gradients are sums of hundreds of terms.
    assert_close(actual, expected, error=4 * ERROR[jnp.float32])


def test_exchange_matches_oracle():
    """Cotangents of L as well; queries that are not the last ones."""
    with jax.enable_x64(True):
        p1, p2, identity = inputs(9, jnp.float64)
        p1, start = p1[:, :6], jnp.asarray([[0, 2, 1, 0, 8, 3]] * B)
        stop = start + jnp.asarray([[4, 0, 1, 9, 1, 2], [1, 2, 3, 4, 5, 0]])
        see = (np.arange(9) >= start[..., None]) & (np.arange(9) < stop[..., None])
        dy = draw(B, 6, H, E, seed=5, dtype=jnp.float64)
        dlog = draw(B, H, 6, seed=6, dtype=jnp.float64)
        f = jax.jit(functools.partial(ops.exchange, start=start, stop=stop))
        (read, log_mass), back = jax.vjp(f, p1, p2, identity)
        expected = oracles.exchange(p1, p2, identity, see)
        empty = ~see.any(-1)
        assert empty.any() and np.isneginf(log_mass.swapaxes(0, 1)[:, empty]).all()
        keep = lambda x: np.where(empty[:, None], 0, x)
        assert_close(
            (read, keep(log_mass)), (expected[0], keep(expected[1])), error=TIGHT
        )
        grads = oracles.exchange_vjp(p1, p2, identity, see, dy, dlog)
        assert_close(back((dy, dlog)), grads, error=TIGHT)


def test_one_new_token_reads_every_cached_one():
    p1, p2, identity = inputs(5)
    read, log_mass = ops.exchange(
        p1[:, -1:], p2[:, :4], identity[:, :4], stop=jnp.full((B, 1), 4)
    )
    expected = ops.exchange(p1, p2, identity)
    assert_close(read, expected[0][:, -1:], error=ERROR[jnp.float32])
    assert_close(log_mass, expected[1][..., -1:], error=ERROR[jnp.float32])


def test_flow_sums_to_one_and_splits_into_self_and_history():
    p1, p2, _ = inputs(17)
    flow = oracles.flow(p1, p2, LAM, np.asarray(whole(B, 17)))
    np.testing.assert_allclose(flow.sum(-1), 1, rtol=1e-12)
    ones = jnp.ones((B, 17, H, E))
    y, _ = run((p1, p2, ones), ones)
    assert_close(y, ones, error=ERROR[jnp.float32])
    history, _ = run((p1, p2, ones), ones, transport="exchange")
    own = np.einsum("bhii->bih", flow)[..., None]
    assert_close(history + own, ones, error=ERROR[jnp.float32])


def test_lambda_leaves_the_conditional_allocation():
    """It moves weight between the token and its past, not within the past."""
    args, dy = inputs(17), cotangent(17)
    low, high = (
        np.asarray(run(args, dy, lam=lam, transport="exchange")[0]) for lam in (0, 3)
    )
    assert np.abs(low - high).max() > 0.1
    read, _ = ops.exchange(*args)
    some = np.abs(read).max(-1, keepdims=True) > 0
    for y in (low, high):
        gate = (y * read).sum(-1, keepdims=True) / np.where(
            some, (read * read).sum(-1, keepdims=True), 1
        )
        assert_close(y, gate * read, error=ERROR[jnp.float32])


def test_first_token_keeps_its_information():
    args, dy = inputs(6), cotangent(6)
    y, grads = run(args, dy, documents([6], [2, 4]))
    np.testing.assert_array_equal(y[:, 0], args[2][:, 0])
    np.testing.assert_array_equal(y[1, 2], args[2][1, 2])
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("t", [1, 131, 256])
def test_later_tokens_never_matter(t):
    args, dy = inputs(257), cotangent(257)
    y, _ = run(args, dy)
    changed, _ = run(tuple(x.at[:, t:].set(2.0) for x in args), dy)
    np.testing.assert_array_equal(changed[:, :t], y[:, :t])
    assert np.any(changed[:, t:] != y[:, t:])


@pytest.mark.parametrize("implementation", FORMS)
def test_padding_never_matters(implementation):
    positions = documents([-2, 3, -1, 4, -1], [11])
    dy, results = cotangent(11), []
    for fill in (0.0, 5.0, np.nan, np.inf):
        args = inputs(11)
        args = tuple(jnp.where(positions[..., None, None] > 0, x, fill) for x in args)
        results.append(run(args, dy, positions, implementation=implementation))
    for other in results:
        assert_close(other, results[0], error=0.0)
    y, (*grads, _) = results[0]
    assert not np.any(y[0, [0, 1, 5, 10]])
    assert not any(np.any(g[0, [0, 1, 5, 10]]) for g in grads)


@pytest.mark.parametrize("dtype", ERROR)
def test_large_scores_stay_finite(dtype):
    scale = 200 if dtype == jnp.float16 else 1e3
    p1, p2, identity = inputs(9, dtype)
    y, grads = run((p1 * scale, p2 * scale, identity), cotangent(9, dtype))
    expected = oracles.relation(p1 * scale, p2 * scale, identity, LAM, whole(B, 9))
    assert_close(y, expected, error=ERROR[dtype])
    # Values: the scale of the coordinates multiplies into gradients beyond float16.
    kinds = grads[2:] if dtype == jnp.float16 else grads
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in kinds)


@pytest.mark.parametrize("devices, packed", DEVICES)
def test_devices_share_the_tokens(devices, packed):
    with jax.enable_x64(True):
        args, dy = inputs(16, jnp.float64), cotangent(16, jnp.float64)
        positions = documents([5, 2, 9], [-1, 3, 12]) if packed else None
        f = over_devices(
            lambda p1, p2, i, positions, lam, axis_name: ops.relation(
                *(p1, p2, i, lam), positions=positions, axis_name=axis_name
            ),
            devices,
            tokens=16,
        )
        g = lambda *args: f(*args[:3], positions, lam=args[3])
        y, back = jax.jit(lambda *args: jax.vjp(g, *args))(*args, jnp.asarray(LAM))
        expected = run(args, dy, positions, implementation="materialized")
        assert_close((y, back(dy)), expected, error=TIGHT)


def test_a_loss_inside_the_sharded_part():
    """Its gradient is that of the whole, neither 1 / R nor R times it."""
    with jax.enable_x64(True):
        args, dy = inputs(8, jnp.float64), cotangent(8, jnp.float64)

        def local(p1, p2, i, dy, axis_name):
            y = ops.relation(p1, p2, i, LAM, axis_name=axis_name)
            return (jax.lax.psum((y * dy).sum(), axis_name),)

        f = over_devices(local, 4, tokens=8, out=(None,))
        grads = jax.jit(jax.grad(lambda *args: f(*args, dy)[0], argnums=(0, 1, 2)))
        assert_close(grads(*args), run(args, dy)[1][:3], error=TIGHT)


def collectives(devices):
    f = over_devices(
        lambda p1, p2, i, axis_name: ops.relation(p1, p2, i, LAM, axis_name=axis_name),
        devices,
        tokens=16,
    )
    step = jax.jit(lambda args, dy: jax.vjp(f, *args)[1](dy))
    return step.lower(inputs(16), cotangent(16)).as_text()


def test_tokens_travel_by_hops_alone():
    text = collectives(4)
    assert "collective_permute" in text
    for other in ("all_gather", "all_to_all", "reduce_scatter"):
        assert other not in text
    # Nobody to talk to.
    assert "collective_permute" not in collectives(1)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"transport": "self"}, "transport .* got 'self'"),
        ({"positions": jnp.ones((B, 3))}, "positions .* got float32"),
        ({"positions": jnp.ones(3, int)}, r"positions .* shape \(2, 3\)"),
        ({"tau": float("nan")}, "tau must be positive, got nan"),
        ({"tau": 0.0}, "tau must be positive, got 0.0"),
    ],
)
def test_wrong_options(options, message):
    # Without the checks of types that tests add.
    relation = ops.relation.__wrapped__
    with pytest.raises(ValueError, match=message):
        relation(*inputs(3), LAM, **options)


def test_unknown_implementation():
    with pytest.raises(ValueError, match="implementation .* got 'cudnn'"):
        ops.exchange.__wrapped__(*inputs(3), implementation="cudnn")


def test_kernels_need_their_gpu():
    with pytest.raises(NotImplementedError, match="NVIDIA GPU .* computes on 'cpu'"):
        ops.relation(*inputs(3), LAM, implementation="triton")


def test_what_forms_cannot_do():
    with pytest.raises(NotImplementedError, match="stop=.* 2 and 3"):
        p1, p2, identity = inputs(3)
        ops.exchange(p1[:, :2], p2, identity, implementation="triton")
    f = over_devices(
        lambda *args, axis_name: ops.relation(
            *args, LAM, axis_name=axis_name, implementation="materialized"
        ),
        2,
        tokens=4,
    )
    with pytest.raises(NotImplementedError, match="axis_name='context'"):
        jax.eval_shape(f, *inputs(4))


def test_the_oracle_sees_what_positions_say():
    see = seen(documents([2, -1, 2]), own=False)
    expected = np.zeros((1, 5, 5), bool)
    expected[0, 1, 0] = expected[0, 4, 3] = True
    np.testing.assert_array_equal(see, expected)
