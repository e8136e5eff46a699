"""A minute for a network: what lies around the rule's configuration alone, then the best three in situ."""

from collections.abc import Generator

from ..measurer import ALONE, NETWORK, Target
from ..search import FINAL_ROUNDS, Answers, Ask, finalists
from ..space import spread_out

#: Configurations beside the rule's that are timed alone.
CANDIDATES = 20
#: And in situ.
IN_SITU = 3


def search(target: Target) -> Generator[Ask, Answers, None]:
    """Yield what to measure; see :mod:`auxhead.autotune.search`."""
    configs = (target.rule, *spread_out(target.shape, CANDIDATES))
    alone = yield Ask(ALONE, configs, FINAL_ROUNDS, share=0.5)
    if alone:
        yield Ask(NETWORK, finalists(target, alone, IN_SITU), FINAL_ROUNDS, share=1.0)
