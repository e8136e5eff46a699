"""The record of one measurement, and the JSON lines it is kept in: append-only, a line is complete or absent.

Nothing here imports torch, so that figures and tables are made from records anywhere.
"""

import dataclasses
import datetime
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ...model.basics.files import parse_json
from ...model.basics.garbage import no_garbage_collection
from .forms import check_record

#: Format of every line; readers refuse others.
SCHEMA = "auxhead record 1"

#: Fields of an environment that make numbers comparable: a run skips what is already measured under equal ones.
ENVIRONMENT_KEY = ("gpu", "driver", "torch", "triton", "cudnn", "cuda")

#: First bytes of compressed files.
_GZIP = b"\x1f\x8b"
#: What a compressed file may hold: a small one may unpack to more than there is memory. All sweeps of an H200 have
#: 0.14 GB.
MOST_BYTES = 2 * 2**30


class BadRecord(ValueError):
    """A file of records that cannot be read or written: names file and line, in one line."""


def utc_now() -> str:
    """Return the time, as records have it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Record:
    """One variant measured, or failed, in one cell."""

    kind: str
    """The command that measured it; zoo, in the form of bench; of overlap also "timeline", one replay; of heads also
    "random-heads"; of the pipelines' study "pipeline"."""
    cell: dict[str, Any]
    """The network: model, dtype, batch, classes, placement (of the heads), taps (their names), input (the shape of one
    sample), and heads (their kind) unless each is one linear layer. Of a sweep: the fields of a HeadShape. Of heads:
    all of these, and tap (all that have a head of that shape, separated by commas). Of random-heads: the fields of a
    RandomHead."""
    exits: str = field(default="never", kw_only=True)
    """Exits at which samples leave: "never", the name of a tap, the percent that leave at each tap and at the
    classifier ("40/30/20/10"), "own" for the thresholds that a model came with, or of pareto "calibrated 0.5 %", by
    thresholds chosen for at most so many points of accuracy on a validation split."""
    variant: str
    run: str
    """Equal for records that were measured interleaved, whose ratios are meaningful."""
    utc: str = field(default_factory=utc_now, kw_only=True)
    """Time at which it was appended, ISO 8601."""
    environment: dict[str, Any]
    """gpu, sm_count, capability, driver, torch, triton, cudnn, cuda, python, auxhead, commit (its end "-dirty" says
    that files differed; None outside a checkout) and clocks: the GPU's, as found right after the measurement."""
    protocol: dict[str, Any]
    """rounds, warm_up, repeat, captures, order, l2, samples_by_exit (how many of all inputs leave where, by the eager
    network on the same trunk) and whatever else says how the numbers came about.

    - sweep: place "alone", config (the fields of the LaunchConfig that ``variant`` names), rule (the variant of the
      baseline) and kernel (its hash)
    - heads: place "alone", config and kernel, those of "fused", and for "bytes" the bytes that a head has to move and
      bytes_per_second, what a copy read and wrote
    - random-heads: the same, and chain, the launches of one graph
    - profile: requests, for rounds and captures
    - pareto: thresholds (by tap) and data (whose test split it is)
    - overlap and timeline: trunk_kind, forks, and replays: how many were profiled
    - pipeline: devices, cut (the tap where the network is split), and processes
    - footprint: these; ``variant`` says what of the heads' launches is not by rule
    """
    host_us: dict[str, Any] | None = None
    """Microseconds from the call, on an idle device, until the caller's stream has the answer: median, p20, p80 over
    the rounds, and captures: the median of each fresh capture."""
    device_us: dict[str, Any] | None = None
    """The same of the time one call takes on the device when calls follow back to back. Of a sweep and of heads the
    only time, of one head alone, with samples: all rounds of each capture."""
    paired: list[dict[str, Any]] = field(default_factory=list)
    """Baselines of the same run: role ("bare", "truncated", "segments", or for auto "plain"), variant, host_us and
    device_us (medians), host_ratio and device_ratio (this variant's over the baseline's).

    - sweep: role "rule", the rule's configuration; no times of the host; samples: its rounds, the same ones
    - heads, random-heads: role "fused"; no times of the host; low and high, the ends of the 99 % interval of
      device_ratio
    - profile: role "before"; no times of the device
    - pareto: role "bare"; beside, mean_host_us and mean_host_ratio
    - overlap: parts of the network, roles "trunk", alone in one graph, with the interval of device_ratio, and "heads",
      all of them alone, one launch after another; no times of the host, device_us as that of the record itself
    - footprint: the same
    """
    measured: dict[str, Any] | None = None
    """Further measurements.

    - bench and zoo: joules of a call among calls back to back, where the driver counts them; and first_answer_s,
      seconds from the call that makes a variant until its first answer, of each capture that is made by one call
    - profile, a request each: call_us (until the call returned) and, under the profiler, launches, graph_launches,
      kernels, copies, memsets, kernel_us (summed), busy_us (their union), api (each CUDA function), and allocations and
      waits of all requests together
    - pareto: samples (of the test split), accuracy (0 to 1) and mean_host_us, a mean over its batches
    - overlap, median, p20 and p80 over replays: the fields of :class:`Overlap` and bare_span_us, that of the trunk
      alone; hiding_efficiency, over combinations of captures; inflation, times under the profiler over those without;
      and kernels of the trunk in order, without heads and with them
    - footprint: hiding_efficiency as of overlap; programs, of all launches beside the trunk; and their occupancy:
      residency, measured in the kernel
    - timeline: replay, its number; the fields of :class:`Overlap`; kernels in order; and programs of the heads: launch,
      SM, start and end, microseconds since the replay began
    - pipeline: images_s (images a second of single requests), batch and split_size (samples of a micro-batch; None: not
      split)
    - doctor: the verdict; spread, within which values its times lie; findings, and streams with their work

    Older files hold further kinds ("network", "retune"), sweeps of heads in a captured network (place "network"), and
    fields and tiers of occupancy, which nothing reads any more.
    """
    correctness: dict[str, Any] | None = None
    """samples compared with the eager truth; differing: those with another label or exit; differing_near: how many of
    those rounding explains; near: how many samples lie that close to a threshold or another class at all;
    confidence_off: those that are too sure or not enough."""
    notes: list[str] = field(default_factory=list)
    """In sentences; of a profile what keeps the runner from a steady state."""
    error: str | None = None
    """Reason for the absence of numbers; None where there are any."""
    schema: str = SCHEMA
    place: str = field(default="", compare=False, repr=False)
    """File and line that it was read from, for messages; not written."""

    @property
    def key(self) -> tuple[str, str, str]:
        """The thing measured: equal for two measurements of it."""
        return (json.dumps(self.cell, sort_keys=True), self.exits, self.variant)

    @property
    def environment_key(self) -> tuple[Any, ...]:
        """Values of ``ENVIRONMENT_KEY``, on which the numbers depend besides the code."""
        return tuple(self.environment.get(name) for name in ENVIRONMENT_KEY)


