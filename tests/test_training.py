"""Whole runs, on a Darcy set of 11 x 11 points."""

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxmix import parallel
from flaxmix.data import darcy
from flaxmix.parameters import named_parameters
from train import config as configs, evaluate, loop, pde
from train.checkpoint import Checkpoints
from train.config import DarcyConfig, ModelConfig, OptimizerConfig, PDEConfig
from train.log import read_metrics

from closeness import assert_close

TRAIN, TEST = 8, 7


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "darcy"
    darcy.generate(folder, train=TRAIN, test=TEST, resolution=11, progress=False)
    return folder


def small(files, run):
    """Ten steps, five in a call, with a checkpoint half way."""
    return PDEConfig(
        data=DarcyConfig(folder=files, train=TRAIN, test=TEST, stride=1),
        model=ModelConfig(channels=8, blocks=2, heads=2, latents=3, io_layers=0),
        epochs=5,
        batch=4,
        evaluation_batch=4,
        evaluations=1,
        checkpoint_every=5,
        gradient_weight=0.1,
        run=run,
        progress=False,
    )


@pytest.fixture
def config(files, tmp_path):
    return small(files, tmp_path / "run")


def train(config, **changes):
    config = dataclasses.replace(config, **changes)
    return loop.run(config, pde.make_task(config))


def changed(config, path, value):
    """The config with the field at a dotted path replaced."""
    head, _, rest = path.partition(".")
    if rest:
        value = changed(getattr(config, head), rest, value)
    return dataclasses.replace(config, **{head: value})


def last_state(config):
    """The arrays of the last checkpoint."""
    loaded = evaluate.load(config.run)
    return loaded.step, loaded.state


def rows(config):
    """The metrics, without the one that is a time."""
    return [
        {k: v for k, v in row.items() if k != "samples_per_second"}
        for row in read_metrics(config.run)
    ]


@pytest.fixture(scope="session")
def whole(files, tmp_path_factory):
    """A whole run, to compare with and not to be changed."""
    config = small(files, tmp_path_factory.mktemp("whole") / "run")
    train(config)
    return config


@pytest.fixture(scope="session")
def divided(files, tmp_path_factory):
    """The same run on four devices, not to be changed either."""
    config = small(files, tmp_path_factory.mktemp("divided") / "run")
    config = dataclasses.replace(config, devices=4)
    train(config)
    return config


@pytest.fixture
def trained(config, whole):
    """A copy of the whole run."""
    shutil.copytree(whole.run, config.run)
    return config


def test_a_run_folder_holds_everything(trained):
    found = {path.name for path in trained.run.iterdir()}
    assert found == {
        *("config.json", "data.json", "checkpoints", "tensorboard"),
        *("metrics.jsonl", "metrics.csv", "results.json"),
        *("curves.png", "fields.png", "errors.png"),
    }
    steps = [row["step"] for row in rows(trained)]
    assert steps == [0, 5, 10, 10]
    results = json.loads((trained.run / "results.json").read_text())
    assert results["final"]["test_error"] == rows(trained)[-1]["test_error"]
    assert results["best_on_test"]["test_error"] == min(
        row["test_error"] for row in rows(trained) if "test_error" in row
    )


def test_training_reduces_loss_and_error(config):
    optimizer = OptimizerConfig(learning_rate=3e-3)
    config = dataclasses.replace(config, checkpoint_every=None, gradient_weight=0.0)
    results = train(config, epochs=150, optimizer=optimizer)
    record = [row for row in rows(config) if "loss" in row]
    assert record[-1]["loss"] < 0.7 * record[0]["loss"]
    assert results["final"]["test_error"] < 0.95 * rows(config)[0]["test_error"]


