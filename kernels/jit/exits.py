"""Triton kernel of heads: one launch runs successive exits of a network, or one head alone.

A place is an exit index: the heads from 0, and last the network's own classifier. A launch covers successive places,
whose heads write their outputs for every sample; see head.py. Where logits are given, by the classifier, a module or a
library, one program a sample decides. A network's last program of a sample to finish merges its answer; see merge.py.
"""

import triton
import triton.language as tl

from .decide import decide
from .head import first_of_stage, head_program, read_rule, stage_programs
from .merge import merge, tell
from .residency import clock, record_turn


@triton.jit
def exit_kernel(
    places,  # of each: HeadArguments, or logits, bias and rule; and the first program of each of its stages
    output,  # of all places of the network: probabilities [PLACES, N, K] or None; label, confidence, exits [PLACES, N]
    answer,  # the network's: probabilities [N, K] or None; label, confidence, exit [N]
    valid,  # [1] int32: the first samples of the batch, which are no padding
    counters,  # joined [N] int32; tally [1] int64, of merged and open samples; tickets [1] int32; 0 before and after
    told,  # open samples [1] int64 in pinned memory, or None; requests so far [1] int64; see ``tell`` for the third
    tallies,  # [PLACES, TALLY_BINS] int64: answers of each place so far, by their confidence, or None
    patience,  # if LAUNCH.patient by head the threshold [1] if it exits under patience, else None
    total,  # pieces of work, one a program; if bounded there are fewer programs, which go on until all is done
    residency,  # [total, 3] int64: see launch/residency.py, or None
    N,
    LAUNCH: tl.constexpr,  # LaunchConstants
):
    """Run the heads of a launch and, if LAUNCH.merges, merge; else ``answer`` to ``patience`` are None, tickets aside.

    ExitLaunch sizes everything, and launch_fused_head for one head.
    """
    if residency is not None:
        start = clock()
    if LAUNCH.bounded:
        tickets = counters[2]
        last_ticket = tl.num_programs(0) - 1 + total
        pid = draw_ticket(tickets, last_ticket)
        while pid < total:
            exit_program(pid, places, output, answer, valid, counters, told, tallies, patience, N, LAUNCH)
            if residency is not None:
                start = record_turn(residency, pid, start)
            pid = draw_ticket(tickets, last_ticket)
    else:
        pid = tl.program_id(0)
        exit_program(pid, places, output, answer, valid, counters, told, tallies, patience, N, LAUNCH)
        if residency is not None:
            record_turn(residency, pid, start)


@triton.jit
def draw_ticket(tickets, last):
    """Return the next piece of work that nobody has begun; ``tickets`` is 0 before, and after ticket ``last``."""
    ticket = tl.atomic_add(tickets, 1)
    # No branch: before one, ptxas 12.8 may leave the thread that drew behind the others of its warp, for good. What a
    # warp does as one is then done twice, such as counting the turns of a loop, of which half are missing.
    tl.store(tickets, 0, mask=ticket == last)
    return ticket


@triton.jit
def exit_program(pid, places, output, answer, valid, counters, told, tallies, patience, N, LAUNCH: tl.constexpr):
    """Do the work of program ``pid``; if it is the last to decide about a sample, merge what all heads say of it."""
    HEADS: tl.constexpr = len(LAUNCH.places)
    pid_n = 0
    decided = False
    for i in tl.static_range(HEADS):
        decides, sample = place_program(pid, places[i], output, N, i, LAUNCH)
        if decides:
            pid_n = sample
        decided |= decides
    if LAUNCH.merges:
        joined, tally, _ = counters
        open_samples, _, condition = told
        off_n = pid_n + tl.arange(0, 1)
        is_open = off_n < N
        if decided:
            # read before waiting for the other heads
            if LAUNCH.first == 0:
                is_open = off_n < tl.load(valid)  # padding of the batch is never open
            else:
                is_open = tl.load(answer[3] + off_n, mask=off_n < N, other=0) < 0
            tl.debug_barrier()
            if HEADS > 1:
                decided = tl.atomic_add(joined + pid_n, 1, sem="acq_rel", scope="gpu") == HEADS - 1
        if decided:  # as the last of all
            if HEADS > 1:
                tl.store(joined + pid_n, 0)
            still_open = merge(output, answer, tallies, patience, is_open, off_n, N, LAUNCH)
            if open_samples is not None or condition is not None:
                tl.debug_barrier()
                tell(still_open, tally, told, N, LAUNCH)


@triton.jit
def place_program(pid, place, output, N, i: tl.constexpr, LAUNCH: tl.constexpr):
    """Do the work of program ``pid`` if it is of this place; returns whether it decided about a sample, and which."""
    given, start = place  # of its stages; a number where logits are given, None if the launch is this head alone
    CONFIG: tl.constexpr = LAUNCH.places[i]
    PLACE: tl.constexpr = LAUNCH.first + i
    K: tl.constexpr = LAUNCH.classes
    probs, label, confidence, exits = output
    label += PLACE * N
    confidence += PLACE * N
    exits += PLACE * N
    if probs is not None:
        probs += tl.cast(PLACE, tl.int64) * N * K
    output = (probs, label, confidence, exits)
    pid_n = 0
    decided = False
    if CONFIG.is_fused and len(LAUNCH.places) == 1:  # all programs are its own
        decided, pid_n = head_program(pid, given, output, N, CONFIG)
    elif CONFIG.is_fused:
        number = number_in_head(pid, start, N, CONFIG)
        if number >= 0:
            decided, pid_n = head_program(number, given, output, N, CONFIG)
    else:
        logits, bias, rule = given
        logits, stride_ln, stride_lk = logits
        if (pid >= start) & (pid < start + N):
            pid_n = pid - start
            decided = True
            decide(
                None, (logits, 0, stride_ln, stride_lk, K, 1), bias, read_rule(rule), output,
                pid_n + tl.arange(0, 1), N, K, CONFIG.criterion, False, 1, LAUNCH.block_j,
            )  # fmt: skip
    return decided, pid_n


@triton.jit
def number_in_head(pid, starts, N, CONFIG: tl.constexpr):
    """Return which program of a head ``pid`` is, or -1; ``starts``: the launch's first programs of its stages."""
    number = -1
    for stage in tl.static_range(len(CONFIG.shares)):
        if CONFIG.shares[stage][1] > 0:
            count, start = stage_programs(stage, N, CONFIG), starts[stage]
            is_of_stage = (pid >= start) & (pid < start + count)
            number = tl.where(is_of_stage, first_of_stage(stage, N, CONFIG) + pid - start, number)
    return number
