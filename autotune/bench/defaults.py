"""Defaults of the benchmark: rounds, and what ``--quick`` measures; no torch."""

from ..measuring.names import RUNNERS, TRUNKS

#: Timed rounds of each variant, unless asked otherwise: ten of each fresh capture.
ROUNDS = 50
#: Rounds of ``--quick``.
QUICK_ROUNDS = 20
#: Variants of ``--quick``, which are built in seconds.
QUICK_VARIANTS = (
    "eager*",
    "graph-*@as_is",
    "graph-*@cudnn",
    *(f"{runner}@{trunk}" for runner in RUNNERS for trunk in TRUNKS),
)
#: Exit patterns of ``--quick``.
QUICK_EXITS = ("never", "layer1")
