"""Data sets, normalisers and batches."""

from flaxmix.data.dataset import (
    Dataset as Dataset,
    Fields as Fields,
    Meshes as Meshes,
    Normalizer as Normalizer,
    Sample as Sample,
)
from flaxmix.data.pipeline import (
    evaluation_batches as evaluation_batches,
    training_batches as training_batches,
)
