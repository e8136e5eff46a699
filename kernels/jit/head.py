"""A fused head: its stages (pool, multiply, add up, decide), and which program does which of them, in each way.

    feature[n, f] = pool of x[n, c] over window (i, j),    f = (c * GRID_H + i) * GRID_W + j
    logit[n, k]   = sum_f feature[n, f] * weight[k, f] + bias[k],    or of a head with hidden layers
    hidden[n, h]  = activation(sum_f norm(feature[n])[f] * weight[h, f] + bias[h])
    logit[n, k]   = sum_h hidden[n, h] * last_weight[k, h] + last_bias[k]
    probs[n]      = softmax(logit[n] / temperature)
    exit[n]       = confidence[n] > threshold,    such as max_k probs[n, k]; see reference/criteria.py

Programs come to the logits in three ways, and the configuration chooses; in a fourth a library does (before_launch.py):

*   split, for small weights: each program pools a block of features of one sample and multiplies it with its columns
    of the weight. One program of the sample adds these parts up, and decides: by CONFIG.waits the one with the largest
    number, which waits for the others' sums, or else whichever arrives last.
*   tiled, for batches or many classes: the first programs pool, and send features number by number; the next ones wait
    for a sample, or a group of them, and multiply it with some rows of the weight, a tile, a group on tensor cores
    (float32, which only tables choose, is not); the last ones wait for the sums of a sample, and decide.
*   read, for large weights: features lie in memory, in x itself where nothing is pooled, or packed by a launch before
    (pack.py), and stream with the weight through shared memory. CONFIG.tiled is true here, too: others multiply.

Stages in the order of their programs' numbers: 0 pools, and does all if split; 1 multiplies, and before a norm of
features that are read its first N programs send the statistics; 2 adds up and decides. Behind a hidden layer 2
multiplies the last layer before it decides, or, if that is large, only sends hidden features: then 3 multiplies them
with some rows each, and 4 decides. Of many classes whose features are read, 1 sends no sums but finds out about its own
rows; see slices.py.

These are numbers within the head: a launch of several has stage 0 of all, then stage 1 of all (``number_in_head``).
Nothing may wait for a program that cannot start. Programs start in the order of their numbers, and those that are
waited for have the smaller ones. CUDA's documentation does not promise that order, but NVIDIA's own scan waits on it
("blocks are launched in increasing order", ``cub/agent/agent_scan.cuh``), as in ``torch.cumsum`` of a vector.
Numbers drawn in the order of starting would not need it; they cost 1 to 3 us of a head's 6 to 20 (1,000 classes, batch
32 and 128, H200).

What is sent lies in memory that is 0 before the launch and after it (``Workspace``, in launch/memory.py; below).

Sums are float32 and their order is fixed, so that results repeat bit for bit. A part is one of a window
(``window_parts``) or of a sum, over some features. Prefixes: ``pid_`` program, ``off_`` index along a dimension,
``mask_`` True for indices that exist, ``acc_`` float32 accumulator; ``heat`` is the temperature, ``cold`` 1 over it,
``sure`` the largest probability. CONFIG is the head's ``HeadConstants``; the arguments that are tuples are described at
``HeadArguments``, in launch/memory.py, and ``output`` at ``exit_kernel``.
"""

import triton
import triton.language as tl
from triton.language import core

from .decide import dealt_out, decide
from .hand_over import send
from .hidden_layers import NO_ACTIVATION
from .last_layer import decide_by_hidden, decide_by_logits, last_tile, send_hidden
from .pool import feature_count, known_multiple, pooled_block, pooled_features
from .product import split_product, tile_product, weight_block
from .read_product import read_product, send_statistics
from .slices import finish, survey_tile

# memory      sent in stage   awaited in   set back to 0 by
# features    0               1            who decides (clear_features)
# sums        0 or 1          2            who adds them up (logits_block)
# statistics  1               1            who decides (first_program)
# arrived     0 or 1          2            the last to arrive at that counter of a sample, who goes on
# hidden      2               3            who decides (decide_by_logits)
# logits      3               4            who decides (logits_block)


@triton.jit
def head_program(pid, head, output, N, CONFIG: tl.constexpr):
    """Do the work of program ``pid`` of a head; returns whether it decided about a sample, and which."""
    # head: x, weight, bias, rule, workspace (features, sums or findings, arrived, statistics), sizes, norm, last layer
    if CONFIG.last_n > 0:
        _, _, _, rule, _, _, _, last = head
        first_last = first_of_stage(3, N, CONFIG)
        first_decision = first_of_stage(4, N, CONFIG)
        decides = pid >= first_decision
        pid_n = pid - first_decision
        if decides:
            decide_by_logits(read_rule(rule), last, output, pid_n, N, CONFIG)
        elif pid >= first_last:
            last_tile(pid - first_last, last, N, CONFIG)
        else:
            first_program(pid, head, output, N, CONFIG)
        return decides, pid_n
    else:
        return first_program(pid, head, output, N, CONFIG)


