"""What several commands let one choose, by name."""

from enum import Enum

from .cells import INNER_STAGES


class Dtype(str, Enum):
    """Data types by name."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


class Placement(str, Enum):
    """Where heads are."""

    blocks = "blocks"
    stages = "stages"
    inner_stages = INNER_STAGES
