"""A minute: what lies around the rule's configuration alone, the best three in situ, and again what looks faster."""

from collections.abc import Generator

from ..comparison import over_baseline
from ..measurer import ALONE, NETWORK, Target
from ..search import FINAL_ROUNDS, Answers, Ask, decide, fastest_first, finalists
from ..space import spread_out

#: Configurations beside the rule's that are timed alone.
CANDIDATES = 20
#: The winner and the fastest ones are timed again, in more captures.
LEADERS = 6
#: Configurations beside the rule's that are timed in situ.
IN_SITU = 3
#: What takes less than this part of the rule's time in situ is measured again, in more captures: chance does that, too.
LOOKS_FASTER = 0.99
AGAIN_CAPTURES = 12


def search(target: Target) -> Generator[Ask, Answers, None]:
    """Yield what to measure; see :mod:`auxhead.autotune.search`."""
    configs = (target.rule, *spread_out(target.shape, CANDIDATES))
    alone = yield Ask(ALONE, configs, FINAL_ROUNDS, share=0.4)
    if not alone:
        return
    # between many, a few captures do not tell what is some percent slower, and simpler, from the fastest
    leaders = finalists(target, alone, LEADERS)
    alone = yield Ask(ALONE, leaders, FINAL_ROUNDS, share=0.5, captures=AGAIN_CAPTURES, next_in_situ=leaders)
    best_alone = decide(target.rule, alone)
    if best_alone is None:
        return
    in_situ = yield Ask(NETWORK, finalists(target, alone, IN_SITU), FINAL_ROUNDS, share=0.9)
    if in_situ:
        fastest = fastest_first(in_situ)[0]
        if over_baseline(in_situ[fastest]) < LOOKS_FASTER:
            again = dict.fromkeys([target.rule, fastest, best_alone])
            yield Ask(NETWORK, tuple(again), FINAL_ROUNDS, share=1.0, captures=AGAIN_CAPTURES)
