"""One run by several processes, each with devices of its own."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flaxmix import parallel
from flaxmix.data import darcy
from train.config import DistributedConfig
from train.log import read_metrics

CONFIG = """
from pathlib import Path
from train.config import DarcyConfig, ModelConfig, PDEConfig

config = PDEConfig(
    data=DarcyConfig(folder=Path({files!r}), train=8, test=7, stride=1),
    model=ModelConfig(channels=8, blocks=2, heads=2, latents=3, io_layers=0),
    epochs=10, batch=4, evaluation_batch=4, evaluations=2, steps_per_call=5,
    gradient_weight=0.1, run=Path({run!r}),
)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "darcy"
    # 9 x 9 points: no multiple of eight devices.
    darcy.generate(folder, train=8, test=7, resolution=9, progress=False)
    return folder


def start(config, devices, *arguments, **variables):
    """A training process with CPU devices of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "train.pde", str(config), *arguments],
        cwd=Path(__file__).parents[1],
        env=os.environ | variables | {"JAX_NUM_CPU_DEVICES": str(devices)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes):
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    # The collectives of CPUs talk on their own.
    return [re.sub(r"(?m)^\[Gloo\].*\n", "", output) for output in outputs]


def free_address():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def together(config, count, devices, *arguments):
    address = ["--distributed.coordinator", free_address()]
    address += ["--distributed.processes", str(count)]
    return finish(
        [
            start(
                config, devices, *arguments, *address, "--distributed.process", str(i)
            )
            for i in range(count)
        ]
    )


def losses(folder):
    return {r["step"]: r["loss"] for r in read_metrics(folder) if "loss" in r}


def errors(folder):
    return {r["step"]: r["test_error"] for r in read_metrics(folder) if "loss" not in r}


@pytest.mark.slow
@pytest.mark.parametrize("count,data,context", [(2, 1, 8), (2, 2, 4), (4, 2, 4)])
def test_processes_train_like_one(files, tmp_path, count, data, context):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(files=str(files), run="unused"))
    mesh = ["--devices", str(data), "--context", str(context)]
    one, many = tmp_path / "one", tmp_path / "many"
    finish([start(path, 8, *mesh, "--run", str(one))])
    outputs = together(path, count, 8 // count, *mesh, "--run", str(many))
    # One of them tells what is going on.
    assert "step 20" in outputs[0] and not any(outputs[1:])
    for read in (losses, errors):
        expected, actual = read(one), read(many)
        assert list(actual) == list(expected) and len(actual) >= 3
        np.testing.assert_allclose(
            list(actual.values()), list(expected.values()), rtol=1e-6
        )
    assert (many / "fields.png").exists()


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes(files, tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(files=str(files), run="unused"))
    whole, run = tmp_path / "whole", tmp_path / "run"
    finish([start(path, 8, "--context", "8", "--run", str(whole))])
    together(path, 2, 4, "--context", "8", "--run", str(run))
    # As if it had been killed after step 10.
    shutil.rmtree(run / "checkpoints" / "20")
    (run / "results.json").unlink()
    finish([start(path, 2, "--context", "2", "--run", str(run))])
    expected, actual = losses(whole), losses(run)
    assert list(actual) == list(expected)
    np.testing.assert_allclose(
        list(actual.values()), list(expected.values()), rtol=1e-6
    )
    final = json.loads((run / "results.json").read_text())["final"]
    assert final["step"] == 20


@pytest.mark.slow
def test_slurm_tells_the_processes(files, tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(files=str(files), run=str(tmp_path / "run")))
    port = free_address().rpartition(":")[2]
    cluster = {
        # JAX derives its port from the number of the job.
        "SLURM_JOB_ID": str(int(port) % 4096),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
    }
    auto = ["--context", "2", "--distributed.coordinator", "auto", "--epochs", "1"]
    outputs = finish(
        [
            start(path, 1, *auto, **cluster, SLURM_PROCID=str(i), SLURM_LOCALID=str(i))
            for i in range(2)
        ]
    )
    assert "mesh" in outputs[0] and "context 2" in outputs[0]
    assert (tmp_path / "run" / "results.json").exists()


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"coordinator": "here:1"}, "coordinator='here:1' needs the number"),
        ({"coordinator": "here:1", "processes": 2, "process": 2}, "process=2"),
        ({"coordinator": "here", "processes": 2, "process": 0}, "neither host:port"),
    ],
)
def test_processes_must_be_told(arguments, message):
    with pytest.raises(ValueError, match=message):
        parallel.start_processes(**{"processes": None, "process": None} | arguments)


@pytest.mark.parametrize("coordinator", [None, "auto"])
def test_numbers_need_an_address(coordinator):
    with pytest.raises(ValueError, match="processes=2 and process=0 need"):
        DistributedConfig(coordinator=coordinator, processes=2, process=0)


@pytest.mark.parametrize(
    "coordinator,message",
    [
        pytest.param("here:1", "needs the number of processes", marks=pytest.mark.slow),
        ("auto", "finds no cluster"),
    ],
)
def test_a_wrong_coordinator_exits(files, tmp_path, coordinator, message):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(files=str(files), run=str(tmp_path / "run")))
    process = start(path, 1, "--distributed.coordinator", coordinator)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and message in output, output
    assert not (tmp_path / "run").exists()