KILLED = """
import os, signal, sys, time
from pathlib import Path
from train import config, loop, pde
import dataclasses
conf = config.read(config.PDEConfig, Path(sys.argv[1]))
task = pde.make_task(conf)

def batches(start, size, mesh):
    for i, batch in enumerate(task.batches(start, size, mesh)):
        if start + i * size >= 7:
            while not (conf.run / "checkpoints" / "5" / "state").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch

loop.run(conf, dataclasses.replace(task, batches=batches))
"""


@pytest.mark.parametrize(
    "workers,dropout", [pytest.param(0, 0.0, marks=pytest.mark.slow), (2, 0.2)]
)
def test_five_steps_killed_and_resumed_equal_ten_bitwise(
    config, tmp_path, workers, dropout
):
    config = dataclasses.replace(config, steps_per_call=1, validation=2, batch=3)
    config = changed(config, "model.dropout", dropout)
    whole = dataclasses.replace(config, run=tmp_path / "whole")
    train(whole)
    configs.write(config, tmp_path / "killed.json")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "killed.json")],
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == -9, done.stderr
    assert [r["step"] for r in rows(config) if "loss" in r][-1] > 5
    assert not (config.run / "results.json").exists()
    # Workers may change from one process to the next.
    train(config, workers=workers)
    assert rows(config) == rows(whole)
    (step, actual), (last, expected) = last_state(config), last_state(whole)
    assert step == last == 10
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


def test_a_finished_run_does_nothing(trained, capsys):
    before = {p: p.stat().st_mtime_ns for p in trained.run.rglob("*") if p.is_file()}
    results = train(trained, progress=True)
    after = {p: p.stat().st_mtime_ns for p in trained.run.rglob("*") if p.is_file()}
    assert before == after
    assert results == json.loads((trained.run / "results.json").read_text())
    assert "is finished" in capsys.readouterr().out


def test_dropout_is_for_training_alone(config):
    config = changed(config, "model.dropout", 0.5)
    task = pde.make_task(config)
    model, mesh = jax.jit(task.init)(jax.random.key(0)), parallel.make_mesh(data=1)
    assert task.evaluate(model, mesh) == task.evaluate(model, mesh)
    plain = pde.make_task(changed(config, "model.dropout", 0.0))
    same = jax.jit(plain.init)(jax.random.key(0))
    assert task.evaluate(model, mesh) == plain.evaluate(same, mesh)
    batch = jax.tree.map(lambda a: jnp.asarray(a[0]), next(task.batches(0, 1, mesh)))
    loss = jax.jit(lambda model, batch, key: task.loss(model, batch, key, mesh))
    first, again, other = (
        float(loss(model, batch, jax.random.key(i))) for i in (0, 0, 1)
    )
    assert first == again != other


def test_several_steps_a_call_give_the_same_numbers(config, whole):
    one = dataclasses.replace(config, steps_per_call=1)
    train(one)
    (_, actual), (_, expected) = last_state(whole), last_state(one)
    assert_close(actual.params, expected.params, error=1e-5)


def test_steps_per_call_ends_at_every_boundary():
    assert loop.steps_per_call(20, 600, 6000, None) == 20
    assert loop.steps_per_call(20, 498, 4980, None) == 6
    assert loop.steps_per_call(20, 10, 10, 5) == 5
    assert loop.steps_per_call(20, 7, 7, 7) == 7
    assert loop.steps_per_call(1, 600, 600, None) == 1


def check_rows(actual, expected):
    # Gradients are summed in another order, and Adam magnifies small ones.
    for a, b in zip(rows(actual), rows(expected), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=1e-3), (key, a, b)


def test_four_devices_share_a_batch(divided, whole):
    check_rows(divided, whole)


@pytest.mark.slow
def test_two_devices_share_a_batch(config, whole):
    config = dataclasses.replace(config, devices=2)
    train(config)
    check_rows(config, whole)


