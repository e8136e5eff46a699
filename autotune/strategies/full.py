"""Five minutes for a network: successive halving alone, the leaders' neighbours, the best in situ, and once more."""

from collections.abc import Generator

from ..measurer import ALONE, NETWORK, Target
from ..search import AGAIN_CAPTURES, FINAL_ROUNDS, Answers, Ask, decide, fastest_first, finalists
from ..space import neighbours, spread_out

#: Configurations beside the rule's to begin with.
CANDIDATES = 96
#: Rounds of each turn of halving, the first of all candidates.
HALVING_ROUNDS = (3, 6, 12)
#: Leaders whose neighbours are tried, so many at a time and so often, unless none is left.
LEADERS = 3
NEIGHBOURS, STEPS = 24, 8
#: Configurations that are decided between alone, and in situ, beside the rule's.
LAST_ALONE = 12
IN_SITU = 6
#: The best in situ are measured again, in more captures.
AGAIN = 2


def search(target: Target) -> Generator[Ask, Answers, None]:
    """Yield what to measure; see :mod:`auxhead.autotune.search`."""
    left = [target.rule, *spread_out(target.shape, CANDIDATES)]
    for turn, rounds in enumerate(HALVING_ROUNDS, start=1):
        answers = yield Ask(ALONE, tuple(left), rounds, share=0.4 * turn / len(HALVING_ROUNDS))
        if not answers:
            return
        left = fastest_first(answers)[: max(len(left) // 2, LEADERS)]
    known = dict(answers)
    asked = set(known)
    for step in range(1, STEPS + 1):
        leaders = fastest_first(known)[:LEADERS]
        beside = dict.fromkeys(one for leader in leaders for one in neighbours(leader, target.shape))
        new = tuple(one for one in beside if one not in asked)[:NEIGHBOURS]
        if not new:
            break
        asked.update(new)
        known |= yield Ask(ALONE, new, HALVING_ROUNDS[-1], share=0.4 + 0.2 * step / STEPS)
    last = tuple(dict.fromkeys([target.rule, *fastest_first(known)[:LAST_ALONE]]))
    alone = yield Ask(ALONE, last, FINAL_ROUNDS, share=0.7, next_in_situ=last)
    best_alone = decide(target.rule, alone)
    if best_alone is None:
        return
    in_situ = yield Ask(NETWORK, finalists(target, alone, IN_SITU), FINAL_ROUNDS, share=0.85)
    if in_situ:
        again = dict.fromkeys([*finalists(target, in_situ, AGAIN), best_alone])
        yield Ask(NETWORK, tuple(again), FINAL_ROUNDS, share=1.0, captures=AGAIN_CAPTURES)
