"""Complete networks: points with features in, fields at the points out.

`Surrogate` is the shared backbone around any mixer; `SetTransformer`, `Luna` and
`ABUPT` are that backbone with a mixer of their own; `PerceiverIO`, `LNO` and `GNOT` are
architectures of their own. All are called as
`model(x, mask=None, axis_name=None, key=None)` on x [*B, N, inputs].
"""

from flaxmix.models.abupt import ABUPT as ABUPT
from flaxmix.models.block import Block as Block
from flaxmix.models.gnot import GNOT as GNOT
from flaxmix.models.lno import LNO as LNO
from flaxmix.models.luna import Luna as Luna, LunaBlock as LunaBlock
from flaxmix.models.perceiver_io import PerceiverIO as PerceiverIO
from flaxmix.models.stack import apply_stack as apply_stack, stack as stack
from flaxmix.models.surrogate import (
    SetTransformer as SetTransformer,
    Surrogate as Surrogate,
)
