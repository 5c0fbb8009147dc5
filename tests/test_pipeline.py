import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxmix import losses
from flaxmix.data import Fields, Meshes, Normalizer
from flaxmix.data.pipeline import (
    BUCKETS,
    Share,
    bucket_edges,
    evaluation_batches,
    training_batches,
)

from closeness import assert_close


def numbered(count, points=3):
    """Sample i holds the number i everywhere."""
    x = np.broadcast_to(
        np.arange(count, dtype=np.float32)[:, None, None], (count, 1, 2)
    )
    return Fields(np.repeat(x, points, 1), np.repeat(x[..., :1], points, 1))


def meshes(sizes, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda n, c: rng.normal(size=(n, c)).astype(np.float32)
    return Meshes([{"x": draw(n, 2), "y": draw(n, 1)} for n in sizes])


def indices(batches, count):
    """The samples of the first steps, [steps, B]."""
    steps = [b["x"][..., 0, 0] for b in itertools.islice(batches, count)]
    return np.concatenate(steps).astype(int)


def test_an_epoch_holds_each_sample_once_and_drops_the_rest():
    drawn = indices(training_batches(numbered(7), batch=2, seed=0), 9)
    epochs = drawn.reshape(3, 6)
    for epoch in epochs:
        assert len(set(epoch)) == 6
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert set(epochs.ravel()) == set(range(7))


@pytest.mark.parametrize("start", [0, 2, 6, 20])
def test_batches_depend_on_the_step_alone(start):
    whole = indices(training_batches(numbered(7), batch=2, seed=3), 26)
    resumed = training_batches(numbered(7), batch=2, seed=3, start=start)
    np.testing.assert_array_equal(indices(resumed, 6), whole[start : start + 6])


def test_steps_per_call_stacks_the_same_batches():
    one = indices(training_batches(numbered(7), batch=2, seed=3), 8)
    four = training_batches(numbered(7), batch=2, seed=3, steps_per_call=4, start=4)
    first = next(four)
    assert first["x"].shape == (4, 2, 3, 2)
    np.testing.assert_array_equal(first["x"][..., 0, 0], one[4:])


def test_seeds_give_different_orders():
    order = lambda seed: indices(training_batches(numbered(64), batch=2, seed=seed), 64)
    assert (order(0) != order(1)).any()
    # Not the same order one epoch later, either.
    assert (order(0)[32:] != order(1)[:32]).any()


WORKERS = """
import sys
import numpy as np
sys.path.insert(0, "tests")
from test_pipeline import indices, numbered
from flaxmix.data.pipeline import training_batches
workers = int(sys.argv[1])
batches = training_batches(numbered(7), batch=2, seed=3, start=2, workers=workers)
print(indices(batches, 8).tolist())
"""


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_workers_make_no_difference(workers):
    # In a plain script, which is no absl program and has no main guard.
    done = subprocess.run(
        [sys.executable, "-c", WORKERS, str(workers)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    expected = indices(training_batches(numbered(7), batch=2, seed=3, start=2), 8)
    assert done.stdout.strip() == str(expected.tolist())


def test_too_few_samples_for_a_batch():
    with pytest.raises(ValueError, match="7 training samples .* batch of 8"):
        training_batches(numbered(7), batch=8, seed=0)


def test_start_within_a_call():
    with pytest.raises(ValueError, match="start=3 .* steps_per_call=2"):
        training_batches(numbered(7), batch=2, seed=0, start=3, steps_per_call=2)


@pytest.mark.parametrize("batch", [1, 2, 4, 7, 9])
def test_evaluation_uses_each_sample_once(batch):
    seen, shapes = [], set()
    for rows, count in evaluation_batches(numbered(7), batch=batch):
        shapes.add(rows["x"].shape)
        seen += rows["x"][:count, 0, 0].astype(int).tolist()
    assert seen == list(range(7))
    assert shapes == {(batch, 3, 2)}


def test_unequal_meshes_are_padded_and_masked():
    samples = meshes([5, 3])
    ((batch, count),) = evaluation_batches(samples, batch=2)
    assert count == 2
    assert batch["x"].shape == (2, 5, 2)
    assert batch["mask"].sum(1).tolist() == [5, 3]
    np.testing.assert_array_equal(batch["x"][1, :3], samples[1]["x"])
    assert not batch["x"][1, 3:].any()


def test_equal_meshes_have_no_mask():
    assert "mask" not in next(training_batches(meshes([4, 4]), batch=2, seed=0))


def test_many_sizes_make_few_shapes():
    rng = np.random.default_rng(0)
    samples = meshes(rng.integers(3000, 4000, 50))
    batches = training_batches(samples, batch=2, seed=0, steps_per_call=5)
    shapes = {b["x"].shape for b in itertools.islice(batches, 30)}
    shapes |= {b["x"].shape[1:] for b, _ in evaluation_batches(samples, batch=2)}
    assert len({s[-2] for s in shapes}) <= BUCKETS
    assert bucket_edges(samples.sizes)[-1] == max(samples.sizes)


def test_a_padded_batch_equals_its_meshes_one_by_one():
    samples = meshes([5, 3])
    ((batch, _),) = evaluation_batches(samples, batch=2)
    targets = Normalizer.fit([s["y"] for s in samples])
    whole = Normalizer.fit([np.concatenate([s["y"] for s in samples])])
    assert_close(targets.std, whole.std, error=1e-12)

    def loss(w, batch):
        prediction = targets.decode(jnp.tanh(batch["x"] @ w))
        mask = batch.get("mask")
        return losses.relative_l2(prediction, jnp.asarray(batch["y"]), mask=mask).mean()

    w = jnp.array([[0.3], [-0.7]])
    both = jax.value_and_grad(loss)(w, {k: jnp.asarray(a) for k, a in batch.items()})
    singles = [
        jax.value_and_grad(loss)(w, {k: jnp.asarray(a[None]) for k, a in s.items()})
        for s in samples
    ]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *singles)
    assert_close(both, mean, error=1e-6)


class Touched(np.ndarray):
    """An array that notes what of it is read."""

    reads: list

    def __getitem__(self, part):
        self.reads.append((part.start, part.stop))
        return self.view(np.ndarray)[part]


def test_a_share_is_all_that_is_read():
    samples, reads = meshes([8, 8, 8, 8]), []

    class Source(Meshes):
        def __getitem__(self, index):
            found = {k: a.view(Touched) for k, a in samples[index].items()}
            for array in found.values():
                array.reads = reads
            return found

    ((batch, count),) = evaluation_batches(
        Source(samples.samples), batch=4, share=Share(rows=(1, 2, 2), points=(3, 4, 4))
    )
    # Of two rows, x and y.
    assert count == 4 and reads == [(6, 8)] * 4
    assert "mask" not in batch
    np.testing.assert_array_equal(batch["x"][1], samples[3]["x"][6:])


@pytest.mark.parametrize("sizes", [[7] * 6, [8] * 6, [5, 3, 9, 1, 2, 4]])
def test_shares_together_are_the_whole(sizes):
    samples = meshes(sizes)

    def batches(rows, points):
        found = training_batches(
            samples,
            batch=2,
            seed=1,
            steps_per_call=3,
            share=Share((rows, rows + 1, 2), (points, points + 1, 4)),
        )
        return list(itertools.islice(found, 3))

    each = [[batches(rows, points) for points in range(4)] for rows in range(2)]
    whole = training_batches(samples, batch=2, seed=1, steps_per_call=3)
    for call, expected in enumerate(itertools.islice(whole, 3)):
        for name in ("x", "y"):
            blocks = [[part[call][name] for part in row] for row in each]
            joined = np.concatenate([np.concatenate(row, 2) for row in blocks], 1)
            points = expected[name].shape[2]
            assert joined.shape[:2] == (3, 2) and joined.shape[2] % 4 == 0
            np.testing.assert_array_equal(joined[:, :, :points], expected[name])
            assert not joined[:, :, points:].any()
        masks = [[part[call].get("mask") for part in row] for row in each]
        if sizes == [8] * 6:
            assert masks == [[None] * 4] * 2
        else:
            mask = np.concatenate([np.concatenate(row, 2) for row in masks], 1)
            real = expected.get("mask", np.ones(expected["x"].shape[:3], bool))
            assert (mask.sum(2) == real.sum(2)).all()
