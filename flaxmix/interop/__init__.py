"""Weights from and to the authors' PyTorch code (github.com/vpuri3/FLARE.py)."""

from flaxmix.interop.weights import (
    from_reference as from_reference,
    to_reference as to_reference,
)
