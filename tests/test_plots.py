"""Training curves, field panels and error distributions."""

import math
import re
import threading

import matplotlib.pyplot
import numpy as np
import pytest
from matplotlib.image import imread

from train.plots import NO_DATA, _triangulate, curves, errors, fields

TURN = 2 * np.pi


def ring(radius, *, wobble=0.0, around=54, outward=18, jitter=0.0):
    """Points of an O-mesh in the unit square, finer at the hole, and the hole.

    The hole, around the centre, has radius (1 + wobble cos 3t) at the angle t.
    """
    t = np.arange(around) * TURN / around
    inner = radius * (1 + wobble * np.cos(3 * t))
    outer = 0.5 / np.maximum(np.abs(np.cos(t)), np.abs(np.sin(t)))
    share = np.linspace(0, 1, outward)[:, None] ** 1.5
    r = inner * (1 - share) + outer * share
    xy = 0.5 + np.stack([r * np.cos(t), r * np.sin(t)], -1).reshape(-1, 2)
    noise = np.random.default_rng(0).uniform(-1, 1, xy.shape)
    noise *= np.repeat(share, around, axis=0)  # none at the hole's edge
    xy = np.clip(xy + jitter * noise * radius * TURN / around, 0, 1)

    def hole(points):
        x, y = (points - 0.5).T
        return np.hypot(x, y) < radius * (1 + wobble * np.cos(3 * np.arctan2(y, x)))

    return xy, hole


def square(rows, columns):
    axes = np.linspace(0, 1, rows), np.linspace(0, 1, columns)
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)


def draw(path, xy, truth, predictions, **kwargs):
    options = {"quantity": "stress (MPa)", "grid": None, "title": "Plate"} | kwargs
    return fields(xy, truth, predictions, path, **options)


def panels(figure):
    """The axes of a fields figure, without its two colour bars, and these."""
    axes = [ax for ax in figure.axes if not ax.get_label() == "<colorbar>"]
    bars = [ax for ax in figure.axes if ax.get_label() == "<colorbar>"]
    return np.reshape(axes, (2, -1)), bars


def limits(ax):
    return ax.collections[0].get_clim()


def pixels(path):
    picture = imread(path)[..., :3]
    assert picture.std() > 0.02  # or it is blank
    return picture


@pytest.fixture(autouse=True)
def no_pyplot():
    yield
    assert matplotlib.pyplot.get_fignums() == []


ROWS = [
    {"step": s, "loss": 1 / s, "learning_rate": 1e-3, "beta1": 0.9, "grad_norm": s}
    for s in range(1, 50)
] + [
    {"step": 20, "test_error": 0.5, "ema_test_error": 0.25, "train_error": 0.1},
    {"step": 40, "test_error": 0.4, "validation_error": 0.3},
]


def test_curves_have_a_panel_for_each_quantity(tmp_path):
    figure = curves(ROWS, tmp_path / "new" / "curves.png")
    loss, error, rate, norm, momentum = figure.axes
    labels = [ax.get_ylabel() for ax in figure.axes]
    assert labels[:2] == ["loss", "relative $L^2$ error (%)"]
    assert labels[2:4] == ["learning rate", "gradient norm"] and "beta" in labels[4]
    assert {ax.get_xlabel() for ax in figure.axes[:4]} == {"step"}
    scales = [ax.get_yscale() for ax in figure.axes]
    assert scales == ["log", "log", "linear", "log", "linear"]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in error.lines}
    assert drawn["test, last 40 %"] == [[20, 50], [40, 40]]
    assert drawn["test, averaged weights, last 25 %"] == [[20, 25]]
    assert len(drawn) == 4 and len({line.get_color() for line in error.lines}) == 4
    assert len(error.get_legend().get_texts()) == 4
    assert len(loss.lines[0].get_xydata()) == len(norm.lines[0].get_xydata()) == 49
    np.testing.assert_array_equal(momentum.lines[0].get_ydata(), 0.9)
    assert pixels(tmp_path / "new" / "curves.png").shape[:2] == (1020, 1500)


def test_missing_metrics_are_not_drawn(tmp_path):
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "grad_norm": 3.0}]
    figure = curves(rows, tmp_path / "curves.png")
    assert [ax.get_ylabel() for ax in figure.axes] == ["loss", "gradient norm"]
    figure = curves(rows + ROWS[-1:], tmp_path / "curves.png")
    assert [ax.axison for ax in figure.axes] == [True, True, True, False]


def test_values_that_an_axis_cannot_show_are_skipped(tmp_path):
    losses = [1.0, math.nan, math.inf, -math.inf, 0.0, -1.0, 2.0]
    rows = [{"step": s, "loss": v, "learning_rate": v} for s, v in enumerate(losses)]
    figure = curves(rows, tmp_path / "curves.png")
    loss, rate = (ax.lines[0].get_xydata().tolist() for ax in figure.axes)
    assert loss == [[0, 1], [6, 2]]
    assert rate == [[0, 1], [4, 0], [5, -1], [6, 2]]


