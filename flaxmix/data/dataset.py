"""Samples, normalisers, and the data set that a training run is given."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

Sample = dict[str, np.ndarray]
"""One mesh: `x [N, c_in]` inputs and `y [N, c_out]` targets, float32."""


@dataclasses.dataclass(frozen=True)
class Normalizer:
    """Per-channel affine map to zero mean and unit variance.

    encode(a) = (a - mean) / std and decode(a) = a std + mean, with `mean` and
    `std` of shape [c]. They work on NumPy and JAX arrays alike.
    """

    mean: np.ndarray
    std: np.ndarray

    @classmethod
    def fit(cls, fields: Iterable[np.ndarray]) -> "Normalizer":
        """Fits mean and unbiased standard deviation (+ 1e-8) over all points.

        Statistics are taken in float64 in two passes, so a small fluctuation on
        a large mean keeps its digits. Meshes may differ in size: each point has
        equal weight.

        Args:
            fields: arrays [..., c], one for each mesh or stacked; iterated twice.

        Raises:
            ValueError: if there are fewer than two points, or a value is not finite.
        """
        fields = [np.asarray(f).reshape(-1, np.shape(f)[-1]) for f in fields]
        count = sum(len(f) for f in fields)
        if count < 2:
            raise ValueError(f"a normaliser needs at least two points, got {count}.")
        sums = np.stack([f.sum(0, dtype=np.float64) for f in fields])
        mean = sums.sum(0) / count
        if not np.isfinite(mean).all():
            raise ValueError(f"cannot normalise fields with mean {mean.tolist()}.")
        square = sum(np.square(f.astype(np.float64) - mean).sum(0) for f in fields)
        return cls(mean, np.sqrt(square / (count - 1)) + 1e-8)

    def encode(self, a):
        return (a - self.mean.astype(a.dtype)) / self.std.astype(a.dtype)

    def decode(self, a):
        return a * self.std.astype(a.dtype) + self.mean.astype(a.dtype)


@dataclasses.dataclass(frozen=True)
class Fields(Sequence[Sample]):
    """Samples of equal size held in memory: x [S, N, c_in] and y [S, N, c_out]."""

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index) -> Sample:
        return {"x": self.x[index], "y": self.y[index]}

    @property
    def sizes(self) -> list[int]:
        """Points of each sample."""
        return [self.x.shape[1]] * len(self)


@dataclasses.dataclass(frozen=True)
class Meshes(Sequence[Sample]):
    """Samples of unequal size held in memory."""

    samples: Sequence[Sample]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index) -> Sample:
        return self.samples[index]

    @property
    def sizes(self) -> list[int]:
        """Points of each sample."""
        return [len(sample["x"]) for sample in self.samples]


@dataclasses.dataclass(frozen=True)
class Subset(Sequence[Sample]):
    """Consecutive samples start ... stop - 1 of others."""

    samples: Sequence[Sample]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index) -> Sample:
        return self.samples[range(self.start, self.stop)[index]]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """What a PDE task trains on: splits, target normaliser, and how to draw it.

    Attributes:
        name: of the data set, for titles.
        train: training samples; `x` as the network gets it, `y` in physical units.
        test: test samples, likewise.
        targets: normaliser of `y`, fitted on `train`. The network predicts the
            encoded target.
        quantity: what `y` is, with its symbol, for axis labels.
        grid: (rows, columns) if the points are a row-major grid, else None.
        coordinates: the channels of `x` that are spatial coordinates.
    """

    name: str
    train: Sequence[Sample]
    test: Sequence[Sample]
    targets: Normalizer
    quantity: str
    grid: tuple[int, int] | None = None
    coordinates: tuple[int, ...] = (0, 1)

    @property
    def channels(self) -> tuple[int, int]:
        """Input and target channels (c_in, c_out)."""
        sample = self.train[0]
        return sample["x"].shape[-1], sample["y"].shape[-1]

    def hold_out(self, count: int) -> tuple["Dataset", Sequence[Sample]]:
        """Takes the last training samples away for validation.

        Returns:
            The data set without them, its normaliser fitted anew, and the samples.

        Raises:
            ValueError: if no training sample would be left.
        """
        rest = len(self.train) - count
        if count < 1 or rest < 1:
            raise ValueError(
                f"cannot hold out {count} of {len(self.train)} training samples."
            )
        train = Subset(self.train, 0, rest)
        targets = Normalizer.fit([sample["y"] for sample in train])
        held = Subset(self.train, rest, len(self.train))
        return dataclasses.replace(self, train=train, targets=targets), held

    def fingerprint(self) -> str:
        """Hash of the splits and the normaliser."""
        return _digest(
            _split_bytes(self.train),
            _split_bytes(self.test),
            self.targets.mean.tobytes(),
            self.targets.std.tobytes(),
        )

    def test_fingerprint(self) -> str:
        """Hash of the test split."""
        return _digest(_split_bytes(self.test))


def _split_bytes(samples: Sequence[Sample]) -> bytes:
    """The size and a hash of every sample."""
    digest = hashlib.sha256(str(len(samples)).encode())
    for index in range(len(samples)):
        sample = samples[index]
        for key in sorted(sample):
            digest.update(np.ascontiguousarray(sample[key]).tobytes())
    return digest.digest()


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]
