"""Linear Relation against loops, the paper's numbers, and itself in pieces."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from flaxmix.ops import linear_relation

from closeness import assert_close
from relation_cases import documents, draw, over_devices

# Sums of a few hundred terms in another order. Below float32, roundings of operands,
# scores and results, of the largest value.
ERROR = {
    jnp.float64: 1e-11,
    jnp.float32: 1e-5,
    jnp.bfloat16: 4 * 2**-8,
    jnp.float16: 4 * 2**-11,
}
B, T, H, D, E = 2, 37, 3, 5, 4
POSITIONS = documents([-2, 11, 1, 20, -3], [-1, 17, -5, 14])


def oracle(p1, p2, identity, log_retention, state, positions, dy, dstate, tau=2.0):
    """Y, the last state, and all gradients of sum(dy Y) + sum(dstate state)."""
    wide = lambda x: np.asarray(x, np.float64)
    arrays = p1, p2, identity, log_retention, state, dy, dstate
    p1, p2, identity, g, state, dy, dstate = map(wide, arrays)
    y, end = np.zeros_like(identity), np.zeros_like(state)
    grads = [np.zeros_like(x) for x in (p1, p2, identity, g, state)]
    tokens, width = p1.shape[1], p1.shape[-1]
    unit = lambda x: x / np.linalg.norm(x) if np.any(x) else x

    def turn(x, dx):
        """Derivative of `unit`."""
        u = unit(x)
        return (dx - u * (u @ dx)) / np.linalg.norm(x) if np.any(x) else 0 * x

    for b, h in np.ndindex(p1.shape[0], p1.shape[2]):
        c, kept = state[b, h], {}
        for t in range(tokens):
            place = None if positions is None else int(positions[b, t])
            if place == 0:
                continue
            at = b, t, h
            s = 0.5 + 0.5 * np.tanh(p1[at] @ p2[at] / (2 * tau * width**0.5))
            alpha = np.exp(g[at]) if place != 1 else np.zeros(width)
            old = alpha[:, None] * c
            kept[t] = s, alpha, old
            y[at] = identity[at] + s * old.T @ unit(p1[at])
            c = old + s * np.outer(unit(p2[at]), identity[at])
        end[b, h], dc = c, dstate[b, h]
        for t, (s, alpha, old) in reversed(kept.items()):
            at = b, t, h
            first, second = unit(p1[at]), unit(p2[at])
            dq, dk = old @ dy[at], dc @ identity[at]
            grads[2][at] = dy[at] + s * dc.T @ second
            dc = dc + s * np.outer(first, dy[at])
            grads[3][at] = (dc * old).sum(1)
            du = (dq @ first + dk @ second) * s * (1 - s) / (tau * width**0.5)
            grads[0][at] = turn(p1[at], s * dq) + du * p2[at]
            grads[1][at] = turn(p2[at], s * dk) + du * p1[at]
            dc = alpha[:, None] * dc
        grads[4][b, h] = dc
    return (y, end), tuple(grads)


def inputs(tokens=T, dtype=jnp.float32, batch=(B,)):
    """p1, p2, identity, log retention, state; cotangents of Y and of the state."""
    wide = jnp.promote_types(dtype, jnp.float32)
    new = lambda seed, width: draw(*batch, tokens, H, width, seed=seed, dtype=dtype)
    state, dstate = (draw(*batch, H, D, E, seed=i, dtype=wide) for i in (4, 6))
    retention = -jnp.exp(draw(*batch, tokens, H, D, seed=3, dtype=wide) * 2 - 2)
    arrays = new(0, D), new(1, D), new(2, E), retention, state
    return arrays, (new(5, E), dstate)


def run(arrays, positions, cotangents, **options):
    """Results and gradients."""
    f = lambda *xs: linear_relation(
        *xs[:4], state=xs[4], positions=positions, **options
    )
    result, back = jax.vjp(f, *arrays)
    return result, back(cotangents)


@functools.cache
def program(chunk=16, **options):
    return jax.jit(functools.partial(run, chunk=chunk, **options))


def check(step, arrays, positions, cotangents, error, **options):
    actual = step(arrays, positions, cotangents)
    expected = oracle(*arrays, positions, *cotangents, **options)
    assert_close(actual, expected, error=error)
    dtypes = [x.dtype for x in jax.tree.leaves(actual)]
    accumulated = jnp.promote_types(arrays[0].dtype, jnp.float32)
    assert dtypes == [arrays[2].dtype, accumulated, *[x.dtype for x in arrays]]


@pytest.mark.parametrize("implementation", ["chunked", "scan"])
@pytest.mark.parametrize("name", ["linear", "linear_initial_state"])
def test_reference(name, implementation):
    data = np.load(Path(__file__).parent / "data" / f"relation_{name}.npz")
    with jax.enable_x64(True):
        arrays = [jnp.asarray(data[f"input/{n}"]) for n in ("p1", "p2", "I")]
        alpha = jnp.asarray(data["input/alpha"])
        names, state = ["p1", "p2", "I", "alpha"], None
        if "input/C0" in data:
            names, state = [*names, "C0"], jnp.asarray(data["input/C0"])

        def f(p1, p2, identity, alpha, state):
            return linear_relation(
                *(p1, p2, identity, jnp.log(alpha)),
                state=state,
                implementation=implementation,
            )

        @jax.jit
        def step(*args):
            result, back = jax.vjp(f, *args)
            return result, back(
                tuple(jnp.asarray(data[f"cotangent/{n}"]) for n in "YC")
            )

        result, grads = step(*arrays, alpha, state)
        error = ERROR[jnp.float64]
        assert_close(result, tuple(data[f"output/{n}"] for n in "YC"), error=error)
        expected = tuple(data[f"grad/{n}"] for n in names)
        assert_close(grads[: len(names)], expected, error=error)


LENGTHS = [(1, None, True), (3, 1, False), (65, 64, True)]
MORE = [
    *((n, 64, start) for n in (63, 64, 127) for start in (False, True)),
    *((781, c, True) for c in (1, 16, 64, 128)),
    *((65, c, False) for c in (1, 2, 4, 8, 16, 32, 64, 128)),
]


@pytest.mark.parametrize(
    "tokens, chunk, documented",
    [*LENGTHS, *(pytest.param(*x, marks=pytest.mark.slow) for x in MORE)],
)
def test_every_length(tokens, chunk, documented):
    """Values and gradients, with documents that begin anywhere, or none."""
    with jax.enable_x64(True):
        arrays, cotangents = inputs(tokens, jnp.float64)
        positions = None
        if documented:
            row = np.arange(tokens) % 29
            positions = jnp.asarray(np.stack([row + 1, np.maximum(row - 7, 0)]))
        step = program(chunk)
        check(step, arrays, positions, cotangents, ERROR[jnp.float64])


@pytest.mark.parametrize(
    "dtype",
    [jnp.float32, jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)],
)
def test_precision(dtype):
    arrays, cotangents = inputs(dtype=dtype)
    check(program(), arrays, POSITIONS, cotangents, ERROR[dtype])


def test_the_recurrence():
    with jax.enable_x64(True):
        arrays, cotangents = inputs(dtype=jnp.float64)
        step = program(implementation="scan", tau=0.7)
        check(step, arrays, POSITIONS, cotangents, ERROR[jnp.float64], tau=0.7)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_retention_from_nothing_to_everything(dtype):
    """0, near 0 and 1, exactly and mixed: no digit is lost, nothing is NaN."""
    with jax.enable_x64(dtype == jnp.float64):
        arrays, cotangents = inputs(dtype=dtype)
        wide = arrays[3].dtype
        mixed = np.random.default_rng(0).choice([0, 1e-12, 0.5, 1], arrays[3].shape)
        with np.errstate(divide="ignore"):
            mixed = jnp.asarray(np.log(mixed), wide)
        for log_retention in (
            mixed,
            jnp.full_like(mixed, -jnp.inf),
            jnp.full_like(mixed, np.log(1e-12)),
            jnp.full_like(mixed, -1e-7),
            jnp.zeros_like(mixed),
            mixed.at[:, 5].set(-jnp.inf).at[:, 6].set(-1e30),
        ):
            some = *arrays[:3], log_retention, arrays[4]
            check(program(), some, POSITIONS, cotangents, ERROR[dtype])


def test_strong_decay_costs_no_digits():
    """Sums of logarithms reach 553 in a chunk whose last tokens retain a half."""
    arrays, cotangents = inputs()
    log_retention = jnp.full_like(arrays[3], np.log(1e-12)).at[:, 20:].set(np.log(0.5))
    some = *arrays[:3], log_retention, arrays[4]
    check(program(), some, None, cotangents, 2e-6)


def test_pieces_carry_the_state():
    """Two runs, the second from the state of the first, equal one."""
    with jax.enable_x64(True):
        arrays, cotangents = inputs(dtype=jnp.float64)

        @functools.partial(jax.jit, static_argnums=2)
        def pieces(arrays, cotangents, cut):
            def f(*arrays):
                *tokens, state = arrays
                first, state = linear_relation(
                    *(x[:, :cut] for x in tokens),
                    state=state,
                    positions=POSITIONS[:, :cut],
                    chunk=4,
                )
                second, state = linear_relation(
                    *(x[:, cut:] for x in tokens),
                    state=state,
                    positions=POSITIONS[:, cut:],
                    chunk=4,
                )
                return jnp.concatenate([first, second], 1), state

            result, back = jax.vjp(f, *arrays)
            return result, back(cotangents)

        expected = program()(arrays, POSITIONS, cotangents)
        actual = pieces(arrays, cotangents, 20)
        assert_close(actual, expected, error=ERROR[jnp.float64])


def test_documents_are_apart():
    arrays, cotangents = inputs()
    f = jax.jit(functools.partial(linear_relation, chunk=4))
    y, end = f(*arrays[:4], state=arrays[4], positions=POSITIONS)
    for b, i, n in [(0, 13, 1), (0, 14, 20), (1, 23, 14)]:
        one = [x[b : b + 1, i : i + n] for x in arrays[:4]]
        alone, last = f(*one)
        assert_close(y[b : b + 1, i : i + n], alone, error=ERROR[jnp.float32])
        if i + n > 30:
            assert_close(end[b : b + 1], last, error=ERROR[jnp.float32])


def test_later_tokens_never_matter():
    """Not a bit of what came before, whichever token changes."""
    arrays, cotangents = inputs()
    y = program()(arrays, None, cotangents)[0][0]
    for t in range(0, T, 3):
        other = [x.at[:, t].add(1.0) for x in arrays[:3]]
        other = *other, arrays[3].at[:, t].multiply(0.5), arrays[4]
        changed = program()(other, None, cotangents)[0][0]
        assert np.array_equal(y[:, :t], changed[:, :t])
        assert np.all(np.any(y[:, t] != changed[:, t], -1))


@pytest.mark.parametrize("implementation", ["chunked", "scan"])
def test_padding_never_matters(implementation):
    arrays, cotangents = inputs()
    step = program(implementation=implementation)
    real = np.asarray(POSITIONS > 0)[..., None, None]
    hide = lambda x, fill: jnp.where(real, x, fill)
    results = []
    for fill in (0.0, 1.0, np.nan, np.inf, -np.inf):
        some = [hide(x, fill) for x in arrays[:4]]
        dy = hide(cotangents[0], 1.0)
        results.append(step((*some, arrays[4]), POSITIONS, (dy, cotangents[1])))
    for other in results[1:]:
        assert_close(other, results[0], error=0.0)
    (y, _), grads = results[0]
    for x in (y, *grads[:4]):
        assert not np.any(np.where(real, 0, x))


def test_an_item_of_padding_keeps_its_state():
    arrays, (dy, dstate) = inputs()
    positions = POSITIONS.at[1].set(0)
    (y, end), grads = program()(arrays, positions, (dy, dstate))
    assert not np.any(y[1]) and not any(np.any(g[1]) for g in grads[:4])
    assert np.array_equal(end[1], arrays[4][1])
    assert np.array_equal(grads[4][1], dstate[1])


def test_coordinates_of_zeros():
    arrays, cotangents = inputs()
    p1, p2, *others = arrays
    p1, p2 = p1.at[:, 3:9].set(0), p2.at[:, 7:12].set(0).at[:, 20].multiply(1e-15)
    check(program(), (p1, p2, *others), POSITIONS, cotangents, ERROR[jnp.float32])


def test_large_coordinates_stay_finite():
    (p1, p2, *others), cotangents = inputs()
    arrays = 1e4 * p1, 1e4 * p2, *others
    check(program(), arrays, None, cotangents, ERROR[jnp.float32])


def test_states_outgrow_half_precision():
    (p1, p2, identity, g, state), cotangents = inputs(5, jnp.float16)
    arrays = p1, p2, identity, g.at[:, 0].set(np.log(1e-6)), 1e6 * state
    check(program(2), arrays, None, cotangents, ERROR[jnp.float16])


@pytest.mark.slow
def test_many_equal_tokens_in_half_precision():
    """Their state does not fit into float16, what the last one retains of it does."""
    n = 70_001
    ones = jnp.ones((1, n, 1, 4), jnp.float16)
    log_retention = jnp.zeros((1, n, 1, 4)).at[:, -1].set(np.log(1e-3))
    f = lambda x, g: linear_relation(8 * x, 8 * x, 4 * x, g)
    dy, dstate = jnp.zeros_like(ones).at[:, -1].set(1), jnp.zeros((1, 1, 4, 4))
    (y, state), back = jax.jit(functools.partial(jax.vjp, f))(ones, log_retention)
    # Each writes 1/2 * 4 in every entry; the last one retains a thousandth.
    assert_close(state, jnp.full_like(state, 70_000 * 2e-3 + 2), error=1e-4)
    assert_close(y[:, -1], jnp.full((1, 1, 4), 4 + 70_000 * 2e-3 * 2.0), error=1e-3)
    assert all(np.all(np.isfinite(g)) for g in back((dy, dstate)))


@pytest.mark.parametrize("batch", [(), (2, 1, 2)])
def test_any_batch(batch):
    arrays, _ = inputs(11, batch=batch)
    rows = int(np.prod(batch))
    merge = lambda x: x.reshape(rows, *x.shape[len(batch) :])
    positions = jnp.broadcast_to(documents([4, 7])[0], (*batch, 11))
    f = jax.jit(functools.partial(linear_relation, chunk=2))
    y, end = f(*arrays[:4], state=arrays[4], positions=positions)
    assert y.shape == (*batch, 11, H, E) and end.shape == (*batch, H, D, E)
    one = f(*map(merge, arrays[:4]), state=merge(arrays[4]), positions=merge(positions))
    assert_close((merge(y), merge(end)), one, error=ERROR[jnp.float32])


def test_no_state_is_zeros():
    arrays, _ = inputs()
    f = jax.jit(functools.partial(linear_relation, chunk=2))
    expected = f(*arrays[:4], state=jnp.zeros_like(arrays[4]))
    assert_close(f(*arrays[:4]), expected, error=0.0)


def test_cost_of_long_sequences():
    """The program does not grow with T, nor what is kept but by a state a group."""
    lines = set()
    for n in (1024, 4096):
        arrays, cotangents = jax.eval_shape(lambda n=n: inputs(n))
        step = functools.partial(run, positions=None, chunk=64)
        jaxpr = jax.make_jaxpr(step)(arrays, cotangents=cotangents)
        lines.add(str(jaxpr).count(" = "))
        f = lambda *xs: jax.vjp(lambda *xs: linear_relation(*xs, chunk=64), *xs)[1]
        kept = jax.tree.leaves(jax.eval_shape(f, *arrays[:4]))
        sizes = sorted(x.size for x in kept)
        # The four arrays, and states.
        assert sum(sizes) <= sum(x.size for x in arrays[:4]) + n // 128 * B * H * D * E
    assert len(lines) == 1
    # One new token is no chunk of 64.
    text = str(jax.make_jaxpr(linear_relation)(*inputs(1)[0][:4]))
    assert not re.search(r"[\[,]64[,\]]", text)


@functools.cache
def sharded(devices, tokens, chunk=2):
    """`run` with tokens over devices and the state on all of them."""

    def f(arrays, positions, state, axis_name):
        return linear_relation(
            *arrays,
            state=state,
            positions=positions,
            chunk=chunk,
            axis_name=axis_name,
        )

    def step(arrays, positions, cotangents):
        call = over_devices(f, devices, tokens=tokens, out=(1, None))
        g = lambda *xs: call(xs[:4], positions, state=xs[4])
        result, back = jax.vjp(g, *arrays)
        return result, back(cotangents)

    return jax.jit(step)


@pytest.mark.parametrize(
    "devices, tokens",
    [
        (1, 8),
        (2, 48),
        (4, 8),
        (4, 48),
        pytest.param(8, 48, marks=pytest.mark.slow),
        pytest.param(8, 16, marks=pytest.mark.slow),
    ],
)
def test_shards_equal_one_device(devices, tokens):
    """All gradients, too, with documents that cross shards, whole shards of padding,
    documents that began before all tokens, and chunks of one token."""
    with jax.enable_x64(True):
        arrays, cotangents = inputs(tokens, jnp.float64)
        row = np.arange(tokens)
        crossing = np.stack([row % (tokens // 2 - 1) + 1, row + 5])
        padded = np.where(row < tokens // 2, 0, crossing)
        for positions in (crossing, padded, np.broadcast_to(row + 2, (B, tokens))):
            positions = jnp.asarray(positions)
            actual = sharded(devices, tokens)(arrays, positions, cotangents)
            expected = oracle(*arrays, positions, *cotangents)
            assert_close(actual, expected, error=ERROR[jnp.float64])


def test_shards_in_half_precision():
    """States travel in float32; here, as one document goes on."""
    arrays, cotangents = inputs(16, jnp.bfloat16)
    step = sharded(2, 16).lower(arrays, None, cotangents).compile()
    expected = oracle(*arrays, None, *cotangents)
    assert_close(step(arrays, None, cotangents), expected, error=ERROR[jnp.bfloat16])
    gathers = [x for x in step.as_text().splitlines() if " all-gather(" in x]
    assert gathers and not any("bf16" in x for x in gathers)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"implementation": "fast"}, "'scan' or 'chunked', got 'fast'"),
        ({"chunk": 0}, "chunk must be a power of two, got 0"),
        ({"chunk": 48}, "chunk must be a power of two, got 48"),
        ({"chunk": -4}, "chunk must be a power of two, got -4"),
        ({"tau": 0.0}, "tau must be positive, got 0.0"),
        ({"positions": jnp.ones(2, int)}, r"positions .* shape \(2, 2\)"),
    ],
)
def test_wrong_options(options, message):
    arrays, _ = inputs(2)
    # Without the checks of types that tests add.
    with pytest.raises(ValueError, match=message):
        linear_relation.__wrapped__(*arrays[:4], **options)


@pytest.mark.parametrize("which", range(4))
def test_shapes_that_do_not_match(which):
    arrays = list(inputs(4)[0][:4])
    arrays[which] = arrays[which][:, :3]
    with pytest.raises(ValueError, match="there must be tokens"):
        linear_relation.__wrapped__(*arrays)
    with pytest.raises(ValueError, match="there must be tokens"):
        linear_relation.__wrapped__(*[x[:, :0] for x in arrays])


@pytest.mark.parametrize(
    "tokens, options, error, message",
    [
        (4, {"implementation": "scan"}, NotImplementedError, "axis_name='context'"),
        (3, {}, ValueError, "even number of tokens, got 3"),
    ],
)
def test_wrong_shards(tokens, options, error, message):
    arrays, _ = inputs(2 * tokens)
    f = jax.shard_map(
        lambda *xs: linear_relation(*xs, axis_name="context", **options)[0],
        mesh=jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,)),
        in_specs=P(None, "context"),
        out_specs=P(None, "context"),
    )
    with pytest.raises(error, match=message):
        jax.eval_shape(f, *arrays[:4])
