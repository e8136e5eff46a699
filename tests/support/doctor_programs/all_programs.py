"""All programs by name: the planted faults and the correct ones."""

from auxhead.model.guides import targets

from . import correct, planted, recurring, threads
from .program import Program
from .program import planted as with_fault

#: Of the guide "From t1 + t2 to max(t1, t2)", step by step.
_QUESTION: dict[str, Program] = {
    "in_line": with_fault(targets.in_line, "fusible-heads", "launch-bound", needs_cuda=False),
    "returning_early": with_fault(
        targets.returning_early, "host-wait", may_find=("launch-bound", "fusible-heads", "gate-waits"), needs_cuda=False
    ),
    "independent": with_fault(targets.independent, "fusible-heads", "launch-bound", needs_cuda=False),
    "streams_left_out": with_fault(
        targets.streams_left_out, "default-stream", may_find=("launch-bound", "fusible-heads")
    ),
    "streams_class": with_fault(
        targets.stream_class,
        "stream-class",
        may_find=(
            *("race", "freed-in-use", "default-stream", "priority"),
            *("allocation", "launch-bound", "fusible-heads", "full-device"),
        ),
    ),
    # launch-bound on most hosts, too
    "streams_right": with_fault(
        targets.streams_right, "priority", may_find=("launch-bound", "fusible-heads", "full-device")
    ),
    "priorities": with_fault(targets.priorities, "fusible-heads", may_find=("launch-bound", "full-device")),
    "graph_in_line": Program(targets.graph_in_line),
    "graphs": Program(targets.graphs),
    "one_launch_a_head": Program(targets.one_launch),
    "shorter_trunk": Program(targets.shorter_trunk),
    "real_exits": Program(targets.real_exits),
}

PROGRAMS: dict[str, Program] = {
    **{f"planted_{name}": program for name, program in planted.PROGRAMS.items()},
    **{f"question_{name}": program for name, program in _QUESTION.items()},
    **threads.PROGRAMS,
    **correct.PROGRAMS,
    **recurring.PROGRAMS,
}
FAULTY = [name for name, program in PROGRAMS.items() if program.finds]
CORRECT = [name for name, program in PROGRAMS.items() if not program.finds]
#: Those that an ordinary machine without a GPU can make and call.
ON_CPU = [name for name, program in PROGRAMS.items() if not program.needs_cuda]
