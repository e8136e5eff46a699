"""The strategy of five minutes: successive halving alone, the leaders' neighbours, the best in situ, and once more."""

from collections.abc import Generator

from ...measuring.targets import ALONE, NETWORK, Target
from ...measuring.timers import FINAL_ROUNDS
from ..search import AGAIN_CAPTURES, Answers, Ask, climb, decision, fastest_first, finalists
from ..space import spread_out

#: Configurations beside the rule's to begin with.
CANDIDATES = 96
#: Rounds of each turn of halving, the first of all candidates.
HALVING_ROUNDS = (3, 6, 12)
#: Leaders whose neighbours are tried, so many at a time and so often, unless none is left.
LEADERS = 12
NEIGHBOURS, STEPS = 24, 8
#: Configurations that are decided between alone, in more captures, and in situ, beside the rule's.
LAST_ALONE = 12
IN_SITU = 6
#: So many of the best in situ are measured again, in more captures.
AGAIN = 2


def search(target: Target) -> Generator[Ask, Answers, None]:
    """Yield what to measure; see :mod:`auxhead.autotune.sweep.search`."""
    left = [target.rule, *spread_out(target.shape, CANDIDATES)]
    for turn, rounds in enumerate(HALVING_ROUNDS, start=1):
        answers = yield Ask(ALONE, tuple(left), rounds, share=0.4 * turn / len(HALVING_ROUNDS))
        if not answers:
            return
        left = fastest_first(answers)[: max(len(left) // 2, LEADERS)]
    known = yield from climb(
        target,
        answers,
        answers,
        leaders=LEADERS,
        at_once=NEIGHBOURS,
        steps=STEPS,
        rounds=HALVING_ROUNDS[-1],
        shares=(0.4, 0.6),
    )
    last = tuple(dict.fromkeys([target.rule, *fastest_first(known)[:LAST_ALONE]]))
    alone = yield Ask(ALONE, last, FINAL_ROUNDS, share=0.7, captures=AGAIN_CAPTURES, next_in_situ=last)
    best_alone = decision(target.rule, alone).winner
    if best_alone is None:
        return
    in_situ = yield Ask(NETWORK, finalists(target, alone, IN_SITU), FINAL_ROUNDS, share=0.85)
    if in_situ:
        again = dict.fromkeys([*finalists(target, in_situ, AGAIN), best_alone])
        yield Ask(NETWORK, tuple(again), FINAL_ROUNDS, share=1.0, captures=AGAIN_CAPTURES)
