"""Branches of a traced backbone, captured side by side: which node runs on which lane, behind which others.

A lane is a stream of a capture: lane 0 the trunk's, where every tap returns, the others' beside it. The plan is made of
the graph's data flow alone, once; the waits of a plan are all that orders lanes. The idea is that of Opara
(arxiv.org/abs/2312.10351).
"""

import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from .joined_maps import joined, joined_memory, place_in

#: Streams beside the trunk's, at most: more branches than these share them.
MOST_BESIDE = 3
#: What leaves no lane: its output is mostly its input, elsewhere or in part, memory for others, or a number.
_VIEWS = {
    operator.getitem, getattr, joined, joined_memory, place_in, torch.flatten, torch.transpose, torch.permute,
    torch.squeeze, torch.unsqueeze, torch.chunk, torch.split, "flatten", "view", "transpose", "permute", "squeeze",
    "unsqueeze", "chunk", "split", "size", "dim",
}  # fmt: skip


#: What launches nothing, whatever it is given: a flatten may copy, and an index be a tensor.
_LAUNCH_NOTHING = (getattr, joined, joined_memory, place_in)


class Step(NamedTuple):
    """One node, in the order in which they run."""

    node: Node
    lane: int
    waits: tuple[int, ...]
    """Steps on other lanes, by index, behind which it runs."""
    joins: bool
    """On lane 0: behind all that ran on any lane before it, so that all other lanes begin anew behind it."""


def plan_branches(graph: fx.Graph, taps: Collection[str], users: Collection[Node] = ()) -> list[Step]:
    """Plan nodes for lanes: one goes on where an input was made last, or else begins on a lane that nobody needs.

    Modules that are, or hold, ``taps`` join all lanes: what listens there takes all that ran before it to be done. So
    does what runs code of the ``users``: it may read what another one has left.
    """
    steps: list[Step] = []
    joining = {node for node in graph.nodes if node in users or holds_tap(node, taps)}
    nodes = _by_depth(graph, joining)
    index = {node: number for number, node in enumerate(nodes)}
    lane_of: dict[Node, int] = {}
    there: dict[Node, int] = {}  # the step behind which an output is: of a view, one before that launches something
    last = [-1] * (MOST_BESIDE + 1)  # step of each lane
    launched = [*last]  # the last step of each lane that may launch something
    newest: list[set[Node]] = [set() for _ in last]  # what a node may go on from: the last output and its views
    seen = [[-1] * len(last) for _ in last]  # by lane and other lane: the last step that it has waited for
    joined = -1
    for number, node in enumerate(nodes):
        inputs = [each for each in node.all_input_nodes if each.op != "get_attr"]
        all_join = node in joining
        if all_join or node.op in ("placeholder", "get_attr", "output"):
            lane = 0
        else:
            into = node.kwargs.get("into")  # memory, of which nothing is read
            read = [each for each in inputs if each is not into]
            lane = _lane_for(node, read, lane_of, newest, number, index)
        waits: set[int] = set()
        for other in range(len(last)):
            needed = max((there[each] for each in inputs if lane_of[each] == other), default=-1)
            if all_join or node.op == "output":
                needed = last[other]
            if other != lane and needed > max(seen[lane][other], joined):
                waits.add(needed)
                seen[lane][other] = needed
        if lane and not waits and last[lane] <= joined and joined >= 0:
            waits.add(joined)  # memory that other lanes have given back may be what it gets
        lane_of[node] = lane
        launches = node.op != "call_function" or node.target not in _LAUNCH_NOTHING
        if launches or waits or launched[lane] < 0:
            launched[lane] = number
        there[node] = launched[lane]
        if node.op != "get_attr":
            last[lane] = number
            is_view = node.target in _VIEWS and inputs and inputs[0] in newest[lane]
            newest[lane] = {*newest[lane], node} if is_view else {node}
        behind_all = all(last[other] <= max(seen[0][other], joined) for other in range(1, len(last)))
        joins = lane == 0 and behind_all and (all_join or any(each > joined for each in last[1:]))
        if joins:
            joined = number
        steps.append(Step(node, lane, tuple(sorted(waits)), joins))
    return steps


def holds_tap(node: Node, taps: Collection[str]) -> bool:
    """Return whether a node calls a tap, or a layer that calls one."""
    return node.op == "call_module" and any(f"{tap}.".startswith(f"{node.target}.") for tap in taps)


def _by_depth(graph: fx.Graph, joining: Collection[Node]) -> list[Node]:
    """Return nodes in the order of what they are behind, those that join lanes in their own.

    In that of the graph one branch comes behind another as a whole, and so behind all taps of that, which join lanes.
    """
    depth: dict[Node, int] = {}
    of_last = 0
    for node in graph.nodes:
        its = max((depth[each] for each in node.all_input_nodes), default=0) + (node.target not in _VIEWS)
        if node in joining:
            its = of_last = max(its, of_last + 1)
        depth[node] = len(graph.nodes) + its if node.op == "output" else its
    return sorted(graph.nodes, key=depth.__getitem__)


def _lane_for(
    node: Node,
    inputs: Sequence[Node],
    lane_of: dict[Node, int],
    newest: Sequence[Collection[Node]],
    number: int,
    index: dict[Node, int],
) -> int:
    if not inputs:
        return 0
    goes_on = [lane for lane, nodes in enumerate(newest) if any(each in nodes for each in inputs)]
    if goes_on:
        return goes_on[0]
    if node.target in _VIEWS:  # no launch, and no reason to leave
        return lane_of[inputs[0]]
    free = [
        lane for lane, nodes in enumerate(newest) if all(index[user] < number for each in nodes for user in each.users)
    ]
    return free[0] if free else lane_of[inputs[-1]]


def has_branches(steps: Sequence[Step]) -> bool:
    """Return whether any step runs beside the trunk."""
    return any(step.lane for step in steps)


def run_side_by_side(
    module: fx.GraphModule, steps: Sequence[Step], x: Tensor, beside: Sequence[torch.cuda.Stream]
) -> Any:
    """Run the steps of a plan for the graph of ``module``, with lanes on ``beside`` and, the first, the current stream.

    When it returns the current stream is behind all of them.
    """
    streams = [torch.cuda.current_stream(x.device), *beside]
    awaited = {each for step in steps for each in step.waits}
    last_use = {each: number for number, step in enumerate(steps) for each in step.node.all_input_nodes}
    run = fx.Interpreter(module, garbage_collect_values=False)
    for hook in (*module._forward_pre_hooks.values(),):  # of who listens, and reads what is packed in x
        hook(module, (x,))
    homes: dict[Node, set[int]] = {}  # the lanes that gave each output its memory, and get that back
    events: dict[int, torch.cuda.Event] = {}
    shared: list[Any] = []  # what other lanes have read: nobody gets its memory before they join
    for number, (node, lane, waits, joins) in enumerate(steps):
        stream = streams[lane]
        for index in waits:
            stream.wait_event(events[index])
        if node.op == "placeholder":
            run.env[node] = x
        else:
            with torch.cuda.stream(stream):
                run.env[node] = run.run_node(node)
        mine = _storages(run.env[node])
        its = [each for each in node.all_input_nodes if mine & _storages(run.env[each])]
        homes[node] = set().union(*(homes[each] for each in its)) or {lane}
        if number in awaited:
            events[number] = stream.record_event()
        for each in node.all_input_nodes:
            if homes[each] != {lane}:
                shared.append(run.env[each])
            if last_use[each] == number:
                del run.env[each]
        if joins:
            shared.clear()
    return run.env[node]


def _storages(value: Any) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tree_leaves(value) if isinstance(each, Tensor)}
