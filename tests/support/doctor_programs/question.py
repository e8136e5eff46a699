"""The question's own program, step by step: what the guide "From t1 + t2 to max(t1, t2)" shows."""

from auxhead.model.guides.targets import (
    graph_in_line,
    graphs,
    in_line,
    independent,
    one_launch,
    priorities,
    real_exits,
    returning_early,
    shorter_trunk,
    stream_class,
    streams_left_out,
    streams_right,
)

from .program import Program, planted

PROGRAMS: dict[str, Program] = {
    "in_line": planted(in_line, "fusible-heads", "launch-bound", needs_cuda=False),
    "returning_early": planted(
        returning_early, "host-wait", may_find=("launch-bound", "fusible-heads", "gate-waits"), needs_cuda=False
    ),
    "independent": planted(independent, "fusible-heads", "launch-bound", needs_cuda=False),
    "streams_left_out": planted(streams_left_out, "default-stream", may_find=("launch-bound", "fusible-heads")),
    "streams_class": planted(
        stream_class,
        "stream-class",
        may_find=(
            *("race", "freed-in-use", "default-stream", "priority"),
            *("allocation", "launch-bound", "fusible-heads", "full-device"),
        ),
    ),
    "streams_right": planted(streams_right, "launch-bound", may_find=("priority", "fusible-heads", "full-device")),
    "priorities": planted(priorities, "launch-bound", may_find=("fusible-heads", "full-device")),
    "graph_in_line": Program(graph_in_line),
    "graphs": Program(graphs),
    "one_launch_a_head": Program(one_launch),
    "shorter_trunk": Program(shorter_trunk),
    "real_exits": Program(real_exits),
}
