"""What a plan of lanes, of auxhead.model.trunk.branches, does not order and has to."""

from collections.abc import Iterator

from auxhead.model.trunk.branches import Step
from torch.fx import Node

#: What launches nothing of what trunks call.
QUIET = {"getattr", "joined", "joined_memory", "place_in"}


def launched(node: Node) -> Iterator[Node]:
    """What a node reads that launches something: what does not is seen through."""
    for each in node.all_input_nodes:
        if each.op == "call_function" and getattr(each.target, "__name__", "") in QUIET:
            yield from launched(each)
        else:
            yield each


def ordered(steps: list[Step], without: tuple[int, int] | None = None) -> list[set[int]]:
    """By step, all that has run before it begins; ``without`` the wait of one step for another."""
    before: list[set[int]] = []
    newest: dict[int, int] = {}
    for number, step in enumerate(steps):
        behind = [each for each in step.waits if (number, each) != without]
        behind += [newest[step.lane]] if step.lane in newest else []
        before.append(set().union(*(before[each] | {each} for each in behind)))
        newest[step.lane] = number
    return before


def wrong(steps: list[Step], taps: set[str], without: tuple[int, int] | None = None) -> list[str]:
    """What a plan does not order that has to be: uses behind what they use, memory behind its last reader, joins."""
    before, found = ordered(steps, without), []
    index = {step.node: number for number, step in enumerate(steps)}
    joins = [number for number, step in enumerate(steps) if step.joins]
    for number, step in enumerate(steps):
        found += [f"{step.node} before {each}" for each in launched(step.node) if index[each] not in before[number]]
        joined = step.node.op == "output" or str(step.node.target) in taps or step.joins
        if joined and len(before[number]) < number:
            found.append(f"{step.node} before all")
        users = [index[user] for user in step.node.users]
        if not users or step.node.op == "placeholder":
            continue
        free = max(users)
        if crossing := [user for user in users if steps[user].lane != step.lane]:
            free = max(free, next((each for each in joins if each >= max(crossing)), len(steps)))
        for later in range(free + 1, len(steps)):
            if steps[later].lane == step.lane and not before[later].issuperset(users):
                found.append(f"{steps[later].node} gets the memory of {step.node}")
    return found