def bad_record(record: Record, why: object) -> BadRecord:
    """Return the error that a record is no good, which names file and line."""
    return BadRecord(f"{record.place or record.variant}: {why}")


@contextmanager
def made_of(paths: Iterable[Path | str]) -> Iterator[None]:
    """Raise ``BadRecord``, which names the files, if nothing can be made of records whose fields alone were checked.

    Their lists may differ in length, for one, or their numbers be larger than arithmetic and figures allow.
    """
    try:
        yield
    except (BadRecord, OSError):
        raise
    except Exception as error:
        names = ", ".join(map(str, paths))
        raise BadRecord(f"{names}: nothing can be made of what it holds ({error!r:.200})") from error


#: Fields of a line of JSON.
_FIELDS = frozenset(Record.__dataclass_fields__) - {"place"}


def records_path(out: Path | None, kind: str, gpu: str) -> Path:
    """Return the file for records of a kind measured on a GPU, unless ``out`` names it."""
    return out or Path("autotune-records") / f"{kind}-{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.jsonl"


def check_out(out: Path | None) -> None:
    """Check, before anything is measured, that records can be added to a file if one is named, and read again.

    Raises:
        BadRecord: a compressed file, a folder, or no file at all.
    """
    if out is not None and out.suffix == ".gz":
        raise BadRecord(f"{out}: compressed records are only read, wants a file that lines are added to: {out.stem}")
    if out is not None and out.exists() and not out.is_file():
        raise BadRecord(f"{out}: is {'a folder' if out.is_dir() else 'no file'}, wants a file that lines are added to")


