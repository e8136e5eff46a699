"""All programs by name: the planted faults and the correct ones."""

from . import cifar_streams, correct, planted, question, threads, training_loop, training_loop_corrected
from .program import Program
from .program import planted as with_fault

PROGRAMS: dict[str, Program] = {
    **{f"planted_{name}": program for name, program in planted.PROGRAMS.items()},
    **{f"question_{name}": program for name, program in question.PROGRAMS.items()},
    **cifar_streams.PROGRAMS,
    **threads.PROGRAMS,
    "training_loop": with_fault(
        training_loop.training_step,
        *("allocation", "pageable-copy"),
        may_find=("host-wait",),  # as a script, in which steps follow one another
        needs_cuda=False,
    ),
    "training_loop_corrected": Program(training_loop_corrected.training_step, needs_cuda=False),
    **correct.PROGRAMS,
}
FAULTY = [name for name, program in PROGRAMS.items() if program.finds]
CORRECT = [name for name, program in PROGRAMS.items() if not program.finds]
#: Those that an ordinary machine without a GPU can make and call.
ON_CPU = [name for name, program in PROGRAMS.items() if not program.needs_cuda]
