"""Variants of a head alone: fused, the plain chain of operators that it replaces, and that through torch.compile.

All are timed as chains of launches in CUDA graphs of ours. So torch.compile chooses kernels as "max-autotune" does but
makes no graphs: that mode's own ones copy inputs and are looked up by the host at every call, which heads in a captured
network are not, and which would be all that is seen of a few microseconds. Peers do not hand out the probabilities,
which is in torch.compile's favour.
"""

from collections.abc import Callable
from functools import partial

import torch

from ...kernels import HeadOutput
from ..measuring.peers import HeadAnswer, NaiveHead
from .alone import AloneHead

FUSED, EAGER, COMPILED = "fused", "eager", "compiled"
#: Calls before a capture: the first compiles, and kernels are chosen by timing them when they first run.
_WARM_UP = 3

#: Launches a head or its peer on the head's input, on the current stream.
Launch = Callable[[], HeadOutput | HeadAnswer]


def _compiled(head: AloneHead) -> Launch:
    torch.compiler.reset()  # what was compiled for other heads would count against the limit on recompilations
    compiled = torch.compile(NaiveHead(head.head), mode="max-autotune-no-cudagraphs", dynamic=False)
    with torch.no_grad():
        for _ in range(_WARM_UP):
            compiled(head.x)
    return partial(compiled, head.x)


#: Functions that make a head ready to be launched, by variant; they compile where that is needed.
LAUNCHES: dict[str, Callable[[AloneHead], Launch]] = {
    FUSED: lambda head: partial(head.launch, head.chosen),
    EAGER: lambda head: partial(NaiveHead(head.head), head.x),
    COMPILED: _compiled,
}
