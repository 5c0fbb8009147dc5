import numpy as np
import pytest

from flaxmix.data import Dataset, Fields, Meshes, Normalizer

from closeness import assert_close


def fields(count=7, points=5, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda c: rng.normal(size=(count, points, c)).astype(np.float32)
    return Fields(draw(2), draw(3))


def dataset(**kwargs):
    train = fields(**kwargs)
    return Dataset("test", train, fields(3, seed=9), Normalizer.fit(train.y), "u (m)")


def test_normalizer_encodes_to_mean_0_and_unbiased_std_1():
    y = fields().y
    encoded = Normalizer.fit(y).encode(y).reshape(-1, 3)
    assert_close(encoded.std(0, ddof=1), np.ones(3), error=1e-6)
    assert np.abs(encoded.mean(0)).max() < 1e-6
    assert_close(Normalizer.fit(y).decode(Normalizer.fit(y).encode(y)), y, error=1e-6)


def test_small_fluctuation_on_a_large_mean_keeps_its_digits():
    rng = np.random.default_rng(0)
    y = (101_325 + 5 * rng.normal(size=(50, 1000, 1))).astype(np.float32)
    normalizer = Normalizer.fit(y)
    assert normalizer.std[0] == pytest.approx(5, rel=5e-3)
    assert normalizer.mean[0] == pytest.approx(101_325, abs=0.1)


def test_unequal_meshes_weigh_points_equally():
    a, b = np.full((5, 1), 1.0), np.full((3, 1), 9.0)
    normalizer = Normalizer.fit([a, b])
    whole = np.concatenate([a, b])
    assert_close(normalizer.mean, whole.mean(0), error=1e-12)
    assert_close(normalizer.std, whole.std(0, ddof=1), error=1e-8)


def test_normalizer_rejects_what_it_cannot_fit():
    with pytest.raises(ValueError, match="at least two points, got 1"):
        Normalizer.fit(np.ones((1, 1, 2)))
    with pytest.raises(ValueError, match="mean .*nan"):
        Normalizer.fit(np.array([[[1.0], [np.nan]]]))


def test_hold_out_takes_the_last_and_fits_anew():
    data = dataset()
    rest, held = data.hold_out(2)
    assert (len(rest.train), len(held)) == (5, 2)
    np.testing.assert_array_equal(held[0]["y"], data.train[5]["y"])
    np.testing.assert_array_equal(held[1]["y"], data.train[6]["y"])
    expected = Normalizer.fit(data.train.y[:5])
    np.testing.assert_array_equal(rest.targets.mean, expected.mean)


@pytest.mark.parametrize("count", [0, 7, 8])
def test_hold_out_leaves_something(count):
    with pytest.raises(ValueError, match=f"cannot hold out {count} of 7"):
        dataset().hold_out(count)


def test_fingerprint_tells_data_apart():
    assert dataset().fingerprint() == dataset().fingerprint()
    assert dataset().fingerprint() != dataset(seed=1).fingerprint()
    assert dataset().fingerprint() != dataset(count=6).fingerprint()
    assert dataset().test_fingerprint() == dataset(seed=1).test_fingerprint()


def test_fingerprint_sees_every_sample():
    data = dataset()
    before = data.fingerprint()
    data.train.y[2, 3, 1] += 1
    assert data.fingerprint() != before


def test_sizes_and_channels():
    assert dataset().channels == (2, 3)
    assert fields().sizes == [5] * 7
    samples = [{"x": np.ones((n, 2)), "y": np.ones((n, 1))} for n in (5, 3)]
    assert Meshes(samples).sizes == [5, 3]
