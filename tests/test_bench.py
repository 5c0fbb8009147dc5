import functools
import json
import math
import threading
import types
import typing

import jax
import numpy as np
import pytest

from train import bench, models, scaling, sequences, timing
from train.config import ModelName
from train.flops import Collective

# The other mixers of the backbone are timed alone, which compiles faster.
ARCHITECTURES = ["mha", *models.MODELS]
SMALL = ("--channels", "12", "--heads", "2", "--latents", "3")
TINY = (*SMALL, "--repeats", "2")
STEPS = [
    f"flaxmix, {steps} a call{remat}" for steps in (1, 3) for remat in ("", ", remat")
]


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs a suite at tiny sizes and returns its report and what it printed."""
    monkeypatch.setattr(timing, "LEAST_SECONDS", 1e-3)

    def run(suite, *argv, sizes=TINY):
        path = tmp_path / "report" / f"{suite}.json"
        bench.main([suite, *sizes, *argv, "--json", str(path)])
        return json.loads(path.read_text()), capsys.readouterr()

    return run


def assert_plausible(row):
    # So small a call may leave the process as it is.
    row = {**row, "resident_bytes": 1 + row["resident_bytes"]}
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


@pytest.mark.slow
def test_relation_is_timed_against_its_plain_forms(run, tmp_path):
    picture = tmp_path / "pictures" / "relation.png"
    sizes = ("--heads", "2", "--width", "4", "--repeats", "2", "--plain-up-to", "8")
    lengths = ("--tokens", "7", "12", "--linear-tokens", "8", "9")
    report, printed = run("relation", *lengths, "--plot", str(picture), sizes=sizes)
    rows = [row for row in report["rows"] if row["name"] != "PyTorch attention"]
    full, linear = ("FlashRelation", "attention"), ("LinearRelation",)
    assert [(row["tokens"], row["name"]) for row in rows] == [
        *((7, name) for name in ("materialized", *full)),
        *((12, name) for name in full),
        *((8, name) for name in ("recurrence", *linear)),
        *((9, name) for name in linear),
    ]
    for row in rows:
        assert row["milliseconds"] > 0 and row["repeats"] == 2
        assert row["name"] in printed.out
    assert report["sizes"] == {"batch": 1, "heads": 2, "width": 4}
    assert picture.stat().st_size > 10_000


def test_relation_is_drawn_against_the_tokens(tmp_path):
    row = lambda family, name, tokens, ms, memory: {
        "family": family,
        "name": name,
        "tokens": tokens,
        "milliseconds": ms,
        "temporary_bytes": memory,
    }
    full, linear = "Full Relation", "Linear Relation"
    rows = [
        row(full, "FlashRelation", 1000, 5.0, 2**21),
        row(full, "FlashRelation", 2000, 20.0, 2**22),
        row(full, "PyTorch attention", 1000, 4.0, None),
        row(linear, "LinearRelation", 4000, 4.0, 2**20),
    ]
    figure = sequences.draw(rows, tmp_path / "new" / "picture.png")
    time, memory = figure.axes
    drawn = {line.get_label(): line for line in time.lines}
    assert list(drawn) == ["FlashRelation", "PyTorch attention", "LinearRelation"]
    np.testing.assert_allclose(
        drawn["FlashRelation"].get_xydata(), [[1000, 5], [2000, 10]]
    )
    assert drawn["LinearRelation"].get_linestyle() == "--"
    # What the memory of PyTorch is nobody knows.
    assert [line.get_label() for line in memory.lines] == [
        "FlashRelation",
        "LinearRelation",
    ]
    np.testing.assert_allclose(memory.lines[0].get_ydata(), [2, 4])
    assert [t.get_text() for t in time.get_xticklabels()] == ["1,000", "2,000", "4,000"]


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
    # At the end, how much memory a call takes.
    timed = ["slow", "quick", "quick"] * 3 + ["quick"] * 4
    assert order[2:] == [*timed, "slow", "quick"]
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
        (
            ("latent", "--points", "7", "0"),
            "steps_per_call=4 and points=(7, 0) must be positive",
        ),
        (("latent", "--channels", "9"), "heads=8 must divide channels=9"),
        (("latent", "--latents", "0"), "latents must be at least 1, got 0"),
        (("latent", "--repeats", "0"), "repeats must be at least 1, got 0"),
        (("context", "--channels", "9"), "heads=8 must divide channels=9"),
        (("context", "--shards", "2", "0"), "shards=(2, 0) must be positive"),
        (
            ("context", "--utilisation", "0"),
            "utilisation=(0.0,) must be parts of the peak",
        ),
        (
            ("context", *SMALL, "--blocks", "1", "--points", "8", "--shards", "3"),
            "8 points do not come out even over 3 devices",
        ),
        (
            ("context", *SMALL, "--name", "mha", "--points", "8", "--shards", "2"),
            "name='mha': its points travel",
        ),
    ],
)
def test_what_is_wrong_is_said(capsys, argv, message):
    with pytest.raises(SystemExit) as exit:
        bench.main(list(argv))
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_latent_suite_has_a_row_for_each_form(run):
    report, printed = run("latent", "--points", "7", "--batch", "2")
    rows = [row for row in report["rows"] if row["name"] != "PyTorch"]
    assert [(r["points"], r["name"]) for r in rows] == [
        (7, "flaxmix, 1 a call"),
        (7, "flaxmix, 4 a call"),
        (7, "materialised"),
    ]
    for row in rows:
        assert_plausible(row)
    assert report["sizes"] == {"batch": 2, "channels": 12, "heads": 2, "latents": 3}
    assert "FLARE++ mixer, forward and backward: N 7, batch 2" in printed.out


def test_context_suite_says_that_it_models(run):
    options = "--points", "24", "48", "--blocks", "3", "--shards", "2", "12"
    report, printed = run(
        "context", *options, "--utilisation", "0.1", "0.5", sizes=SMALL
    )
    rows = report["rows"]
    assert [(r["points"], r["devices"]) for r in rows] == [
        (24, 2),
        (24, 12),
        (48, 2),
        (48, 12),
    ]
    assert report["suite"] == "context" and report["sizes"]["blocks"] == 3
    # What is sent depends neither on points nor on devices; the work is shared.
    assert len({(r["bytes"], r["collectives"]) for r in rows}) == 1
    assert rows[0]["bytes"] > 0
    assert rows[1]["flops"] < rows[0]["flops"] < rows[2]["flops"]
    for row in rows:
        found = row["modelled_efficiency"]
        assert set(found) == {"0.1", "0.5"}
        # What arithmetic gains, exchanges do not.
        assert 0 < found["0.5"] < found["0.1"] < 1
    assert "MODELLED" in printed.out and "Assumed, not measured" in printed.out


def test_modelled_seconds_by_hand():
    exchanged = [
        Collective("maximum", (10,), 1000, 6),
        Collective("sum", (10, 9), 9000, 6),
        Collective("sum", (7,), 4000, 1),
        Collective("sum", (9,), 6000, 1),
    ]
    work = 989e12 / 5
    seconds = functools.partial(scaling.modelled_seconds, work, exchanged)
    # A fifth of the peak's second at half of the peak.
    np.testing.assert_allclose(seconds(1, 0.5), 0.4)
    # 70,000 bytes, of which 2 (R - 1) / R go through a link; 6 + 6 + 1 latencies.
    node = 13 * 10e-6 + 7 / 4 * 70e3 / 450e9
    np.testing.assert_allclose(seconds(8, 0.5), 0.4 + node)
    network = 13 * 30e-6 + 30 / 16 * 70e3 / 50e9
    np.testing.assert_allclose(seconds(16, 0.25), 0.8 + network)
    np.testing.assert_allclose(seconds(8, 0.5) - seconds(1, 0.5), node)


def test_growth_sees_what_a_call_frees_again():
    size = 100 * 2**20
    # The sum reads all of it while it is watched.
    grown = timing._growth(lambda: np.ones(size, np.uint8).sum())
    assert 0.9 * size < grown < 1.5 * size
    assert timing._growth(lambda: None) < 0.1 * size


def test_growth_ends_with_a_call_that_fails():
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        timing._growth(lambda: 1 / 0)
    assert threading.active_count() == threads


def test_growth_is_unknown_where_the_system_does_not_tell(monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr("builtins.open", missing)
    assert timing._growth(lambda: None) is None
