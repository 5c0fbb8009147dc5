"""Sequences shared out over devices: the numbers and gradients of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from flaxmix import ops, parallel

from closeness import assert_close
from relation_cases import documents, draw

H, D, V = 2, 4, 7
TIGHT = 1e-11


def model():
    return draw(3, V, H * D, dtype=jnp.float64), jnp.asarray(0.4)


def losses(model, tokens, targets, *, positions, axis_name):
    """A relation of embeddings, and a number for each token."""
    tables, lam = model
    p1, p2, i = (t[tokens].reshape(*tokens.shape, H, D) for t in tables)
    y = ops.relation(p1, p2, i, lam, positions=positions, axis_name=axis_name)
    assert axis_name is None or tokens.shape[-1] % 2 == 0
    return {"loss": (y.sum((-1, -2)) - targets) ** 2, "y": y}


def run(mesh, tokens, targets, positions):
    @jax.jit
    def step(model, tokens, targets, positions):
        def loss(model):
            out = parallel.apply_causal(
                losses, model, tokens, targets, mesh=mesh, positions=positions
            )
            weights = 1.0 if positions is None else positions > 0
            return (out["loss"] * weights).sum(), out

        return jax.value_and_grad(loss, has_aux=True)(model)

    (_, out), grads = step(model(), tokens, targets, positions)
    return out, grads


@pytest.mark.parametrize(
    "tokens, shape, packed",
    [
        (7, (2, 4), True),
        (16, (2, 2), True),
        pytest.param(1, (1, 2), False, marks=pytest.mark.slow),
        pytest.param(16, (1, 4), False, marks=pytest.mark.slow),
    ],
)
def test_equals_one_device(tokens, shape, packed):
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, V, (2, tokens)), jnp.int32)
    positions = documents([3, -1, tokens - 4], [tokens]) if packed else None
    with jax.enable_x64(True):
        targets = jnp.asarray(rng.normal(size=(2, tokens)))
        mesh = parallel.make_mesh(data=shape[0], context=shape[1])
        one = parallel.make_mesh(data=1, context=1)
        expected = run(one, ids, targets, positions)
        place = NamedSharding(mesh, P("data", "context" if tokens == 16 else None))
        arrays = (jax.device_put(x, place) for x in (ids, targets))
        assert_close(run(mesh, *arrays, positions), expected, error=TIGHT)


def test_means_are_taken_of_the_results():
    mean = lambda *args, **place: losses(*args, **place)["loss"].mean()
    mesh, ids = parallel.make_mesh(data=1, context=2), jnp.zeros((2, 6), jnp.int32)
    tables = jnp.zeros((3, V, H * D)), jnp.zeros(())
    with pytest.raises(ValueError, match=r"begin with \(2, 6\), got \(\); means"):
        parallel.apply_causal(mean, tables, ids, jnp.zeros((2, 6)), mesh=mesh)


def test_arrays_of_other_lengths():
    mesh = parallel.make_mesh(data=1, context=2)
    ids = jnp.zeros((2, 6), jnp.int32)
    with pytest.raises(ValueError, match=r"begin with \(2, 6\), got \(2, 5\)"):
        parallel.apply_causal(losses, (), ids, jnp.zeros((2, 5)), mesh=mesh)
    with pytest.raises(ValueError, match=r"begin with \(2, 6\), got \(1, 6\)"):
        # Without the checks of types that tests add.
        parallel.apply_causal.__wrapped__(
            losses,
            *((), ids, jnp.zeros((2, 6))),
            mesh=mesh,
            positions=documents([6]),
        )
