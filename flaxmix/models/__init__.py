"""Complete networks: fields at points from points with features, and language models.

`Surrogate` is the shared backbone around any mixer; `SetTransformer`, `Luna` and
`ABUPT` are that backbone with a mixer of their own; `PerceiverIO`, `LNO` and `GNOT` are
architectures of their own. All are called as
`model(x, mask=None, axis_name=None, key=None)` on x [*B, N, inputs].

`LanguageModel` is a causal decoder, `model(tokens, positions=None, axis_name=None)`.
"""

from flaxmix.models.abupt import ABUPT as ABUPT
from flaxmix.models.block import Block as Block
from flaxmix.models.decoder_block import DecoderBlock as DecoderBlock
from flaxmix.models.decoder_cache import (
    Cache as Cache,
    cache_bytes as cache_bytes,
)
from flaxmix.models.gnot import GNOT as GNOT
from flaxmix.models.language import (
    SIZES as SIZES,
    LanguageModel as LanguageModel,
    document_positions as document_positions,
)
from flaxmix.models.layout import parse_layout as parse_layout, period as period
from flaxmix.models.lno import LNO as LNO
from flaxmix.models.luna import Luna as Luna, LunaBlock as LunaBlock
from flaxmix.models.perceiver_io import PerceiverIO as PerceiverIO
from flaxmix.models.stack import apply_stack as apply_stack, stack as stack
from flaxmix.models.surrogate import (
    SetTransformer as SetTransformer,
    Surrogate as Surrogate,
)
