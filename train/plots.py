"""Pictures of a run: training curves, predicted fields, errors of the samples.

Figures are made without pyplot, whose state is global, so that a worker thread may
draw. Each function writes the picture and returns the `Figure`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator
from matplotlib.tri import Triangulation
from scipy.spatial import KDTree

# Okabe and Ito's colours, told apart with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
NO_DATA = "0.75"
POINTS = 1000  # drawn of a curve; more are averaged

PANELS = (  # axis label, axis scale, metric -> name
    ("loss", "log", {"loss": "loss"}),
    (
        "relative $L^2$ error (%)",
        "log",
        {
            "test_error": "test",
            "ema_test_error": "test, averaged weights",
            "validation_error": "validation",
            "train_error": "training",
        },
    ),
    ("learning rate", "linear", {"learning_rate": "learning rate"}),
    ("gradient norm", "log", {"grad_norm": "gradient norm"}),
)


def curves(rows: Sequence[Mapping[str, float]], path: Path) -> Figure:
    """Draws loss, errors, learning rate and gradient norm against the step.

    A panel for each entry of `PANELS` that has data; errors are fractions, drawn in
    percent, and "beta1" goes with the learning rate. Values that are not finite are
    left out, and so are those that are not positive on a logarithmic axis. A curve of
    more than 1000 points is drawn as the mean of groups of steps, in a band from
    their least to their greatest value.

    Args:
        rows: as from `log.read_metrics`, in the order of steps.
        path: of the picture; its suffix gives the format.

    Raises:
        ValueError: if no row has anything to draw.
    """
    panels = []
    for label, scale, names in PANELS:
        drawn = {name: _curve(rows, key, scale) for key, name in names.items()}
        drawn = {name: curve for name, curve in drawn.items() if curve.size}
        if drawn:
            panels.append((label, scale, drawn))
    if not panels:
        raise ValueError(f"no metrics to draw in {len(rows)} rows.")
    columns, lines = min(len(panels), 2), -(-len(panels) // 2)
    figure = Figure((5 * columns, 3.4 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    for ax, (label, scale, drawn) in zip(axes, panels, strict=False):
        ax.set(xlabel="step", ylabel=label)
        grid(ax, scale)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        factor, unit = (100, " %") if "%" in label else (1, "")
        for colour, (name, curve) in zip(COLOURS, drawn.items(), strict=False):
            curve = curve * [[1], [factor]]
            last = f"{name}, last {curve[1, -1]:.3g}{unit}"
            _draw(ax, curve, color=colour, label=last)
        if scale == "log":
            ax.legend(fontsize=8)
        beta = _curve(rows, "beta1", "linear")
        if label == "learning rate" and beta.size:
            twin = ax.twinx()
            twin.set_ylabel(r"momentum $\beta_1$ (dashed)", color=COLOURS[1])
            _draw(twin, beta, color=COLOURS[1], linestyle="--")
    return _save(figure, path)


def fields(
    coordinates: np.ndarray,
    truth: np.ndarray,
    predictions: Mapping[str, np.ndarray],
    path: Path,
    *,
    quantity: str,
    grid: tuple[int, int] | None,
    title: str,
) -> Figure:
    """Draws a field, its predictions, and below each its signed pointwise error.

    The error of a point is (prediction - truth) / RMS(truth), so the RMS of an error
    panel, in its title, is the relative L2 error of the prediction. Of a zero truth
    it is prediction - truth, in units of the quantity.

    All panels of a row have one colour scale: above, the range of the truth (or, if
    it is constant, of the first prediction that is not); below, plus or minus the
    99.5th percentile of the worst prediction's absolute error. What is beyond has the
    colour of the end. Grey is where there are no data: outside the points, in holes
    between them (see `_triangulate`), and at values that are not finite.

    Args:
        coordinates: [N, 2] where the points are.
        truth: [N].
        predictions: name of each model -> [N].
        path: of the picture; its suffix gives the format.
        quantity: what the field is, with its symbol and units.
        grid: (rows, columns) if the points are a row-major grid, which may be curved;
            None to triangulate them.
        title: of the picture.

    Raises:
        ValueError: if there are no predictions, or shapes do not match.
    """
    xy, truth = np.asarray(coordinates, np.float64), np.asarray(truth, np.float64)
    models = {k: np.asarray(v, np.float64) for k, v in predictions.items()}
    if not models:
        raise ValueError("predictions must have at least one model, got none.")
    if xy.ndim != 2 or xy.shape[1] != 2:
        raise ValueError(f"coordinates must be [N, 2], got {list(xy.shape)}.")
    for name, field in {"truth": truth, **models}.items():
        if field.shape != xy.shape[:1]:
            raise ValueError(
                f"{name} must be [{len(xy)}] like coordinates, got {list(field.shape)}."
            )
    if grid and grid[0] * grid[1] != len(xy):
        raise ValueError(f"grid {grid} does not have {len(xy)} points.")
    rms = _rms(truth)
    factor, unit = (100 / rms, " %") if rms > 0 else (1.0, "")
    relative = {name: (field - truth) * factor for name, field in models.items()}

    field_scale = {"cmap": _colours("viridis"), **_range(truth, *models.values())}
    limit = max(_percentile(error, 99.5) for error in relative.values()) or 1.0
    error_scale = {"cmap": _colours("RdBu_r"), "vmin": -limit, "vmax": limit}
    width, height = np.ptp(xy, axis=0)
    columns = 1 + len(models)
    panel = 3 * min(height / max(width, 1e-30), 1.5)
    figure = Figure((3 * columns, 2 * panel + 2.4), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, columns)
    mesh = None if grid else _triangulate(xy)
    image = _paint(axes[0, 0], xy, truth, grid, mesh, field_scale)
    axes[0, 0].set_title("truth")
    axes[1, 0].set_axis_off()
    for ax, (name, field) in zip(axes[0, 1:], models.items(), strict=True):
        _paint(ax, xy, field, grid, mesh, field_scale)
        ax.set_title(name)
    _bar(figure, image, axes[0], quantity, [truth, *models.values()])
    for ax, error in zip(axes[1, 1:], relative.values(), strict=True):
        image = _paint(ax, xy, error, grid, mesh, error_scale)
        ax.set_title(f"relative $L^2$ error {_rms(error):.3g}{unit}")
    label = "error / RMS of truth (%)" if unit else f"error in {quantity}"
    _bar(figure, image, axes[1, 1:], label, list(relative.values()))
    return _save(figure, path)


def errors(per_sample: Mapping[str, np.ndarray], path: Path) -> Figure:
    """Draws the relative L2 errors of the samples, sorted, one curve a model.

    A point (p, e) says that p percent of the samples have an error of at most e. The
    error axis is logarithmic unless an error is zero.

    Args:
        per_sample: name of each model -> [S] errors as fractions. Values that are not
            finite are counted in the legend, and are in neither curve nor mean.
        path: of the picture; its suffix gives the format.

    Raises:
        ValueError: if a model has no finite error, or there is no model.
    """
    if not per_sample:
        raise ValueError("per_sample must have at least one model, got none.")
    figure = Figure((6, 4), layout="constrained")
    ax = figure.subplots()
    ax.set(xlabel="samples (%)", ylabel="relative $L^2$ error (%)", xlim=(0, 100))
    logarithmic = True
    for index, (name, values) in enumerate(per_sample.items()):
        values = 100 * np.asarray(values, np.float64)
        finite = np.sort(values[np.isfinite(values)])
        if not finite.size:
            raise ValueError(f"{name} has no finite error of {values.size}.")
        label = f"{name}, mean {finite.mean():.3g} %"
        if finite.size < values.size:
            label += f" ({values.size - finite.size} not finite)"
        share = 100 * (np.arange(finite.size) + 1) / finite.size
        ax.plot(
            share,
            finite,
            color=COLOURS[index % len(COLOURS)],
            linestyle=("-", "--", "-.", ":")[index % 4],
            marker="." if finite.size < 30 else None,
            label=label,
        )
        logarithmic &= bool(finite[0] > 0)
    grid(ax, "log" if logarithmic else "linear")
    ax.legend()
    return _save(figure, path)


def _curve(rows: Sequence[Mapping[str, float]], key: str, scale: str) -> np.ndarray:
    """Steps and values [2, n] of one metric, those that the scale can show."""
    pairs = [(row["step"], row[key]) for row in rows if key in row]
    curve = np.array(pairs, np.float64).reshape(-1, 2).T
    return curve[:, np.isfinite(curve[1]) & ((curve[1] > 0) | (scale == "linear"))]


def _draw(ax: Axes, curve: np.ndarray, **style) -> None:
    if curve.shape[1] > POINTS:
        parts = np.array_split(curve, POINTS, axis=1)
        curve = np.array([part.mean(1) for part in parts]).T
        least, most = ([f(part[1]) for part in parts] for f in (np.min, np.max))
        ax.fill_between(curve[0], least, most, alpha=0.25, lw=0, color=style["color"])
    ax.plot(*curve, marker="." if curve.shape[1] < 30 else None, **style)


def grid(ax: Axes, scale: str) -> None:
    """A grey grid, and a vertical axis labelled in plain numbers."""
    ax.grid(True, color="0.9")
    ax.set_yscale(scale)
    if scale == "log":
        ax.yaxis.set_major_formatter(_Plain())
        ax.yaxis.set_minor_formatter(_Plain(minor_thresholds=(2, 0.5)))


class _Plain(LogFormatter):
    """Labels the ticks that LogFormatter would, with 0.2 and not 2e-01."""

    def __call__(self, x, pos=None):
        return f"{x:g}" if super().__call__(x, pos) else ""


def _triangulate(xy: np.ndarray) -> Triangulation:
    """Delaunay triangles of points [N, 2], without those that span a hole.

    A triangle is left out if its circumradius is over 1.5 times the distance from one
    of its corners to the eighth nearest point (the largest of the three corners): no
    points lie within that circle, although a regular mesh of the spacing there has
    its ring of eight neighbours well inside. Slivers along the border are left out
    too.
    """
    mesh = Triangulation(*xy.T)
    corners = xy[mesh.triangles]
    edges = np.linalg.norm(corners - np.roll(corners, 1, axis=1), axis=-1)
    (a, b), (c, d) = (
        (corners[:, 1] - corners[:, 0]).T,
        (corners[:, 2] - corners[:, 0]).T,
    )
    area = np.abs(a * d - b * c) / 2
    radius = edges.prod(1) / np.maximum(4 * area, 1e-300)
    spacing = KDTree(xy).query(xy, 9)[0][:, -1]  # the nearest is the point itself
    mesh.set_mask(radius > 1.5 * spacing[mesh.triangles].max(1))
    return mesh


def _paint(ax: Axes, xy, values, grid, mesh, scale):
    """Draws one panel and returns its image, for a colour bar."""
    ax.set(facecolor=NO_DATA, aspect="equal", xticks=[], yticks=[])
    ax.margins(0.02)
    for spine in ax.spines.values():
        spine.set_visible(False)
    if grid:
        x, y, z = (a.reshape(grid) for a in (*xy.T, values))
        return ax.pcolormesh(x, y, z, shading="gouraud", **scale)
    return ax.tripcolor(mesh, values, shading="gouraud", **scale)


def _range(*fields: np.ndarray) -> dict[str, float]:
    """Colour limits: the range of the first field that is not constant, or any."""
    for field in fields:
        finite = field[np.isfinite(field)]
        if finite.size and np.ptp(finite) > 1e-9 * np.abs(finite).max():
            return {"vmin": finite.min(), "vmax": finite.max()}
    middle = float(np.nan_to_num(fields[0]).mean())
    return {"vmin": middle - 1, "vmax": middle + 1}


def _percentile(error: np.ndarray, percent: float) -> float:
    finite = np.abs(error[np.isfinite(error)])
    return float(np.percentile(finite, percent)) if finite.size else 0.0


def _colours(name: str) -> Colormap:
    return matplotlib.colormaps[name].with_extremes(bad=NO_DATA)


def _bar(figure: Figure, image, axes: np.ndarray, label: str, values) -> None:
    """A colour bar below a row, with pointed ends where values are beyond it."""
    low, high = image.get_clim()
    beyond = np.less(values, low).any() + 2 * np.greater(values, high).any()
    extend = ("neither", "min", "max", "both")[beyond]
    style = {"location": "bottom", "aspect": 15 * len(axes), "shrink": 0.7}
    figure.colorbar(image, ax=axes.tolist(), label=label, extend=extend, **style)


def _rms(field: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(field))))


def _save(figure: Figure, path: Path) -> Figure:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return figure
