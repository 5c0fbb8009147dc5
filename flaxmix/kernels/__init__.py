"""Kernels for accelerators; `ops` has the form in plain JAX of each."""

from flaxmix.kernels.exchange import available as available, exchange as exchange
