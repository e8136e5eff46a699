"""Decide about samples of many classes in slices: a tile finds out about its own rows, which no other adds up.

Tiles keep their logits where probabilities will be, and leave findings [N, 4, SLICES]: of a sample the largest logit,
the sum of exponentials, the class, and the criterion's state. The programs that finish wait for those of a sample, and
write some of its probabilities each; the last of them writes its answer.
"""

import triton
import triton.language as tl

from .criteria import ENERGY, ENTROPY, MARGIN, MAX_PROB, PATIENCE
from .decide import first_maximum, heat_of, heated_exp, largest_probability, write_answer, write_probs
from .hand_over import INTERPRETED, wait_for_samples


@triton.jit
def survey_tile(tile, slice_k, off_n, bias, rule, probs, workspace, N, CONFIG: tl.constexpr):
    """Leave the findings of a tile of logits [block_k, block_n], still without bias, and arrive at their samples."""
    _, findings, arrived, _ = workspace
    SLICES: tl.constexpr = CONFIG.slices
    K: tl.constexpr = CONFIG.classes
    off_k = slice_k * CONFIG.block_k + tl.arange(0, CONFIG.block_k)
    mask_k = off_k < K
    mask_n = off_n < N
    _, cold = heat_of(rule, off_n)
    logits = tl.trans(tile)
    bias, stride_bk = bias
    if bias is not None:
        shift = tl.load(bias + off_k.to(tl.int64) * stride_bk, mask=mask_k, other=0.0)
        logits += shift.to(tl.float32)[None, :]
    if probs is not None:
        row = probs + off_n.to(tl.int64) * K
        tl.store(row[:, None] + off_k[None, :], logits, mask=mask_n[:, None] & mask_k[None, :])
    logits = tl.where(mask_k[None, :], logits, float("-inf"))
    ranked = tl.where(logits != logits, float("inf"), logits)  # as first_maximum does, in fewer registers
    top = tl.max(ranked, axis=1)
    best = tl.min(tl.where(ranked == top[:, None], off_k[None, :], K), axis=1)
    exps = heated_exp(logits, top, cold)
    total = tl.sum(exps, axis=1)
    state = total
    if CONFIG.criterion == ENTROPY:
        state = tl.sum(tl.where(exps > 0, (logits - top[:, None]) * cold * exps, 0.0), axis=1)
    if CONFIG.criterion == MARGIN:
        state = tl.max(tl.where(off_k[None, :] == best[:, None], float("-inf"), logits), axis=1)
    pointer = findings + off_n.to(tl.int64) * (4 * SLICES) + slice_k
    tl.store(pointer, top, mask=mask_n)
    tl.store(pointer + SLICES, total, mask=mask_n)
    tl.store(pointer + 2 * SLICES, best.to(tl.float32, bitcast=True), mask=mask_n)
    tl.store(pointer + 3 * SLICES, state, mask=mask_n)
    tl.debug_barrier()  # puts every thread's stores before the arrivals
    tl.atomic_add(arrived + off_n, 1, mask=mask_n, sem="release", scope="gpu")


@triton.jit
def finish(number, rule, output, workspace, N, CONFIG: tl.constexpr):
    """Write some of a sample's probabilities, and its answer if the last to do so; returns whether so, and which."""
    _, findings, arrived, _ = workspace
    FINISHERS: tl.constexpr = CONFIG.finishers
    K: tl.constexpr = CONFIG.classes
    SLICES: tl.constexpr = CONFIG.slices
    probs, _, _, _ = output
    pid_n = number // FINISHERS
    off_n = pid_n + tl.arange(0, 1)
    mask_n = off_n < N
    heat, cold = heat_of(rule, off_n)
    # under a temperature that is not finite and positive there is no answer, even if its exponentials have a sum
    cold = tl.where(((heat > 0) & (heat < float("inf")))[:, None], cold, float("nan"))
    wait_for_samples(arrived, off_n, mask_n, SLICES)
    top, total, best, state = all_findings(findings + tl.cast(pid_n, tl.int64) * (4 * SLICES), cold, CONFIG)
    if probs is not None:
        sure = largest_probability(top, total)
        start_k = number % FINISHERS * CONFIG.block_j
        write_probs(probs, None, top, sure, cold, off_n, mask_n, start_k, K, CONFIG.block_j)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived + pid_n, 1, sem="acq_rel", scope="gpu") == SLICES + FINISHERS - 1
    if is_last:
        tl.store(arrived + pid_n, 0)
        write_answer(top, total, best, state, heat, cold, rule, output, off_n, mask_n, K, CONFIG.criterion)
    return is_last, pid_n


@triton.jit
def all_findings(findings, cold, CONFIG: tl.constexpr):
    """Return the largest logit of all slices, the sum of exponentials, the class and the state of a sample."""
    SLICES: tl.constexpr = CONFIG.slices
    off = tl.arange(0, CONFIG.slices_block)[None, :]
    mask = off < SLICES
    # .cg: other SMs wrote them
    tops = tl.load(findings + off, mask=mask, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(findings + SLICES + off, mask=mask, other=0.0, cache_modifier=".cg")
    classes = tl.load(findings + 2 * SLICES + off, mask=mask, other=0.0, cache_modifier=".cg")
    top, best = first_maximum(tops, classes.to(tl.int32, bitcast=True))
    decays = heated_exp(tops, top, cold)
    total = tl.sum(rounded_product(totals, decays), axis=1)
    state = total
    if CONFIG.criterion == ENTROPY or CONFIG.criterion == MARGIN:
        states = tl.load(findings + 3 * SLICES + off, mask=mask, other=float("-inf"), cache_modifier=".cg")
        if CONFIG.criterion == MARGIN:
            others = tl.where(classes.to(tl.int32, bitcast=True) != best[:, None], tops, float("-inf"))
            state = tl.max(tl.maximum(others, states), axis=1)
        else:
            below = (tops - top[:, None]) * cold * totals
            state = tl.sum(tl.where(decays > 0, rounded_product(states + below, decays), 0.0), axis=1)
    else:  # those without a state; another one's would be left out in silence
        tl.static_assert(CONFIG.criterion == MAX_PROB or CONFIG.criterion == ENERGY or CONFIG.criterion == PATIENCE)
    return top, total, best, state


@triton.jit
def rounded_product(left, right):
    """Return a product that no sum is fused with: of a sum of products threads would then have different ones."""
    if INTERPRETED:
        return left * right
    else:
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=r,r,r", [left, right], tl.float32, True, pack=1)
