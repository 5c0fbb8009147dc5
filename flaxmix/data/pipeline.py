"""Batches of samples, as a function of seed and step alone."""

import dataclasses
from collections.abc import Iterator, Sequence

import grain
import numpy as np
from absl import flags

from flaxmix.data.dataset import Sample

Batch = dict[str, np.ndarray]
"""`x [B, N, c_in]`, `y [B, N, c_out]` and, for unequal meshes, `mask [B, N]`."""

# Grain's own default of 500 elements would hold 500 meshes.
_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)

BUCKETS = 4
"""Padded sizes of a set of unequal meshes: at most so many shapes to compile."""


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of every batch that one of several processes reads.

    Attributes:
        rows: (start, stop, whole), that is rows B start / whole ... B stop / whole.
        points: likewise for the N points, padding included.
    """

    rows: tuple[int, int, int] = (0, 1, 1)
    points: tuple[int, int, int] = (0, 1, 1)


def _part(share: tuple[int, int, int], count: int) -> slice:
    start, stop, whole = share
    return slice(start * count // whole, stop * count // whole)


def bucket_edges(sizes: Sequence[int]) -> np.ndarray:
    """The sizes that meshes are padded to: at most `BUCKETS`, evenly spaced."""
    low, high = min(sizes), max(sizes)
    return np.unique(np.ceil(np.linspace(low, high, BUCKETS + 1)[1:]).astype(int))


def _sizes(samples: Sequence[Sample]) -> list[int]:
    """Points of each sample: its attribute `sizes`, or else each is looked at."""
    sizes = getattr(samples, "sizes", None)
    return (
        [len(samples[i]["x"]) for i in range(len(samples))] if sizes is None else sizes
    )


class _Collate:
    """Reads samples by their numbers into a batch that the points' shards fit.

    Samples of unequal sizes, and sizes that are no multiple of the shards, are padded
    with zeros and get a mask. Of each sample only the share's points are touched.
    """

    def __init__(self, samples: Sequence[Sample], share: Share):
        self._samples, self._share = samples, share
        self._sizes = _sizes(samples)
        shards = share.points[2]
        even = lambda n: -(-n // shards) * shards
        unequal = len(set(self._sizes)) > 1
        edges = bucket_edges(self._sizes) if unequal else self._sizes[:1]
        self._edges = np.unique([even(int(edge)) for edge in edges])
        self._masked = unequal or even(self._sizes[0]) != self._sizes[0]

    def __call__(self, groups: Sequence[Sequence[int]]) -> Batch:
        """Batches [B, N, ...] of the samples in each group, one after the other."""
        largest = max(self._sizes[i] for group in groups for i in group)
        points = int(self._edges[np.searchsorted(self._edges, largest)])
        part = _part(self._share.points, points)
        rows = [
            i for group in groups for i in group[_part(self._share.rows, len(group))]
        ]
        pieces = [{k: a[part] for k, a in self._samples[i].items()} for i in rows]
        if not self._masked:
            return {k: np.stack([piece[k] for piece in pieces]) for k in pieces[0]}
        shape = len(rows), part.stop - part.start
        batch = {
            k: np.zeros((*shape, a.shape[-1]), a.dtype) for k, a in pieces[0].items()
        }
        mask = np.zeros(shape, bool)
        for row, piece in enumerate(pieces):
            for k, a in piece.items():
                batch[k][row, : len(a)] = a
            mask[row, : len(piece["x"])] = True
        return {**batch, "mask": mask}


class _Calls(grain.transforms.Map):
    """Stacks the batches of one call to the training step: [steps, B, N, ...]."""

    def __init__(self, collate: _Collate, steps: int):
        self._collate, self._steps = collate, steps

    def map(self, groups: list[list[int]]) -> Batch:
        flat = self._collate(groups)
        return {k: a.reshape(self._steps, -1, *a.shape[1:]) for k, a in flat.items()}


def training_batches(
    samples: Sequence[Sample],
    *,
    batch: int,
    seed: int,
    start: int = 0,
    steps_per_call: int = 1,
    workers: int = 0,
    share: Share = Share(),
) -> Iterator[Batch]:
    """Endless shuffled batches, [steps_per_call, B, N, ...] at a time.

    Each epoch is a new permutation; what does not fill a batch is left out of that
    epoch. The batch of a step depends on `seed` and the step only, so the number of
    workers and the step that a run is resumed at make no difference. Unequal meshes
    are padded to one of a few sizes and get a mask, and so are those whose points do
    not come out even over the shards of the points.

    Args:
        samples: a sequence; with `workers`, one that pickles.
        batch: samples a step.
        seed: of the permutations.
        start: the step to begin with; a multiple of `steps_per_call`.
        steps_per_call: steps that come stacked.
        workers: processes that read ahead; 0 for threads in this process.
        share: the part of each batch that is read.

    Raises:
        ValueError: if there are fewer samples than `batch`, or `start` is no
            multiple of `steps_per_call`.
    """
    if len(samples) < batch:
        raise ValueError(
            f"{len(samples)} training samples do not fill a batch of {batch}."
        )
    if start % steps_per_call:
        raise ValueError(f"{start=} is not a multiple of {steps_per_call=}.")
    # Consecutive seeds must not give the same permutations an epoch apart.
    mixed = int(np.random.SeedSequence([seed, 0xDA7A]).generate_state(1)[0])
    data = (
        grain.MapDataset.range(len(samples))
        .shuffle(seed=mixed)
        .batch(batch, drop_remainder=True, batch_fn=list)
        .repeat()
        .batch(steps_per_call, drop_remainder=True, batch_fn=list)
        .map(_Calls(_Collate(samples, share), steps_per_call))
    )
    data = data[start // steps_per_call :].to_iter_dataset(_AHEAD)
    if not workers:
        return iter(data)
    # Grain reads its flags in the workers' parent, which only absl programs parse.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(num_workers=workers)
    return iter(data.mp_prefetch(options))


def evaluation_batches(
    samples: Sequence[Sample], *, batch: int, share: Share = Share()
) -> Iterator[tuple[Batch, int]]:
    """Every sample once, in order, as (batch, how many of its rows are samples).

    The last batch is filled up by repeating its last sample, so that all have the
    same shape; the caller drops the surplus rows of the whole batch.
    """
    collate = _Collate(samples, share)
    for start in range(0, len(samples), batch):
        rows = list(range(start, min(start + batch, len(samples))))
        count = len(rows)
        yield collate([rows + rows[-1:] * (batch - count)]), count