def test_the_error_is_the_plain_mean_over_samples(config):
    # Seven samples fill neither batches of four nor two devices.
    task = pde.make_task(config)
    model = jax.jit(task.init)(jax.random.key(0))
    one = parallel.make_mesh(data=1)
    each = [
        task.predictor.errors(model, [task.dataset.test[i]], one)[0]
        for i in range(TEST)
    ]
    for devices in (1, 2, 8):
        mesh = parallel.make_mesh(data=devices)
        errors = task.predictor.errors(model, task.dataset.test, mesh)
        assert_close(errors, np.array(each), error=1e-6)
        assert task.evaluate(model, mesh)["test_error"] == pytest.approx(
            np.mean(each), rel=1e-6
        )


def test_checkpoints_open_on_any_number_of_devices(divided):
    saved = last_state(divided)[1]
    task = pde.make_task(divided)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), saved)
    specs = parallel.match_specs(parallel.REPLICATED, list(saved.params))
    for devices in (1, 2, 8):
        mesh = parallel.make_mesh(data=devices)
        shardings = parallel.state_shardings(abstract, specs, mesh)
        checkpoints = Checkpoints(divided.run / "checkpoints", read_only=True)
        state = checkpoints.restore(10, abstract, shardings)
        assert len(state.params["norm.scale"].devices()) == devices
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(saved), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert task.fingerprint == pde.make_task(divided).fingerprint


def test_the_best_checkpoint_is_kept(config):
    config = dataclasses.replace(
        config, evaluations=5, checkpoint_every=None, steps_per_call=1
    )
    task = pde.make_task(config)
    errors = {0: 0.9, 2: 0.5, 4: 0.2, 6: 0.4, 8: 0.3, 10: 0.6}
    # After each error of the weights that of their average, which selects nothing.
    found = itertools.chain.from_iterable((e, 0.1 + e / 2) for e in errors.values())
    evaluation = lambda model, mesh: {"test_error": next(found)}
    results = loop.run(config, dataclasses.replace(task, evaluate=evaluation))
    assert errors == {
        r["step"]: r["test_error"] for r in rows(config) if "loss" not in r
    }
    assert results["best_on_test"]["step"] == 4
    checkpoints = Checkpoints(config.run / "checkpoints", read_only=True)
    assert checkpoints.best("test_error") == 4
    assert checkpoints.steps() == [4, 8, 10]
    assert evaluate.load(config.run, "best_test").step == 4


def test_a_run_of_another_config_is_refused(trained):
    with pytest.raises(ValueError, match="model.channels: 8 became 16"):
        train(changed(trained, "model.channels", 16))
    with pytest.raises(ValueError, match="model.name: 'flarepp' became 'flare'"):
        train(changed(trained, "model.name", "flare"))
    with pytest.raises(ValueError, match="seed: 0 became 1"):
        train(changed(trained, "seed", 1))


def test_a_run_on_other_data_is_refused(trained, tmp_path):
    other = tmp_path / "other"
    darcy.generate(other, train=TRAIN, test=TEST, resolution=11, seed=1, progress=False)
    data = dataclasses.replace(trained.data, folder=other)
    file = trained.run / "config.json"
    configs.write(dataclasses.replace(trained, data=data), file)
    with pytest.raises(ValueError, match="on other data: fingerprint .* became"):
        train(trained, data=data)
    with pytest.raises(ValueError, match="trained on other data"):
        evaluate.load(trained.run)


