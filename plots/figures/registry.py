"""The list of all figures, their records and the commands that measure them; draws and saves one."""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ...autotune.records.record import made_of
from ...model.basics.garbage import no_garbage_collection
from ..records import COMMITTED, Known, NoRecords, read_kinds

#: The figures that come with the package, each with its numbers.
GALLERY = Path(__file__).parents[1] / "gallery"
#: A matplotlib figure, and everything that it shows as JSON values, "title" and "stamp" among them.
Drawn = tuple[Any, dict[str, Any]]


class FigureKind(NamedTuple):
    """A figure that can be drawn from records, by two functions of a module of this folder.

    For "latency", ``latency_numbers(records)`` returns everything that it shows, and raises ``NoRecords`` where records
    that it needs are missing, and ``BadRecord``; ``latency_figure(numbers)`` draws these alone. ``read``, if the module
    has it, reads what the first one takes, given paths, kinds and what is known; else ``read_kinds`` does.
    """

    name: str
    """Name of the subcommand and of the files."""
    module: str
    kinds: tuple[str, ...]
    """Kinds of the records that it is drawn from."""
    file: str
    """File of the package's own records, in autotune/records."""
    made_by: str
    """The command that measures such records; "" where none does any more."""
    finding: str
    """One line on what the figure shows, the help of the subcommand."""

    def _function(self, what: str) -> Any:
        # imported when it is needed: matplotlib takes longer than help should
        return getattr(import_module(f".{self.module}", __package__), f"{self.name.replace('-', '_')}_{what}")

    def numbers(self, found: Any) -> dict[str, Any]:
        """Return the numbers of the figure, of what was read for it."""
        numbers: dict[str, Any] = self._function("numbers")(found)
        return numbers

    def draw(self, found: Any) -> Drawn:
        """Draw it from what was read for it."""
        numbers = self.numbers(found)
        return self._function("figure")(numbers), numbers

    def make(self, paths: Sequence[Path] | None = None, known: Known | None = None) -> Drawn:
        """Draw it from files; records of other kinds are passed over.

        Args:
            paths: the files; None for those of the package, or the gallery's numbers where these, too large for a
                wheel, are not there.
            known: what other figures were drawn from; what this one is drawn from is added.

        Raises:
            NoRecords: there is nothing to draw; names the command that measures it.
            BadRecord: a file that does not hold records, or records of several devices or versions.
        """
        kept = GALLERY / f"{self.name}.json"
        if paths is None and not (COMMITTED / self.file).exists() and kept.exists():
            numbers = json.loads(kept.read_text(encoding="utf-8"))
            return self._function("figure")(numbers), numbers
        try:
            ending = Path(self.file.removesuffix(".gz")).suffix
            files = [COMMITTED / self.file]
            if paths is not None:
                files = [path for path in paths if Path(path.name.removesuffix(".gz")).suffix == ending]
            if not files:
                raise NoRecords(f"{', '.join(map(str, paths or ()))}: wants a name that ends in {ending}")
            read = getattr(import_module(f".{self.module}", __package__), "read", read_kinds)
            return self.draw(read(files, self.kinds, {} if known is None else known))
        except NoRecords as error:
            how = f"`{self.made_by}` makes it" if self.made_by else "no command of this version makes it"
            raise NoRecords(f"{error}; {how}") from None

    def save(self, paths: Sequence[Path] | None, stem: Path, known: Known | None = None) -> list[Path]:
        """Draw it from files, as ``make``, and save it as ``stem``.png, .svg and .json."""
        from ..style import save_figure  # matplotlib, which help need not wait for

        with no_garbage_collection(), made_of(paths or [self.file]):
            return save_figure(*self.make(paths, known), stem)


#: Name, module, kinds, file, command and finding of each, in the order of the gallery.
_ROWS: tuple[tuple[str, str, tuple[str, ...], str, str, str], ...] = (
    ("exits", "reports", ("demo",), "cpu/demo-digits.json", "auxhead demo",
     "How many images leave at each exit, and how often they are right."),
    ("calibration", "reports", ("calibrate",), "cpu/calibration-digits.json", "auxhead calibrate DIR",
     "Confidences before and after temperatures, where samples leave, and what the thresholds were chosen from."),
    ("anytime", "anytime", ("curve",), "cpu/anytime-digits.json", "auxhead calibrate DIR --curve",
     "Accuracy against mean work and time, from strict thresholds to loose, beside budgeted batches and cut networks."),
    ("footprint", "footprint", ("footprint",), "h200/footprint.jsonl",
     "auxhead-tune overlap resnet18 --footprints --classes 10 --batch 1 --batch 32",
     "Overlap and trunk stretch against SM occupancy by the heads, and where overlap stops being free."),
    ("latency", "bench", ("bench",), "h200/bench.jsonl", "auxhead-tune bench",
     "Latency against batch size with all baselines, and what heads add to the network without."),
    ("time-to-answer", "bench", ("bench",), "h200/bench.jsonl", "auxhead-tune bench",
     "Time to the answer against the exit where all samples leave, with the network cut off there as the floor."),
    ("zoo", "zoo", ("zoo",), "h200/zoo.jsonl", "auxhead-tune zoo",
     "What make_runner chooses by default against torch.compile, on many networks: where it is faster or slower."),
    ("timeline", "timeline", ("timeline", "overlap"), "h200/overlap.jsonl", "auxhead-tune overlap MODEL",
     "What runs beside what in one replay: trunk and heads over time, and the SMs that the heads' programs are on."),
    ("landscape", "sweep", ("sweep",), "h200/sweep.jsonl.gz", "auxhead-tune sweep resnet18",
     "Time of heads alone over two fields of their launch configuration, with the noise and what was not tried."),
    ("roofline", "roofline", ("heads",), "h200/heads.jsonl", "auxhead-tune heads resnet18",
     "How far heads alone are from the memory's bandwidth, and which wait for latency instead."),
    ("random-heads", "random_heads", ("random-heads",), "h100/random-heads.jsonl.gz", "auxhead-tune heads --random 400",
     "Heads drawn at random against plain PyTorch, and some against torch.compile: where a fused head is slower."),
    ("profile", "profile", ("profile",), "h200/profile.jsonl", "auxhead-tune profile DIR",
     "Launches and CUDA API time of one request, naive early exit before and a runner after."),
    ("pipeline", "pipelines", ("pipeline",), "h200/pipelines.jsonl", "",
     "Images a second over two GPUs against the size of micro-batches, beside one GPU alone."),
    ("doctor", "doctor", ("doctor",), "h200/doctor.jsonl", "auxhead-tune doctor TARGET",
     "The last diagnosis: a timeline of one request, the host and stream by stream, with what was found marked."),
)  # fmt: skip
FIGURES = {row[0]: FigureKind(*row) for row in _ROWS}
