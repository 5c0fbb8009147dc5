"""Token-mixing operators as pure functions on arrays.

Every function here maps arrays to arrays and imports no Flax. Axes are named by one
letter, upper case in types and lower case in einsums:

    B  batch (any number of axes)    H  heads
    N  points or tokens              D  channels a head
    M  latents or slices             C  channels, C = H D
    A  anchors

A mask is [*B, N], True for real points: what the others hold never matters, even NaN.
Softmaxes, norms and sums are float32 (float64 for float64 inputs) whatever the inputs.
"""

from flaxmix.ops.anchors import (
    anchor_attention as anchor_attention,
    draw_anchors as draw_anchors,
    take_points as take_points,
)
from flaxmix.ops.attention import attention as attention
from flaxmix.ops.causal import causal_attention as causal_attention, places as places
from flaxmix.ops.flare import flare as flare
from flaxmix.ops.flarepp import flarepp as flarepp, synthesize as synthesize
from flaxmix.ops.givens import givens as givens
from flaxmix.ops.latent import gather as gather, scatter as scatter
from flaxmix.ops.linear_attention import linear_attention as linear_attention
from flaxmix.ops.linear_relation import linear_relation as linear_relation
from flaxmix.ops.norm import layer_norm as layer_norm, rms_norm as rms_norm
from flaxmix.ops.relation import (
    exchange as exchange,
    finish as finish,
    relation as relation,
)
from flaxmix.ops.rotary import (
    rotary_angles as rotary_angles,
    rotary_frequencies as rotary_frequencies,
    rotate as rotate,
)
from flaxmix.ops.transolver import pool as pool, transolver as transolver
