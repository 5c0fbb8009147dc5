"""Token mixers as Flax NNX layers: parameters around the functions of `ops`.

Every mixer is built as `Mixer(channels, heads=, ..., rngs=)` and called as
`mixer(x, mask=None, axis_name=None)` on x [*B, N, C]. What masked points hold never
matters, even NaN.
"""

from flaxmix.mixers.attention import SelfAttention as SelfAttention
from flaxmix.mixers.flare import Flare as Flare, OriginalFlare as OriginalFlare
from flaxmix.mixers.flarepp import (
    FlarePP as FlarePP,
    SimplifiedFlarePP as SimplifiedFlarePP,
)