@triton.jit
def stage_programs(stage: tl.constexpr, N, CONFIG: tl.constexpr):
    """Count the programs of a stage; see ``LaunchConfig.shares_of``."""
    count = tl.cdiv(N, CONFIG.shares[stage][0]) * CONFIG.shares[stage][1]
    if stage == 1 and CONFIG.reads and CONFIG.norms:  # they send the statistics
        count += N
    return count


@triton.jit
def first_of_stage(stage: tl.constexpr, N, CONFIG: tl.constexpr):
    """Return the number of a stage's first program."""
    first = 0
    for earlier in tl.static_range(stage):
        first += stage_programs(earlier, N, CONFIG)
    return first


@triton.jit
def first_program(pid, head, output, N, CONFIG: tl.constexpr):
    """Do the work of a program of the layer that reads the features; returns whether it decided, and the sample."""
    x, weight, bias, rule, workspace, sizes, _, last = head
    features, partial, _, statistics = workspace
    rule = read_rule(rule)  # before anything waits
    if CONFIG.tiled:
        decides, pid_n = tiled_program(pid, head, rule, output[0], N, CONFIG)
        product = None  # a constexpr, by which ``decide`` compiles to what reads sums
    else:
        decides, pid_n, product = split_program(pid, x, weight, workspace, sizes, N, CONFIG)
        if not CONFIG.one_program:
            product = None
    if decides:
        off_n = pid_n + tl.arange(0, 1)
        PARTS: tl.constexpr = CONFIG.block_s if CONFIG.tiled else CONFIG.splits
        ROW: tl.constexpr = CONFIG.row_width
        sums = (partial, tl.cast(N, tl.int64) * ROW, ROW, 1, ROW, PARTS)
        if CONFIG.surveys:
            decides, pid_n = finish(pid_n, rule, output, workspace, N, CONFIG)
        elif CONFIG.activation == NO_ACTIVATION:
            decide(
                product, sums, bias, rule, output, off_n, N, CONFIG.rows,
                CONFIG.criterion, CONFIG.hands_over, CONFIG.parts_at_once, CONFIG.block_j,
            )  # fmt: skip
        elif CONFIG.last_n > 0:
            send_hidden(product, sums, bias, last, off_n, N, CONFIG)
        else:
            decide_by_hidden(product, sums, bias, rule, last, output, off_n, N, CONFIG)
        # all tiles have taken what they were sent, since their products are here
        if CONFIG.reads and CONFIG.norms:
            if decides:  # still, after ``finish``
                tl.store(statistics + pid_n, 0)
                tl.store(statistics + N + pid_n, 0)
        elif CONFIG.tiled and not CONFIG.reads:
            clear_features(features, pid_n, sizes, N, CONFIG)
    return decides, pid_n


@triton.jit
def read_rule(rule):
    """Return temperature and threshold as numbers."""
    temperature, threshold = rule
    return rule_number(temperature), rule_number(threshold)


@triton.jit
def rule_number(value):
    """Return a number of a rule: given, or read where it lies, or 1 of a classifier, which has no rule."""
    if value is None:
        return 1.0
    elif core.to_tensor(value).dtype.is_ptr():  # the interpreter leaves a float in a tuple what it is
        return tl.load(value)
    else:
        return value


