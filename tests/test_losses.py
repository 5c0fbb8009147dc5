import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxmix import losses
from flaxmix.data import Normalizer

from closeness import assert_close

FILE = pathlib.Path(__file__).parent / "data" / "losses_dev.npz"
EXACT = 1e-12
"""float64 against the reference: rounding only."""


def golden(prefix):
    with np.load(FILE) as file:
        return {
            k.removeprefix(prefix + "/"): file[k]
            for k in file.files
            if k.startswith(prefix + "/")
        }


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def test_relative_l2_matches_reference():
    g = golden("rel_l2")
    mean = lambda p, t: losses.relative_l2(p, t).mean()
    value, grads = jax.value_and_grad(mean, argnums=(0, 1))(g["pred"], g["target"])
    assert_close(value, g["value"], error=EXACT)
    per_sample = losses.relative_l2(jnp.asarray(g["pred"]), jnp.asarray(g["target"]))
    assert_close(per_sample, g["per_sample"], error=EXACT)
    assert_close(grads, (g["grad_pred"], g["grad_target"]), error=EXACT)


def test_loss_in_physical_units_matches_reference():
    g = golden("rel_l2_decoded")
    targets = Normalizer.fit(g["normaliser_data"])
    assert_close(targets.mean, g["mean"].ravel(), error=EXACT)
    assert_close(targets.std, g["std"].ravel(), error=EXACT)

    def loss(encoded):
        truth = jnp.asarray(targets.decode(g["target_encoded"]))
        return losses.relative_l2(targets.decode(encoded), truth).mean()

    value, grad = jax.value_and_grad(loss)(jnp.asarray(g["pred_encoded"]))
    assert_close(value, g["value"], error=EXACT)
    assert_close(grad, g["grad_pred_encoded"], error=EXACT)


def darcy_loss(prediction, target):
    plain = losses.relative_l2(prediction, target)
    slopes = losses.relative_gradient_l2(prediction, target, (12, 12))
    return (plain + 0.1 * slopes).mean()


def test_darcy_loss_matches_reference():
    g = golden("darcy")
    prediction, target = jnp.asarray(g["pred"]), jnp.asarray(g["target"])
    slopes = losses.relative_gradient_l2(prediction, target, (12, 12)).mean()
    assert_close(slopes, g["rel_dx"] + g["rel_dy"], error=EXACT)
    value, grad = jax.value_and_grad(darcy_loss)(prediction, target)
    assert_close(value, g["value"], error=EXACT)
    assert_close(grad, g["grad_pred"], error=EXACT)


def test_darcy_loss_in_physical_units_matches_reference():
    raw, g = golden("darcy"), golden("darcy_decoded")
    mean, std = g["mean_std"]
    loss = lambda p: darcy_loss(p * std + mean, jnp.asarray(raw["target"] * std + mean))
    value, grad = jax.value_and_grad(loss)(jnp.asarray(raw["pred"]))
    assert_close(value, g["value"], error=EXACT)
    assert_close(grad, g["grad_pred_encoded"], error=EXACT)


def test_exact_prediction_has_loss_and_gradient_zero():
    y = jax.random.normal(jax.random.key(0), (2, 5, 3))
    value, grad = jax.value_and_grad(lambda p: losses.relative_l2(p, y).sum())(y)
    assert value == 0
    chex.assert_trees_all_equal(grad, jnp.zeros_like(y))


def test_zero_target_gives_the_size_of_the_prediction():
    p = jax.random.normal(jax.random.key(0), (2, 5, 3))
    zero = jnp.zeros_like(p)
    assert_close(
        losses.relative_l2(p, zero), jnp.linalg.norm(p, axis=(1, 2)), error=EXACT
    )
    gradient = jax.grad(lambda p, t: losses.relative_l2(p, t).sum(), argnums=(0, 1))
    chex.assert_tree_all_finite(gradient(p, zero))
    chex.assert_tree_all_finite(gradient(zero, zero))
    assert losses.relative_l2(zero, zero).tolist() == [0, 0]


@pytest.mark.parametrize("content", [0.0, 1e30, np.nan, np.inf])
def test_masked_points_never_matter(content):
    key = jax.random.key(0)
    p, y = jax.random.normal(key, (2, 2, 7, 3))
    mask = jnp.arange(7) < jnp.array([[4], [7]])
    fill = lambda a: jnp.where(mask[..., None], a, content)
    loss = lambda p, y: losses.relative_l2(p, y, mask=mask).sum()
    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(fill(p), fill(y))
    alone = losses.relative_l2(p[:1, :4], y[:1, :4]) + losses.relative_l2(p[1:], y[1:])
    assert_close(value, alone[0], error=EXACT)
    for grad in grads:
        chex.assert_tree_all_finite(grad)
        assert not grad[0, 4:].any()


def test_nan_does_not_pass_for_0():
    y = jnp.ones((1, 4, 1))
    for bad in (jnp.nan * y, y.at[0, 0].set(jnp.nan)):
        assert jnp.isnan(losses.relative_l2(bad, y))
        assert jnp.isnan(losses.relative_l2(y, bad))
    grid = jnp.ones((1, 9, 1))
    bad = grid.at[0, 4].set(jnp.nan)
    assert jnp.isnan(losses.relative_gradient_l2(bad, grid, (3, 3)))


def test_a_grid_without_inner_points():
    y = jnp.ones((1, 4, 1))
    with pytest.raises(ValueError, match="no points inside its border"):
        losses.relative_gradient_l2(y, y, (2, 2))


def test_a_sample_without_real_points_has_loss_zero():
    p, y = jax.random.normal(jax.random.key(0), (2, 2, 7, 3))
    mask = jnp.zeros((2, 7), bool).at[1].set(True)
    loss = lambda p: losses.relative_l2(p, y, mask=mask).sum()
    value, grad = jax.value_and_grad(loss)(p)
    assert_close(value, losses.relative_l2(p[1:], y[1:])[0], error=EXACT)
    assert not grad[0].any()


def test_relative_l2_of_half_precision_is_summed_in_float32():
    # 70,000 squares of 2 overflow float16.
    y = jnp.full((1, 70_000, 1), 2, jnp.float16)
    assert losses.relative_l2(1.5 * y, y).tolist() == [0.5]


def test_gradient_loss_rejects_a_grid_of_another_size():
    y = jnp.ones((1, 12, 1))
    with pytest.raises(ValueError, match=r"\(3, 5\) does not hold 12 points"):
        losses.relative_gradient_l2(y, y, (3, 5))
