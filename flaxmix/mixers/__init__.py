"""Token mixers as Flax NNX layers: parameters around the functions of `ops`.

Every mixer is built as `Mixer(channels, heads=, ..., rngs=)` and called as
`mixer(x, mask=None, axis_name=None, key=None)` on x [*B, N, C]; `LunaAttention` takes a
packed sequence and `AnchorAttention` coordinates besides. What masked points hold never
matters, even NaN. `key` drives dropout and noise, where there are any: without it there
are none, and equal inputs give equal outputs.

The causal mixers of language models, `CausalAttention`, `Relation` and
`LinearRelation`, are called otherwise: see `flaxmix.mixers.causal_attention`.
"""

from flaxmix.mixers.ablated import AblatedFlarePP as AblatedFlarePP
from flaxmix.mixers.anchors import AnchorAttention as AnchorAttention
from flaxmix.mixers.attention import SelfAttention as SelfAttention
from flaxmix.mixers.causal_attention import CausalAttention as CausalAttention
from flaxmix.mixers.flare import Flare as Flare, OriginalFlare as OriginalFlare
from flaxmix.mixers.flarepp import (
    FlarePP as FlarePP,
    SimplifiedFlarePP as SimplifiedFlarePP,
)
from flaxmix.mixers.induced import InducedAttention as InducedAttention
from flaxmix.mixers.linear_relation import LinearRelation as LinearRelation
from flaxmix.mixers.luna import LunaAttention as LunaAttention
from flaxmix.mixers.relation import Relation as Relation
from flaxmix.mixers.transolver import (
    Transolver as Transolver,
    Transolver3 as Transolver3,
    TransolverPP as TransolverPP,
)
