"""Batches of samples, as a function of seed and step alone."""

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


def bucket_edges(sizes: Sequence[int]) -> np.ndarray:
    """The sizes that meshes are padded to: at most `BUCKETS`, evenly spaced."""
    low, high = min(sizes), max(sizes)
    return np.unique(np.ceil(np.linspace(low, high, BUCKETS + 1)[1:]).astype(int))


def _padded(sizes, edges) -> int:
    return int(edges[np.searchsorted(edges, max(sizes))])


def collate(samples: Sequence[Sample], *, points: int | None = None) -> Batch:
    """Stacks samples, padded with zeros to `points` points, with a mask.

    Args:
        samples: of any sizes if `points` is given, else of one size.
        points: None for no padding and no mask.
    """
    if points is None:
        return {k: np.stack([s[k] for s in samples]) for k in samples[0]}
    batch = {
        k: np.zeros((len(samples), points, a.shape[-1]), a.dtype)
        for k, a in samples[0].items()
    }
    mask = np.zeros((len(samples), points), bool)
    for i, sample in enumerate(samples):
        for k, a in sample.items():
            batch[k][i, : len(a)] = a
        mask[i, : len(sample["x"])] = True
    return {**batch, "mask": mask}


class _Calls(grain.transforms.Map):
    """Stacks the batches of one call to the training step: [steps, B, N, ...]."""

    def __init__(self, edges: np.ndarray | None, steps: int):
        self._edges, self._steps = edges, steps

    def map(self, groups: list[list[Sample]]) -> Batch:
        samples = [sample for group in groups for sample in group]
        points = None
        if self._edges is not None:
            points = _padded([len(s["x"]) for s in samples], self._edges)
        flat = collate(samples, points=points)
        return {k: a.reshape(self._steps, -1, *a.shape[1:]) for k, a in flat.items()}


def training_batches(
    samples: Sequence[Sample],
    *,
    batch: int,
    seed: int,
    start: int = 0,
    steps_per_call: int = 1,
    workers: int = 0,
) -> Iterator[Batch]:
    """Endless shuffled batches, [steps_per_call, B, N, ...] at a time.

    Each epoch is a new permutation; what does not fill a batch is left out of that
    epoch. The batch of a step depends on `seed` and the step only, so the number of
    workers and the step that a run is resumed at make no difference. Unequal meshes
    are padded to one of a few sizes and get a mask.

    Args:
        samples: a sequence; with `workers`, one that pickles.
        batch: samples a step.
        seed: of the permutations.
        start: the step to begin with; a multiple of `steps_per_call`.
        steps_per_call: steps that come stacked.
        workers: processes that read ahead; 0 for threads in this process.

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
        grain.MapDataset.source(samples)
        .shuffle(seed=mixed)
        .batch(batch, drop_remainder=True, batch_fn=list)
        .repeat()
        .batch(steps_per_call, drop_remainder=True, batch_fn=list)
        .map(_Calls(edges_of(samples), steps_per_call))
    )
    data = data[start // steps_per_call :].to_iter_dataset(_AHEAD)
    if not workers:
        return iter(data)
    # Grain reads its flags in the workers' parent, which only absl programs parse.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(num_workers=workers)
    return iter(data.mp_prefetch(options))


def edges_of(samples: Sequence[Sample]) -> np.ndarray | None:
    """`bucket_edges` of samples of unequal size, None for equal sizes.

    Samples may say their sizes in an attribute `sizes`; else each is looked at.
    """
    sizes = getattr(samples, "sizes", None)
    if sizes is None:
        sizes = [len(samples[i]["x"]) for i in range(len(samples))]
    return None if len(set(sizes)) == 1 else bucket_edges(sizes)


def evaluation_batches(
    samples: Sequence[Sample], *, batch: int
) -> Iterator[tuple[Batch, int]]:
    """Every sample once, in order, as (batch, how many of its rows are samples).

    The last batch is filled up by repeating its last sample, so that all have the
    same shape; the caller drops the surplus rows.
    """
    edges = edges_of(samples)
    for start in range(0, len(samples), batch):
        rows = [samples[i] for i in range(start, min(start + batch, len(samples)))]
        count = len(rows)
        rows += rows[-1:] * (batch - count)
        points = None if edges is None else _padded([len(r["x"]) for r in rows], edges)
        yield collate(rows, points=points), count
