"""Confidence of a sample, by criterion, from one pass over its logits, as reference/criteria.py defines it.

``max_prob`` needs nothing more than the softmax does. Each other criterion has one number a sample, ``state``, which a
block of classes brings up to date:

    entropy   sum_k d[k] * exp(d[k]),   d[k] = (logit[k] - top) / temperature
    margin    the second largest logit
    energy    nothing
    patience  nothing: in a network the launch counts heads that agree, see ``merge`` in merge.py
"""

import triton
import triton.language as tl

from ..reference import criteria

# Triton takes numbers in tuples, and no text.
MAX_PROB = tl.constexpr(criteria.number_of("max_prob"))
ENTROPY = tl.constexpr(criteria.number_of("entropy"))
MARGIN = tl.constexpr(criteria.number_of("margin"))
ENERGY = tl.constexpr(criteria.number_of("energy"))
PATIENCE = tl.constexpr(criteria.number_of("patience"))
TALLY_BINS = tl.constexpr(criteria.TALLY_BINS)
#: No energy exceeds it, so that a disabled exit has a threshold.
LARGEST = tl.constexpr(criteria.CRITERIA["energy"].high)


@triton.jit
def update_state(
    state,  # [BLOCK_N]
    logits, exps, off_j,  # [BLOCK_N, BLOCK_J] of a block, exp(d) with the new top; [BLOCK_J]
    first, block_top,  # [BLOCK_N]: class of the block's largest logit, and that logit
    top, new_top, total, decay,  # [BLOCK_N]: before and with the block; sum of exp(d) before; exp(top - new_top)
    cold,  # [BLOCK_N, 1]: 1 / temperature
    CRITERION: tl.constexpr,
):  # fmt: skip
    """Return the state with one more block of classes."""
    if CRITERION == ENTROPY:
        below = (logits - new_top[:, None]) * cold
        state = tl.sum(tl.where(exps > 0, below * exps, 0.0), axis=1) + tl.where(
            decay > 0, decay * (state + tl.sum((top - new_top)[:, None] * cold, axis=1) * total), 0.0
        )
    if CRITERION == MARGIN:
        others = tl.max(tl.where(off_j[None, :] == first[:, None], float("-inf"), logits), axis=1)
        state = tl.maximum(tl.maximum(state, others), tl.minimum(top, block_top))
    return state


@triton.jit
def confidence_of(state, sure, top, total, heat, cold, K, CRITERION: tl.constexpr):
    """Return the confidence [BLOCK_N]; ``sure`` is the largest probability, NaN where there are none."""
    if CRITERION == ENTROPY:
        classes = tl.zeros_like(sure) + K
        disorder = tl.div_rn(tl.log(total) - state * sure, tl.log(tl.maximum(classes, 2.0)))
        confidence = 1.0 - disorder + 0.0 * sure
    elif CRITERION == MARGIN:
        confidence = (1.0 - tl.sum(tl.exp((state - top)[:, None] * cold), axis=1)) * sure
    elif CRITERION == PATIENCE:
        confidence = 1.0 + 0.0 * sure
    else:
        tl.static_assert(CRITERION == ENERGY)
        confidence = tl.minimum(top + heat * tl.log(total), LARGEST) + 0.0 * sure
    return tl.where((heat > 0) & (heat < float("inf")), confidence, float("nan"))
