"""Tuning the same heads afresh, time and again, to see whether it comes to the same."""

from collections import Counter
from collections.abc import Callable, Generator, Sequence

from ...kernels.launch_config import LaunchConfig
from ..measuring.progress import Status
from ..measuring.targets import Measurer, Target
from ..measuring.timers import FINAL_ROUNDS
from ..records.comparison import Difference, compare_runs
from ..sweep.measure import Sweep
from ..sweep.records import Book
from ..sweep.search import Answers, Ask, Search
from .agreement import Agreement


def retune(
    measurer: Measurer,
    targets: Sequence[Target],
    search: Search,
    books: Sequence[Book],
    watch: Callable[[Status], None] = lambda status: None,
) -> list[Agreement]:
    """Tune as often as there are books but one, and compare what was chosen in one more run.

    That run knows nothing of the tunings: in its own times what a tuning chose would look faster than it is.

    Args:
        measurer: of the targets.
        targets: what to tune.
        search: the strategy.
        books: one for each tuning, since what a book holds is not measured again, and one for the comparison.
        watch: is told how far it is.
    """
    times = len(books) - 1
    chosen: dict[tuple[Target, str], Counter[LaunchConfig]] = {}
    for number, book in enumerate(books[:-1]):
        sweep = Sweep(measurer, search, book, _part(watch, f"tuning {number + 1} of {times}", number, len(books)))
        sweep.run(targets)
        for tuning in sweep.tunings:
            for place in tuning.answers:
                winner = tuning.winner(place)
                chosen.setdefault((tuning.target, place), Counter()).update([] if winner is None else [winner])

    def together(target: Target) -> Generator[Ask, Answers, None]:
        for (head, place), configs in chosen.items():
            if head == target and len(configs) > 1:
                yield Ask(place, tuple(configs), FINAL_ROUNDS, share=1.0)

    last = Sweep(measurer, together, books[-1], _part(watch, "comparison", times, len(books)))
    last.run(targets)
    answers = {(tuning.target, place): found for tuning in last.tunings for place, found in tuning.answers.items()}
    return [
        Agreement(*thing, times, configs, _over_usual(configs, answers.get(thing, {})))
        for thing, configs in chosen.items()
    ]


def _over_usual(chosen: Counter[LaunchConfig], answers: Answers) -> dict[LaunchConfig, Difference]:
    usual = [config for config, _ in chosen.most_common(1)]
    if not usual or usual[0] not in answers:
        return {}
    return {config: compare_runs(its, answers[usual[0]]) for config, its in answers.items() if config != usual[0]}


def _part(watch: Callable[[Status], None], what: str, number: int, parts: int) -> Callable[[Status], None]:
    """Tell how far one of several sweeps is."""

    def told(status: Status) -> None:
        watch(status._replace(done=(number + status.done) / parts, doing=f"{what}: {status.doing}"))

    return told
