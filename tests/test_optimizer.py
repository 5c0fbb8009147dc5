import json
import pathlib
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flaxmix import interop, losses
from flaxmix.parameters import named_parameters, with_parameters
from train.config import ModelConfig, ModelName, OptimizerConfig
from train.models import make_model
from train.optimizer import decayed, make_optimizer, one_cycle
from train.step import init_state, noise_key, train_step

from closeness import assert_close

FILE = pathlib.Path(__file__).parent / "data" / "losses_dev.npz"
SUITES = {
    "standard": OptimizerConfig(),
    "surface": OptimizerConfig(
        warmup=0.05,
        initial_division=1e3,
        final_division=1,
        beta1=0.9,
        beta1_low=None,
    ),
}


@pytest.mark.parametrize("steps", [50, 500])
@pytest.mark.parametrize("suite", SUITES)
def test_one_cycle_matches_reference(suite, steps):
    with jax.enable_x64(True), np.load(FILE) as file:
        for schedule, name in zip(
            one_cycle(SUITES[suite], steps), ("lr", "beta1"), strict=True
        ):
            expected = file[f"onecycle/{suite}_T{steps}/{name}"]
            actual = np.asarray(jax.vmap(schedule)(jnp.arange(steps)))
            # Relative at every step: the last learning rate is 1e-11.
            assert np.abs(actual / expected - 1).max() < 1e-6
            assert_close(actual, expected, error=1e-14)


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_one_cycle_of_few_steps_is_finite(steps):
    for schedule in one_cycle(OptimizerConfig(), steps):
        assert np.isfinite(jax.vmap(schedule)(jnp.arange(steps))).all()


def test_float32_schedule_keeps_its_digits_where_it_is_small():
    steps = 250_000
    rate, _ = one_cycle(OptimizerConfig(), steps)
    assert float(rate(jnp.int32(steps - 1))) == pytest.approx(1e-11, rel=1e-6)
    half = 0.5 * (1 - np.cos(np.pi * 10 / (0.9 * steps)))
    assert float(rate(jnp.int32(steps - 11))) == pytest.approx(
        1e-11 + 1e-3 * half, rel=1e-2
    )


def adamw_run():
    with np.load(FILE) as file:
        arrays = {k.removeprefix("adamw/"): file[k] for k in file.files}
        meta = json.loads(str(file["meta"]))["adamw"]
    spec = meta["model"] | {"M": meta["model"]["mixer_cfg"]["num_latents"]}
    load = lambda prefix: {
        k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)
    }
    model = interop.from_reference({"spec": spec}, load("step0/param/"))
    return model, meta, arrays, load


def test_five_steps_match_reference():
    with jax.enable_x64(True):
        model, meta, arrays, load = adamw_run()
        names = list(named_parameters(model))
        config = OptimizerConfig(weight_decay=meta["weight_decay"])
        optimizer = make_optimizer(config, meta["T"], names)
        state = init_state(named_parameters(model), optimizer)

        def loss_fn(params, batch, key):
            prediction = with_parameters(model, params)(batch["x"])
            return losses.relative_l2(prediction, batch["y"]).mean()

        step = jax.jit(
            lambda state, batch: train_step(
                state,
                batch,
                loss_fn=loss_fn,
                optimizer=optimizer,
                ema=0.999,
                key=noise_key(0),
            )
        )
        gradients = jax.jit(jax.grad(loss_fn))
        reference = lambda params: interop.to_reference(with_parameters(model, params))
        for k in range(5):
            batch = {
                "x": jnp.asarray(arrays["x"][k]),
                "y": jnp.asarray(arrays["target"][k]),
            }
            grads = gradients(state.params, batch, None)
            raw = load(f"step{k}/raw_grad/")
            assert_close(reference(grads), raw, error=1e-10)
            state, metrics = step(state, batch)
            assert_close(metrics["loss"], arrays["loss"][k], error=1e-11)
            assert_close(metrics["grad_norm"], arrays["raw_grad_norm"][k], error=1e-11)
            # Adam divides by the root of a mean square, which near 0 magnifies the
            # rounding of a gradient.
            params = reference(state.params)
            assert_close(params, load(f"step{k + 1}/param/"), error=1e-9)
        assert_close(reference(state.average), load("ema_after_step5/"), error=1e-9)


def flags(model, rule):
    """Whether each entry of each parameter is decayed, by the authors' names."""
    params = named_parameters(model)
    groups = decayed(list(params), rule)
    arrays = {name: np.full(a.shape, groups[name]) for name, a in params.items()}
    return interop.to_reference(with_parameters(model, arrays))


def test_decay_groups_of_the_run_match_reference():
    model, meta, _, _ = adamw_run()
    for rule in ("matrices", "reference"):
        for name, flag in flags(model, rule).items():
            assert flag.all() == flag.any() == (meta["groups"][name] == "decay"), name


@pytest.mark.parametrize("name", sorted(p.stem for p in FILE.parent.glob("[bm]*.npz")))
def test_decay_groups_match_reference(name):
    with np.load(FILE.parent / f"{name}.npz") as file:
        meta = json.loads(str(file["meta"]))
        arrays = {
            k.removeprefix("param/"): file[k]
            for k in file.files
            if k.startswith("param/")
        }
    found = flags(interop.from_reference(meta, arrays), "reference")
    groups = meta["adamw_groups"]
    assert set(found) - {"rope.omega"} == set(groups)  # but for a buffer
    for key, group in groups.items():
        flag = found[key]
        assert flag.all() == flag.any() == (group == "decay"), key


def test_a_parameter_without_decay_rule_is_an_error():
    with pytest.raises(ValueError, match="no decay rule matches parameter 'a.slope'"):
        decayed(["a.kernel", "a.slope"])


@pytest.mark.parametrize("rule", ["matrices", "reference"])
@pytest.mark.parametrize("name", typing.get_args(ModelName))
def test_zero_gradients_move_what_decays_alone(name, rule):
    sizes = ModelConfig(name=name, channels=8, blocks=2, heads=2, latents=3)
    make = lambda: make_model(sizes, (2, 1), jax.random.key(0))
    # Names alone decide, so that all arrays may have one shape.
    names = named_parameters(nnx.eval_shape(make))
    params = {name: jnp.ones(3) for name in names}
    config = OptimizerConfig(weight_decay=1e-2, decay=rule)
    optimizer = make_optimizer(config, 5, list(params))
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    moved = {n.rpartition(".")[2] for n, update in updates.items() if update.any()}
    extra = {
        "transolver": {"temperature"},
        "transolver3": {"temperature"},
        "set_transformer": {"inducing"},
        "gnot": {"placeholder"},
    }
    assert moved == {"kernel"} | (
        extra.get(name, set()) if rule != "matrices" else set()
    )
    still = {n.rpartition(".")[2] for n in params} - moved
    assert {"bias", "scale"} <= still


def test_clipping_limits_the_norm():
    params = {"kernel": jnp.ones((3, 5))}
    big = {"kernel": jnp.full((3, 5), 1e6)}
    optimizer = make_optimizer(OptimizerConfig(clip=0.5), 5, ["kernel"])
    state = optimizer.init(params)
    _, state = optimizer.update(big, state, params)
    moments = optax.tree.get(state, "mu")
    assert_close(optax.tree.norm(moments), jnp.float32(0.5 * (1 - 0.95)), error=1e-5)
