"""The strategy of a minute: around the rule's configuration alone, then beside the fastest; the best three in situ."""

from collections.abc import Generator

from ...measuring.targets import ALONE, NETWORK, Target
from ...measuring.timers import FINAL_ROUNDS
from ..search import AGAIN_CAPTURES, Answers, Ask, climb, decision, fastest_first, finalists
from ..space import spread_out

#: Configurations beside the rule's that are timed alone at first.
CANDIDATES = 20
#: Leaders whose neighbours are timed after that, so many at a time and so often: others may lead by then.
LEADERS, NEIGHBOURS, STEPS = 12, 12, 7
#: These are only looked at, since the fastest ones are timed again; captures differ more than rounds do.
LOOK_ROUNDS = 4
#: Configurations beside the rule's that are decided between alone, in more captures.
LAST_ALONE = 6
#: Configurations beside the rule's that are timed in situ.
IN_SITU = 3
#: Share of the rule's time in situ below which the fastest is measured again, in more captures: chance does that, too.
LOOKS_FASTER = 0.99


def search(target: Target) -> Generator[Ask, Answers, None]:
    """Yield what to measure; see :mod:`auxhead.autotune.sweep.search`."""
    configs = (target.rule, *spread_out(target.shape, CANDIDATES))
    looked = yield Ask(ALONE, configs, LOOK_ROUNDS, share=0.2)
    if not looked:
        return
    looked = yield from climb(
        target,
        looked,
        configs,
        leaders=LEADERS,
        at_once=NEIGHBOURS,
        steps=STEPS,
        rounds=LOOK_ROUNDS,
        shares=(0.2, 0.4),
    )
    last = finalists(target, looked, LAST_ALONE)
    alone = yield Ask(ALONE, last, FINAL_ROUNDS, share=0.5, captures=AGAIN_CAPTURES, next_in_situ=last)
    best_alone = decision(target.rule, alone).winner
    if best_alone is None:
        return
    in_situ = yield Ask(NETWORK, finalists(target, alone, IN_SITU), FINAL_ROUNDS, share=0.9)
    if in_situ:
        fastest = fastest_first(in_situ)[0]
        if in_situ[fastest].over_baseline < LOOKS_FASTER:
            again = dict.fromkeys([target.rule, fastest, best_alone])
            yield Ask(NETWORK, tuple(again), FINAL_ROUNDS, share=1.0, captures=AGAIN_CAPTURES)
