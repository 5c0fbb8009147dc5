import json
import math
import types
import typing

import jax
import numpy as np
import pytest

from train import bench, models, timing
from train.config import ModelName

# The other mixers of the backbone are timed alone, which compiles faster.
ARCHITECTURES = ["mha", *models.MODELS]
TINY = ("--channels", "12", "--heads", "2", "--latents", "3", "--repeats", "2")
STEPS = [
    f"flaxmix, {steps} a call{remat}" for steps in (1, 3) for remat in ("", ", remat")
]


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs a suite at tiny sizes and returns its report and what it printed."""
    monkeypatch.setattr(timing, "LEAST_SECONDS", 1e-3)

    def run(suite, *argv):
        path = tmp_path / "report" / f"{suite}.json"
        bench.main([suite, *TINY, *argv, "--json", str(path)])
        return json.loads(path.read_text()), capsys.readouterr()

    return run


def assert_plausible(row):
    numbers = {k: v for k, v in row.items() if k not in ("name", "quartiles")}
    for name, value in numbers.items():
        assert math.isfinite(value) and value > 0, (row["name"], name, value)
    low, high = row["quartiles"]
    assert 0 < low <= row["milliseconds"] <= high < math.inf
    assert row["repeats"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "suite, names, argv",
    [
        ("mixers", list(bench.MIXERS), ("--points", "7", "--batch", "2")),
        (
            "models",
            ARCHITECTURES,
            ("--points", "7", "--blocks", "1", "--names", *ARCHITECTURES),
        ),
        (
            "surrogate",
            STEPS,
            ("--points", "7", "--blocks", "1", "--steps-per-call", "3"),
        ),
    ],
)
def test_a_suite_times_every_name(run, suite, names, argv):
    report, printed = run(suite, *argv)
    rows = [row for row in report["rows"] if row["name"] != "PyTorch"]
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert_plausible(row)
        assert row["name"] in printed.out and f"{row['parameters']:,}" in printed.out
    assert report["suite"] == suite and report["sizes"]["latents"] == 3
    assert report["machine"]["jax"] == jax.__version__
    assert report["machine"]["cores"] > 0
    assert "done" in printed.err and "done" not in printed.out


def test_all_models_that_a_config_can_name_are_there():
    assert set(bench.MODELS) == set(typing.get_args(ModelName))
    assert set(bench.MIXERS) < set(bench.MODELS)
    assert bench.MODELS[0] == next(iter(bench.MIXERS)) == "mha"


def test_a_table_for_each_number_of_points_against_the_first_name(run):
    report, printed = run("mixers", "--points", "5", "11", "--names", "luna", "mha")
    rows = report["rows"]
    assert [(row["points"], row["name"]) for row in rows] == [
        (points, name) for points in (5, 11) for name in ("luna", "mha")
    ]
    for first, second in (rows[:2], rows[2:]):
        assert first["ratio"] == first["temporary_ratio"] == 1
        for ratio, value in (
            ("ratio", "milliseconds"),
            ("temporary_ratio", "temporary_bytes"),
        ):
            np.testing.assert_allclose(second[ratio], second[value] / first[value])
    assert "points 5," in printed.out and "points 11," in printed.out
    assert printed.out.count("Ratios are to luna.") == 2


def test_a_pass_returns_the_gradients_of_all_parameters_and_inputs():
    sizes = {"batch": 2, "channels": 8, "heads": 2, "latents": 3}
    one = bench._mixer("luna", 5, **sizes)
    (x, p), (module, inputs) = one.call()
    assert x.shape == (2, 5, 8) and p.shape == (2, 3, 8)
    leaves = jax.tree.leaves(module)
    assert sum(leaf.size for leaf in leaves) == one.parameters
    assert [i.shape for i in inputs] == [(2, 5, 8), (2, 3, 8)]
    for gradient in (*leaves, *inputs):
        assert np.isfinite(gradient).all()
    for gradient in inputs:
        assert np.any(gradient != 0)


def test_contenders_take_turns_within_their_time(monkeypatch, capsys):
    now, order = [0.0], []
    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(timing, "time", clock)

    def contender(name, seconds, **about):
        def call():
            order.append(name)
            now[0] += seconds

        return lambda: timing.Contender(call, 5, **about)

    slow, quick = contender("slow", 8), contender("quick", 0.04, steps=4)
    contenders = {"slow": slow, "quick": quick}
    rows = timing.race("title", contenders, repeats=5, seconds=20)
    assert order[2:] == ["slow", "quick", "quick"] * 3 + ["quick"] * 4
    assert [row.repeats for row in rows] == [3, 5]
    np.testing.assert_allclose([row.milliseconds for row in rows], [8000, 10])
    np.testing.assert_allclose(rows[1].ratio, 10 / 8000)
    assert rows[0].temporary_bytes is rows[1].temporary_ratio is None
    assert "8,000 - 8,000" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        (("mixers", "--names", "lno"), "no 'lno' in mixers; there are mha, flare"),
        (("models", "--channels", "9"), "heads=8 must divide channels=9"),
        (("mixers", "--channels", "9"), "heads=8 must divide channels=9"),
        (("mixers", "--repeats", "0"), "repeats must be at least 1, got 0"),
        (("others",), "others"),
    ],
)
def test_what_is_wrong_is_said(capsys, argv, message):
    with pytest.raises(SystemExit) as exit:
        bench.main(list(argv))
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