def test_long_curves_are_means_in_a_band(tmp_path):
    values = np.where(np.arange(4000) % 2, 1.0, 3.0)
    values[2000] = 100
    rows = [{"step": s, "loss": v} for s, v in enumerate(values)]
    (ax,) = curves(rows, tmp_path / "curves.png").axes
    line = ax.lines[0].get_xydata()
    assert line.shape == (1000, 2)
    np.testing.assert_allclose(np.delete(line[:, 1], 500), 2)
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == 1 and band.max() == 100


@pytest.mark.parametrize("rows", [[], [{"step": 1}], [{"step": 1, "loss": math.nan}]])
def test_curves_need_something_to_draw(tmp_path, rows):
    with pytest.raises(ValueError, match=f"no metrics to draw in {len(rows)} rows"):
        curves(rows, tmp_path / "curves.png")


@pytest.mark.parametrize("radius", [0.2, 0.3, 0.4])
@pytest.mark.parametrize("shape", [{}, {"wobble": 0.2}, {"jitter": 0.5}])
def test_holes_are_left_out_and_hardly_anything_else(radius, shape):
    xy, hole = ring(radius, **shape)
    assert xy.shape == (972, 2)
    inside = _triangulate(xy).get_trifinder()
    places = square(150, 150)
    places = places[np.abs(places - 0.5).max(1) < 0.47]  # an O-mesh cuts the corners
    covered = inside(*places.T) >= 0
    assert covered[hole(places)].mean() < 0.02  # a chord's width along the border
    assert covered[~hole(places)].mean() > 0.98


@pytest.mark.parametrize("xy", [square(31, 31), square(20, 50), square(3, 3)])
def test_clouds_without_a_hole_are_whole(xy):
    triangles = _triangulate(xy)
    assert triangles.mask is None or not triangles.mask.any()


def test_hole_is_grey_in_the_picture(tmp_path):
    xy, _ = ring(0.3)
    figure = draw(tmp_path / "f.png", xy, 1 + xy[:, 0], {"a": 1.1 + xy[:, 0]})
    picture = pixels(tmp_path / "f.png")
    axes, _ = panels(figure)
    for ax in (axes[0, 0], axes[0, 1], axes[1, 1]):
        (x, y), (u, v) = (ax.transData.transform(p) for p in [(0.5, 0.5), (0.1, 0.5)])
        scale = 150 / figure.dpi
        centre = picture[round(-y * scale) - 1, round(x * scale)]
        side = picture[round(-v * scale) - 1, round(u * scale)]
        np.testing.assert_allclose(centre, float(NO_DATA), atol=0.01)
        assert np.ptp(side) > 0.1


def test_panels_share_scales_and_state_the_relative_error(tmp_path):
    xy, _ = ring(0.25)
    rng = np.random.default_rng(1)
    truth = 3 + np.sin(5 * xy[:, 0])
    noise = rng.normal(size=(2, len(xy)))
    predictions = {"small": truth + 0.01 * noise[0], "large": truth + 0.1 * noise[1]}
    figure = draw(tmp_path / "f.png", xy, truth, predictions)
    axes, bars = panels(figure)
    assert {limits(ax) for ax in axes[0]} == {(truth.min(), truth.max())}
    rms = np.sqrt((truth**2).mean())
    bound = np.percentile(100 * np.abs(predictions["large"] - truth) / rms, 99.5)
    for ax in axes[1, 1:]:
        assert limits(ax) == pytest.approx((-bound, bound))
    assert [ax.get_title() for ax in axes[0]] == ["truth", "small", "large"]
    for ax, prediction in zip(axes[1, 1:], predictions.values(), strict=True):
        error = np.linalg.norm(prediction - truth) / np.linalg.norm(truth)
        assert ax.get_title() == f"relative $L^2$ error {100 * error:.3g} %"
        drawn = ax.collections[0].get_array()
        np.testing.assert_allclose(drawn, 100 * (prediction - truth) / rms)
        assert ax.collections[0].get_cmap().name == "RdBu_r"  # red is too much
    assert not axes[1, 0].axison
    assert bars[0].get_xlabel() == "stress (MPa)"
    assert bars[1].get_xlabel() == "error / RMS of truth (%)"
    assert figure.get_suptitle() == "Plate"


@pytest.mark.parametrize("models", [1, 4])
def test_one_or_four_models_on_a_grid(tmp_path, models):
    xy = square(11, 7)
    truth = np.sin(3 * xy[:, 0]) + xy[:, 1]
    predictions = {f"model {i}": truth + 0.01 * i for i in range(1, models + 1)}
    figure = draw(tmp_path / "f.png", xy, truth, predictions, grid=(11, 7))
    axes, bars = panels(figure)
    assert axes.shape == (2, 1 + models) and len(bars) == 2
    drawn = axes[0, 0].collections[0]
    np.testing.assert_array_equal(drawn.get_coordinates(), xy.reshape(11, 7, 2))
    np.testing.assert_array_equal(drawn.get_array(), truth.reshape(11, 7))
    pixels(tmp_path / "f.png")