@triton.jit
def split_program(pid, x, weight, workspace, sizes, N, CONFIG: tl.constexpr):
    """Pool a block of features and multiply it; returns whether to decide now about which sample, and its product.

    Where ``one_program`` has all of a sample, its product is the sum. Others leave theirs in the workspace.
    """
    weight, stride_wk, stride_wf = weight
    stride_wk = known_multiple(stride_wk, CONFIG.unit)
    _, partial, arrived, _ = workspace
    positions = sizes[3] * sizes[4]
    pid_n = pid // CONFIG.splits
    pid_split = pid % CONFIG.splits
    block = pooled_block(pid_split, sizes, CONFIG)
    _, _, off_c, off_p, mask_f = block
    column = weight + (off_c.to(tl.int64) * positions + off_p) * stride_wf
    # on its way while x is pooled
    columns = weight_block(column, stride_wk, mask_f, tl.arange(0, CONFIG.block_k), CONFIG.rows)
    pooled = pooled_features(x, pid_n, block, sizes, CONFIG)
    product = tl.full((1, CONFIG.block_j), 0.0, tl.float32)
    if CONFIG.one_program:
        product = dealt_out(tl.sum(columns.to(tl.float32) * pooled, axis=1)[None, :], CONFIG.block_j)
        decides = pid >= 0
    else:
        row = partial + (tl.cast(pid_split, tl.int64) * N + pid_n) * CONFIG.row_width
        split_product(pooled, columns, column, stride_wk, mask_f, row, CONFIG)
        if CONFIG.waits:
            decides = pid_split == CONFIG.splits - 1
        else:
            tl.debug_barrier()  # puts every thread's stores before the one thread's arrival
            decides = tl.atomic_add(arrived + pid_n, 1, sem="acq_rel", scope="gpu") == CONFIG.splits - 1
            if decides:
                tl.store(arrived + pid_n, 0)
    return decides, pid_n, product


@triton.jit
def tiled_program(pid, head, rule, probs, N, CONFIG: tl.constexpr):
    """Pool, if among the first programs, or multiply a tile; returns whether to decide now, and about which sample.

    Where CONFIG.surveys, as which of the programs that finish, of which ``finish`` makes a sample.
    """
    x, weight, _, _, workspace, sizes, norm, _ = head
    features, partial, _, _ = workspace
    F = feature_count(sizes)
    first_tile = first_of_stage(1, N, CONFIG)
    first_decision = first_of_stage(2, N, CONFIG)
    pools = pid < first_tile
    decides = pid >= first_decision
    pid_n = 0
    if pools:
        if not CONFIG.reads:  # which has no such programs, and compiles nothing here
            pid_n = pid // CONFIG.splits
            send_features(pid_n, pid % CONFIG.splits, x, features, F, sizes, N, CONFIG)
    elif decides:
        pid_n = pid - first_decision
    elif CONFIG.reads:
        read_tile(pid - first_tile, head, rule, probs, N, CONFIG)
    else:
        tile_product(pid - first_tile, weight, norm, features, partial, F, sizes, N, CONFIG)
    return decides, pid_n


@triton.jit
def send_features(pid_n, pid_split, x, features, F, sizes, N, CONFIG: tl.constexpr):
    """Pool a block of features of a sample, and send them to the tiles."""
    block = pooled_block(pid_split, sizes, CONFIG)
    pid_part, _, off_c, off_p, mask_f = block
    pooled = pooled_features(x, pid_n, block, sizes, CONFIG)
    positions = sizes[3] * sizes[4]
    feature = (tl.cast(pid_part, tl.int64) * N + pid_n) * F + off_c.to(tl.int64) * positions + off_p
    send(features + feature, pooled, mask_f)


@triton.jit
def read_tile(pid_tile, head, rule, probs, N, CONFIG: tl.constexpr):
    """Multiply a tile of features in memory; send its sums, or find out about its classes.

    Before a norm the first N programs send its statistics instead.
    """
    x, weight, bias, _, workspace, sizes, norm, _ = head
    _, partial, _, statistics = workspace
    if CONFIG.norms and pid_tile < N:
        send_statistics(pid_tile, x, norm, statistics, sizes, N, CONFIG)
    else:
        number = pid_tile - N if CONFIG.norms else pid_tile
        tile, off_n, pid_k, pid_s = read_product(number, x, weight, norm, statistics, sizes, N, CONFIG)
        if CONFIG.surveys:
            survey_tile(tile, pid_k, off_n, bias, rule, probs, workspace, N, CONFIG)
        else:
            off_k = pid_k * CONFIG.block_k + tl.arange(0, CONFIG.block_k)
            pointer = partial + (tl.cast(pid_s, tl.int64) * N + off_n)[None, :] * CONFIG.row_width + off_k[:, None]
            send(pointer, tile, (off_n < N)[None, :] & (off_k < CONFIG.sent)[:, None])


@triton.jit
def clear_features(features, pid_n, sizes, N, CONFIG: tl.constexpr):
    """Set the features of a sample, which all tiles have taken, back to 0."""
    F = feature_count(sizes)
    for start_f in range(0, F, CONFIG.block_f):
        off_f = start_f + tl.arange(0, CONFIG.block_f)
        for part in range(0, CONFIG.window_parts):
            row = features + (tl.cast(part, tl.int64) * N + pid_n) * F
            tl.store(row + off_f, 0, mask=off_f < F)
