"""Evaluation on one device, on several, and chunk by chunk: the same errors."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tyro

from flaxmix import data, parallel
from flaxmix.data import darcy
from train import evaluate, pde, plots
from train.checkpoint import Checkpoints
from train.config import DarcyConfig, ModelConfig, PDEConfig
from train.folder import open_folder
from train.task import plan

from closeness import assert_close

TEST = 5
# Sums of float32 in another order.
ERROR = 1e-5

DEVICES, CHUNKS = ["--devices", "2", "--context", "4"], ["--chunk", "50"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A Darcy set of 11 x 11 points."""
    folder = tmp_path_factory.mktemp("data") / "darcy"
    darcy.generate(folder, train=3, test=TEST, resolution=11, progress=False)
    return folder


def make_run(folder, files, name="flare"):
    """A run with one checkpoint, of weights with which all layers matter."""
    sizes = {"channels": 8, "blocks": 2, "heads": 2, "latents": 3}
    config = PDEConfig(
        data=DarcyConfig(folder=files, train=3, test=TEST, stride=1),
        model=ModelConfig(name=name, **sizes),
        evaluation_batch=3,
        run=folder,
    )
    task = pde.make_task(config)
    layout = plan(config, task, parallel.make_mesh(data=1))
    state = jax.jit(layout.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    noisy = lambda a: np.asarray(a + 0.3 * rng.normal(size=a.shape), np.float32)
    params = jax.tree.map(noisy, state.params)
    open_folder(config, task.fingerprint)
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(4, dataclasses.replace(state, params=params), {})
    checkpoints.close()
    return folder


def by_plain_calls(folder):
    """Fields and errors in float64 of what the model gives for each sample alone."""
    run = evaluate.load(folder)
    targets = run.task.dataset.targets
    call = jax.jit(lambda model, x: model(x))
    fields, errors = [], []
    for sample in run.task.dataset.test:
        y = np.asarray(call(run.model, sample["x"][None])[0], np.float64)
        fields.append(y * targets.std + targets.mean)
        square = lambda a: float((a * a).sum())
        truth = sample["y"].astype(np.float64)
        errors.append((square(fields[-1] - truth) / square(truth)) ** 0.5)
    # They differ, so that no order but theirs is right.
    assert np.std(errors) > 0.01 * np.mean(errors)
    return fields, np.array(errors)


@pytest.fixture(scope="module")
def flare(files, tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("run") / "flare", files)
    return folder, by_plain_calls(folder)


def two_sizes(config, make_dataset=pde.make_dataset):
    """The same data, some points of the test samples left out."""
    dataset = make_dataset(config)
    test = [
        {key: a[:size] for key, a in sample.items()}
        for sample, size in zip(dataset.test, [97, 121, 97, 97, 121], strict=True)
    ]
    return dataclasses.replace(dataset, test=data.Meshes(test), grid=None)


@pytest.fixture(scope="module")
def unequal(files, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pde, "make_dataset", two_sizes)
        folder = make_run(tmp_path_factory.mktemp("run") / "unequal", files)
        return folder, by_plain_calls(folder)


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn: predictions of the fields, and errors."""
    found = {}

    def fields(xy, truth, predictions, path, **_):
        found["fields"] = predictions

    monkeypatch.setattr(plots, "fields", fields)
    monkeypatch.setattr(plots, "errors", lambda e, path: found.update(errors=e))
    return found


def command(*arguments):
    tyro.cli(evaluate.main, args=[str(a) for a in arguments])


def fails(capsys, *arguments):
    """What a command prints that exits with code 2."""
    with pytest.raises(SystemExit) as exit_:
        command(*arguments)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    return err


def check(run, way, out, drawn):
    folder, (fields, errors) = run
    command(folder, "--out", out, *way)
    (found,) = drawn["errors"].values()
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, errors, rtol=ERROR)
    report = json.loads((out / "evaluation.json").read_text())["runs"]
    (name,) = report
    assert report[name]["test_error"] == pytest.approx(errors.mean(), rel=ERROR)
    index = int(np.abs(errors - np.median(errors)).argmin())
    (prediction,) = drawn["fields"].values()
    assert_close(prediction, fields[index][:, 0], error=ERROR)


@pytest.mark.parametrize("way", [[], DEVICES, CHUNKS], ids=" ".join)
def test_equal_sizes(flare, way, tmp_path, drawn):
    check(flare, way, tmp_path, drawn)


@pytest.mark.parametrize("way", [DEVICES, CHUNKS], ids=" ".join)
def test_unequal_sizes(unequal, way, tmp_path, drawn, monkeypatch):
    monkeypatch.setattr(pde, "make_dataset", two_sizes)
    check(unequal, way, tmp_path, drawn)


@pytest.mark.slow
@pytest.mark.parametrize("way", [DEVICES, CHUNKS], ids=" ".join)
@pytest.mark.parametrize("name", ["flarepp", "transolverpp", "abupt", "gnot"])
def test_other_models(files, name, way, tmp_path, drawn):
    folder = make_run(tmp_path / "run", files, name)
    check((folder, by_plain_calls(folder)), way, tmp_path, drawn)


@pytest.mark.slow
def test_full_attention_in_chunks(files, tmp_path, drawn, capsys):
    """It is refused, but for a chunk of all points."""
    folder = make_run(tmp_path / "run", files, "mha")
    error = fails(capsys, folder, "--chunk", 120)
    assert "points attend to each other directly" in error
    assert len(error.splitlines()) == 1
    assert not (folder / "evaluation").exists() and not drawn
    run = folder, by_plain_calls(folder)
    check(run, ["--chunk", "121"], tmp_path, drawn)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ("--chunk 0", "chunk must be at least 1, got 0."),
        ("--chunk -3 --devices 2", "chunk must be at least 1, got -3."),
        ("--chunk 5 --devices 2", "--chunk 5 .* --devices 2"),
        ("--chunk 5 --context 3", "--chunk 5 .* --context 3"),
        ("--devices 2 --context 5", "=2 and context=5 .* JAX_NUM_CPU_DEVICES=10 "),
        ("--devices 0", "data=0 and context=1 must be at least 1"),
        ("--devices -1 --context -1", "data=-1 and context=-1 must be at least 1"),
    ],
)
def test_bad_arguments_are_told_before_anything_is_read(arguments, message, capsys):
    error = fails(capsys, "nowhere", *arguments.split())
    assert len(error.splitlines()) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)


def test_devices_of_a_gpu_machine_are_as_many_as_there_are(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    with pytest.raises(ValueError, match=r"needs 2 devices, there are 1\.$"):
        parallel.make_mesh(data=2)


def test_devices_by_the_environment():
    """What the message advises."""
    code = "from flaxmix import parallel; print(parallel.make_mesh(data=3, context=3))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "9", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_errors_in_chunks_are_those_of_the_host_in_float64(monkeypatch):
    """Of a device nothing is asked but the fields, in chunks."""
    rng = np.random.default_rng(0)
    samples = [
        {"x": rng.normal(size=(n, 2)), "y": 1e4 + rng.normal(size=(n, 3))}
        for n in (7, 11, 5)
    ]
    samples = [
        {key: a.astype(np.float32) for key, a in sample.items()} for sample in samples
    ]
    samples.append({"x": samples[0]["x"], "y": np.zeros((7, 3), np.float32)})
    given = []

    def predict(model, x, *, mask, chunk, progress):
        given.append((x.shape, mask is None or int(mask.sum()), chunk))
        y = np.repeat(x[..., :1], 3, -1) + np.arange(3, dtype=np.float32)
        return y if mask is None else np.where(mask[..., None], y, np.nan)

    monkeypatch.setattr(parallel, "predict_in_chunks", predict)
    targets = data.Normalizer(np.full(3, 1e4), np.array([1.0, 2.0, 4.0]))
    predictor = pde.ChunkedPredictor(targets, 4)

    def of(sample):
        raw = np.repeat(sample["x"][:, :1], 3, -1) + np.arange(3, dtype=np.float32)
        return raw * np.float32([1, 2, 4]) + np.float32(1e4)

    expected = []
    for sample in samples:
        total = size = 0.0
        for y, truth in zip(of(sample).ravel(), sample["y"].ravel(), strict=True):
            total += (float(y) - float(truth)) ** 2
            size += float(truth) ** 2
        expected.append((total / (size or 1)) ** 0.5)
    with jax.transfer_guard("disallow_explicit"):
        errors = predictor.errors(None, samples)
        fields = predictor.fields(None, samples[2])
    np.testing.assert_allclose(errors, expected, rtol=1e-12)
    np.testing.assert_array_equal(fields, of(samples[2]))
    # At most as many sizes as batches of unequal meshes have.
    assert [n for (_, n, _), *_ in given] == [7, 11, 7, 7, 5]
    assert [count for _, count, _ in given] == [7, 11, 5, 7, True]
    assert {(shape[0], chunk) for shape, _, chunk in given} == {(1, 4)}


def test_progress_of_samples_and_of_a_large_one(flare, monkeypatch, capsys):
    run = evaluate.load(flare[0])
    targets, test = run.task.dataset.targets, run.task.dataset.test
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    shown = pde.ChunkedPredictor(targets, 50, progress=True)
    shown.errors(run.model, test)
    out, err = capsys.readouterr()
    assert not out and "samples" in err and "100%" in err and "points/s" not in err
    monkeypatch.setattr(pde, "OWN_BAR", 121)
    shown.errors(run.model, test)
    out, err = capsys.readouterr()
    assert (
        not out
        and "samples" not in err
        and err.count("\n") == TEST
        and "points/s" in err
    )
    for large in (121, 122):
        monkeypatch.setattr(pde, "OWN_BAR", large)
        pde.ChunkedPredictor(targets, 50).errors(run.model, test)
        assert capsys.readouterr() == ("", "")


def test_the_change_between_runs_is_relative(flare, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other"
    shutil.copytree(flare[0], other)

    def draw(runs, dataset, mesh, folder):
        folder.mkdir()
        values = zip(runs, (0.4, 0.3), strict=True)
        return {name: np.full(3, value) for name, value in values}

    monkeypatch.setattr(pde, "draw", draw)
    command(flare[0], other, "--out", tmp_path / "out")
    last = capsys.readouterr().out.split("test error ")[-1]
    assert last.startswith("-25.0 % (relative).")