def as_line(record: Record) -> str:
    """Return a record as a line of a file; ``TypeError`` or ``ValueError`` if it does not fit into JSON."""
    values = dataclasses.asdict(record)
    del values["place"]
    return json.dumps(values, allow_nan=False) + "\n"


def append_record(path: Path, record: Record) -> None:
    """Append one line, whole and on disk when this returns; several processes may append to one file.

    A line that a killed process left incomplete is removed first.

    Raises:
        BadRecord: the record does not fit into JSON (NaN, say); nothing is written.
        OSError: no space or no permission; what was written of the line is taken back.
    """
    import fcntl  # readers do without it, on any platform

    try:
        line = as_line(record).encode()
    except (TypeError, ValueError) as error:
        raise BadRecord(f"{path}: {record.variant}: not a record ({error})") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # nobody is in the middle of a line: an incomplete one is a dead process's
        end = _end_of_last_line(file)
        if end != os.fstat(file).st_size:
            os.ftruncate(file, end)
        if os.write(file, line) != len(line):
            os.ftruncate(file, end)
            raise OSError(None, "no space for a whole line", str(path))
        os.fsync(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(file)


def _end_of_last_line(file: int) -> int:
    """Return the offset behind the last newline."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_records(path: Path) -> list[Record]:
    """Read all complete lines, compressed by gzip or not; an incomplete last one, of a killed process, is ignored.

    Raises:
        BadRecord: no such file, one that unpacks to more than ``MOST_BYTES``, or a complete line that is not a record
            of this schema.
    """
    lines = _content(path).split("\n")[:-1]
    records = []
    with no_garbage_collection():
        for number, line in enumerate(lines, start=1):
            place = f"{path}, line {number}"
            try:
                records.append(_record_of(line, place))
            except ValueError as error:
                raise BadRecord(f"{place}: {error}") from None
    return records


def _content(path: Path) -> str:
    """Return the complete lines of a file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise BadRecord(f"{path}: no such file, wants records, a JSON object a line") from None
    except OSError as error:
        raise BadRecord(f"{path}: cannot be read ({error.strerror})") from None
    if content.startswith(_GZIP):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = file.read(MOST_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise BadRecord(f"{path}: is compressed and cannot be read ({error})") from None
        if len(content) > MOST_BYTES:
            raise BadRecord(f"{path}: holds more than {MOST_BYTES:,} bytes when it is no longer compressed")
    content = content[: content.rfind(b"\n") + 1]
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadRecord(f"{path}, line {line}: is not JSON ({error})") from None


def _record_of(line: str, place: str) -> Record:
    try:
        values = parse_json(line)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from None
    schema = values.get("schema") if isinstance(values, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"got schema {schema!r}, wants {SCHEMA!r}")
    check_record(values)
    return Record(**{name: values[name] for name in values.keys() & _FIELDS}, place=place)


Thing = TypeVar("Thing")
Key = TypeVar("Key", bound=Hashable)


def grouped(things: Iterable[Thing], key: Callable[[Thing], Key]) -> dict[Key, list[Thing]]:
    """Return things by their keys, in order of each one's first."""
    found: dict[Key, list[Thing]] = {}
    for one in things:
        found.setdefault(key(one), []).append(one)
    return found


def latest(records: Iterable[Record]) -> list[Record]:
    """Return the last record of each thing measured in each environment, in order of first appearance.

    A failure does not take the place of an earlier measurement.
    """
    chosen: dict[tuple[Any, ...], Record] = {}
    for record in records:
        key = (record.key, record.environment_key)
        if record.error is None or key not in chosen or chosen[key].error is not None:
            chosen[key] = record
    return list(chosen.values())


def is_settled(record: Record, environment: Mapping[str, Any], rounds: int) -> bool:
    """Return True if a run in ``environment`` need not measure again what ``record`` holds.

    As many rounds or more suffice, whatever the commit; a failure stands while the commit is the same and nothing was
    changed by hand, since it would fail again.
    """
    if record.environment_key != tuple(environment.get(name) for name in ENVIRONMENT_KEY):
        return False
    if record.error is None:
        return int(record.protocol.get("rounds", 0)) >= rounds
    commit = environment.get("commit")
    return commit is not None and not commit.endswith("-dirty") and record.environment.get("commit") == commit
