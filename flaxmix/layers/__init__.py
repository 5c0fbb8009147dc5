"""Plain layers that mixers and models share."""

from flaxmix.layers.linear import Linear as Linear
from flaxmix.layers.mlp import ResidualMLP as ResidualMLP
from flaxmix.layers.norm import Norm as Norm
from flaxmix.layers.swiglu import SwiGLU as SwiGLU