@pytest.mark.parametrize(
    ("grid", "constant", "exact"),
    [
        (None, 0.0, False),
        (None, -5.0, True),
        ((9, 9), 0.0, True),
        ((9, 9), -5.0, False),
    ],
)
def test_constant_truth(tmp_path, grid, constant, exact):
    xy = square(9, 9)
    truth = np.full(81, constant, np.float32)
    prediction = truth if exact else truth + 0.5 * xy[:, 0]
    axes, bars = panels(
        draw(tmp_path / "f.png", xy, truth, {"a": prediction}, grid=grid)
    )
    low, high = limits(axes[0, 0])
    assert low <= constant < high
    title = axes[1, 1].get_title()
    error = math.sqrt(((prediction - truth) ** 2).mean())
    if constant == 0:  # no RMS to divide by: in units of the quantity
        assert title == f"relative $L^2$ error {error:.3g}"
        assert bars[1].get_xlabel() == "error in stress (MPa)"
    else:
        assert title == f"relative $L^2$ error {100 * error / 5:.3g} %"
    assert limits(axes[1, 1])[1] > 0


@pytest.mark.parametrize(
    ("grid", "bad"), [(None, math.nan), (None, math.inf), ((9, 9), math.nan)]
)
def test_diverged_predictions_are_drawn_grey(tmp_path, grid, bad):
    xy = square(9, 9)
    truth = 1 + xy[:, 0]
    good, part, whole = truth + 0.1, truth + 0.1, np.full(81, math.nan)
    part[30:40] = bad
    predictions = {"good": good, "part": part, "whole": whole}
    axes, _ = panels(draw(tmp_path / "f.png", xy, truth, predictions, grid=grid))
    assert limits(axes[0, 2]) == (1, 2)
    rms = np.sqrt((truth**2).mean())
    assert limits(axes[1, 2])[1] == pytest.approx(10 / rms)
    assert axes[1, 2].get_title() == f"relative $L^2$ error {bad} %"


XY = square(3, 3)


@pytest.mark.parametrize(
    ("xy", "truth", "predictions", "grid", "message"),
    [
        (XY, np.ones(9), {}, None, "predictions must have at least one model"),
        (np.ones((9, 3)), np.ones(9), {"a": np.ones(9)}, None, "[N, 2], got [9, 3]"),
        (XY, np.ones(8), {"a": np.ones(9)}, None, "truth must be [9] like coordinates"),
        (XY, np.ones(9), {"a": np.ones((9, 1))}, None, "a must be [9] like"),
        (XY, np.ones(9), {"a": np.ones(9)}, (3, 4), "(3, 4) does not have 9 points"),
    ],
)
def test_fields_that_do_not_match(tmp_path, xy, truth, predictions, grid, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        draw(tmp_path / "f.png", xy, truth, predictions, grid=grid)


def test_error_distribution_is_sorted_and_in_percent(tmp_path):
    samples = {"a": np.array([0.04, 0.01, 0.03, 0.02]), "b": np.full(7, 0.5)}
    figure = errors(samples, tmp_path / "errors.png")
    (ax,) = figure.axes
    a, b = ax.lines
    np.testing.assert_allclose(a.get_xydata(), [[25, 1], [50, 2], [75, 3], [100, 4]])
    assert (a.get_label(), b.get_label()) == ("a, mean 2.5 %", "b, mean 50 %")
    assert ax.get_yscale() == "log" and ax.get_ylabel() == "relative $L^2$ error (%)"
    assert a.get_color() != b.get_color() and a.get_linestyle() != b.get_linestyle()
    pixels(tmp_path / "errors.png")


def test_zero_and_infinite_errors(tmp_path):
    samples = {"a": np.array([0.0, math.nan, 0.1, math.inf])}
    (ax,) = errors(samples, tmp_path / "errors.png").axes
    assert ax.get_yscale() == "linear"
    assert ax.lines[0].get_label() == "a, mean 5 % (2 not finite)"


def test_errors_need_something_to_draw(tmp_path):
    with pytest.raises(ValueError, match="per_sample must have at least one model"):
        errors({}, tmp_path / "errors.png")
    with pytest.raises(ValueError, match="a has no finite error of 2"):
        errors({"a": np.array([math.nan, math.inf])}, tmp_path / "errors.png")


def test_threads_may_draw_at_once(tmp_path):
    xy = square(9, 9)

    def work(index):
        draw(tmp_path / f"{index}.png", xy, xy[:, 0], {"a": xy[:, 0] + 1}, grid=(9, 9))

    work("alone")
    threads = [threading.Thread(target=work, args=[index]) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = pixels(tmp_path / "alone.png")
    for index in range(2):
        np.testing.assert_array_equal(pixels(tmp_path / f"{index}.png"), expected)