def test_a_folder_of_something_else_is_refused(config):
    config.run.mkdir()
    (config.run / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is not empty and holds no run"):
        train(config)
    assert [p.name for p in config.run.iterdir()] == ["thesis.tex"]


def test_a_checkpoint_of_another_width_names_the_first_mismatch(trained):
    wide = pde.make_task(changed(trained, "model.channels", 16))
    step, saved = last_state(trained)
    checkpoints = Checkpoints(trained.run / "checkpoints", read_only=True)
    replicated = jax.tree.leaves(saved)[0].sharding

    def restore(params):
        wanted = dataclasses.replace(saved, params=params)
        shardings = jax.tree.map(lambda _: replicated, wanted)
        return checkpoints.restore(step, wanted, shardings)

    params = jax.eval_shape(lambda: named_parameters(wide.init(jax.random.key(0))))
    first = r"params/blocks.mixer.key.bias is float32\[2, 8\] there and .*16\] here"
    with pytest.raises(ValueError, match=first):
        restore(params)
    fewer = {k: v for k, v in saved.params.items() if k != "norm.scale"}
    with pytest.raises(ValueError, match="params/norm.scale is .* there and nothing"):
        restore(fewer)
    more = saved.params | {"new": saved.params["norm.scale"]}
    with pytest.raises(ValueError, match="params/new is nothing there and float32"):
        restore(more)


def test_a_loss_that_is_not_finite_stops_the_run(config):
    task = pde.make_task(config)

    def ruined(start, size, mesh):
        for batch in task.batches(start, size, mesh):
            batch["y"][3] = np.nan
            yield batch

    with pytest.raises(FloatingPointError, match="is nan .* checkpoint is .* step 0"):
        loop.run(config, dataclasses.replace(task, batches=ruined))
    # Nothing but the good checkpoint is left, and no result.
    assert evaluate.load(config.run).step == 0
    assert not (config.run / "results.json").exists()


def stop_at_once(config):
    """Leaves a run after its first evaluation."""
    task = pde.make_task(config)

    def none(start, size, mesh):
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        loop.run(config, dataclasses.replace(task, batches=none))


def test_a_run_killed_after_its_first_evaluation_keeps_it(config, whole):
    stop_at_once(config)
    assert [row["step"] for row in rows(config)] == [0]
    train(config)
    assert rows(config) == rows(whole)


def test_metrics_without_checkpoints_are_not_trained_over(trained):
    shutil.rmtree(trained.run / "checkpoints")
    before = rows(trained)
    with pytest.raises(ValueError, match="metrics up to step 10 but no checkpoint"):
        train(trained)
    assert rows(trained) == before


def test_a_lost_last_evaluation_is_made_again(trained):
    expected = (trained.run / "results.json").read_text()
    (trained.run / "results.json").write_text("{")
    file = trained.run / "metrics.jsonl"
    file.write_text(file.read_text()[:-20])
    train(trained)
    assert (trained.run / "results.json").read_text() == expected


def test_other_checkpoints_between_do_not_hinder_resumption(config, whole):
    config = dataclasses.replace(config, checkpoint_every=3)
    task = pde.make_task(config)

    def four(start, size, mesh):
        yield from itertools.islice(task.batches(start, size, mesh), 4)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.run(config, dataclasses.replace(task, batches=four))
    train(config, checkpoint_every=None)
    actual, expected = rows(config)[-1], rows(whole)[-1]
    assert actual["step"] == expected["step"] == 10
    assert actual["test_error"] == pytest.approx(expected["test_error"], rel=1e-3)


def test_damaged_checkpoints(trained):
    folder = trained.run / "checkpoints"
    (folder / "7").mkdir()
    assert evaluate.load(trained.run).step == 10
    for file in (folder / "10/state").rglob("*"):
        if file.is_file() and file.name != "_METADATA":
            file.write_bytes(file.read_bytes()[:10])
    # A process of its own: reads that Orbax has given up on report later.
    done = subprocess.run(
        [sys.executable, "-m", "train.evaluate", trained.run],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert re.search("checkpoints/10 is damaged .*delete", done.stderr)


@pytest.mark.parametrize("file", ["config.json", "data.json"])
def test_damaged_files_are_named(trained, file):
    (trained.run / file).write_text('{"')
    with pytest.raises(ValueError, match=f"{file} is"):
        train(trained)


def test_a_folder_from_a_killed_start_is_used(config):
    config.run.mkdir()
    (config.run / "config.tmp").write_text("{")
    stop_at_once(config)
    assert [row["step"] for row in rows(config)] == [0]


def test_data_may_move(trained, files, tmp_path):
    other = tmp_path / "moved"
    shutil.copytree(files, other)
    data = dataclasses.replace(trained.data, folder=other)
    assert train(trained, data=data)["final"]["step"] == 10
    assert evaluate.load(trained.run, data=other).step == 10


@pytest.mark.parametrize(
    "path,value,message",
    [
        ("batch", 9, "8 training samples do not fill batch=9"),
        ("devices", 3, "batch=4 must be a multiple of devices=3"),
        ("devices", 4096, "devices=4096"),
        ("validation", 8, "cannot hold out 8 of 8"),
        ("data.train", 9, "9"),
        ("data.stride", 3, "3"),
        (
            "model.options",
            {"gate_logits": 1.0},
            "flarepp has .*'gate_logits'.*'gate_logit'",
        ),
        ("model.options", {"gate_logit": True}, "gate_logit=True is no"),
        ("model.options", {"share": 3}, "share=3 is no"),
        ("model.options", {"gate_logit": np.nan}, "gate_logit=nan is not finite"),
        ("model", ModelConfig(name="lno", dropout=0.1), "lno has no dropout"),
        ("data.folder", Path("nowhere"), "nowhere"),
    ],
)
def test_bad_input_gives_one_clear_error_and_touches_nothing(
    config, path, value, message
):
    with pytest.raises((ValueError, OSError), match=message):
        train(changed(config, path, value))
    assert not config.run.exists()


def test_the_gradient_loss_needs_a_grid(config, monkeypatch):
    plain = pde.make_dataset(config.data)
    plain = dataclasses.replace(plain, grid=None)
    monkeypatch.setattr(pde, "make_dataset", lambda config: plain)
    with pytest.raises(ValueError, match="gradient_weight=0.1 needs data on a grid"):
        pde.make_task(config)


def test_command_line_exits_with_2_on_bad_input(files, tmp_path):
    command = [sys.executable, "-m", "train.pde", "configs/pde/darcy_small.py"]
    options = ["--data.folder", str(files), "--data.train", "8", "--data.test", "7"]
    options += ["--run", str(tmp_path / "run"), "--batch", "9"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "8 training samples do not fill batch=9."
    ]


def test_evaluate_rebuilds_a_run_from_its_folder(trained, tmp_path, capsys):
    evaluate.main([trained.run], out=tmp_path / "out")
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    final = json.loads((trained.run / "results.json").read_text())["final"]
    assert report["runs"]["flarepp"]["test_error"] == pytest.approx(
        final["test_error"], rel=1e-6
    )
    assert (tmp_path / "out" / "fields.png").exists()
    average = evaluate.load(trained.run, "average")
    error = average.task.evaluate(average.model, parallel.make_mesh(data=1))
    assert error["test_error"] == pytest.approx(final["ema_test_error"], rel=1e-6)
    assert "flarepp" in capsys.readouterr().out


def test_evaluate_compares_runs(trained, tmp_path, capsys):
    flare = changed(trained, "model.name", "flare")
    flare = dataclasses.replace(flare, run=tmp_path / "flare")
    stop_at_once(flare)
    evaluate.main([flare.run, trained.run])
    assert "flarepp against flare" in capsys.readouterr().out
    report = json.loads((trained.run / "evaluation/evaluation.json").read_text())
    assert list(report["runs"]) == ["flare", "flarepp"]


def test_evaluate_says_what_is_missing(trained, tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        evaluate.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no checkpoint for 'best_validation'"):
        evaluate.load(trained.run, "best_validation")
    with pytest.raises(SystemExit) as exit_:
        evaluate.main([tmp_path / "nowhere"])
    assert exit_.value.code == 2
    assert "holds no run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluate.main([])
    assert "name one run folder" in capsys.readouterr().err
