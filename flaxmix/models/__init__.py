"""Networks built from mixers."""

from flaxmix.models.block import Block as Block
from flaxmix.models.stack import apply_stack as apply_stack, stack as stack
from flaxmix.models.surrogate import Surrogate as Surrogate
