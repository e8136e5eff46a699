"""Tuned launch configurations: JSON tables in kernels/launch/tuned/, one a device, read, checked and looked up."""

import dataclasses
import json
import re
from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from .head_shape import DTYPES, LAYOUTS, REDUCTIONS, HeadShape
from .kernel_hash import is_measured_code, kernel_hash
from .launch_config import FEATURES, LaunchConfig, by_library, next_power_of_2

#: Format of a table; readers refuse others.
SCHEMA = "auxhead tuned 3"
#: Devices that go by another's table where they have no entry, by the names of their files: of its compute capability.
BORROWERS = dict.fromkeys(("nvidia-h100-80gb-hbm3", "nvidia-h100-nvl", "nvidia-h100-pcie"), "NVIDIA H200")
#: Folder of the package's tables, which ``auxhead-tune promote`` writes.
FOLDER = Path(__file__).parent / "tuned"
#: Elements that Triton lets a block have, and so what no size of a configuration exceeds.
MOST_ELEMENTS = 2**20
#: Fields of a table that say what its entries were measured with.
VERSIONS = ("capability", "triton", "torch", "cuda", "cudnn", "driver", "commit")


class BadTable(ValueError):
    """A table cannot be read; the message names file and entry, in one line."""


class Entry(NamedTuple):
    """The winner of one shape, alone."""

    shape: HeadShape
    config: LaunchConfig
    serves: tuple[int, int]
    """First and last batch size at which ``config`` loses at most 1 % to the winner, there and at all measured sizes
    between them."""
    margin: float  # share of the rule's time that it saves, 0.1 for 10 %

    def serves_batch(self, samples: int) -> bool:
        """Return whether the configuration may be taken for a batch of this size."""
        if samples == self.shape.samples:
            return True
        low, high = self.serves
        # a group mostly without samples was not what was measured
        return low <= samples <= high and self.config.block_n <= max(16, next_power_of_2(samples))


@dataclass(frozen=True)
class TunedTable:
    """Contents of one file of kernels/launch/tuned/."""

    device: str  # name from ``torch.cuda.get_device_name``
    sm_count: int
    capability: str | None  # compute capability, "9.0". None if no record says.
    kernel: str  # ``kernel_hash`` of the measured code
    triton: str | None  # this and those below: of the last promotion's records, separated by commas if several
    torch: str | None
    cuda: str | None
    cudnn: str | None
    driver: str | None
    commit: str | None
    entries: tuple[Entry, ...]  # sorted; none of an earlier kernel, whose configurations may have other fields

    def find(self, shape: HeadShape) -> Entry | None:
        """Return the entry for a head: its own, else that of the nearest batch size which serves it, else None."""
        asked = shape.samples
        sizes = {
            one.shape.samples: one for one in self.entries if one.shape[1:] == shape[1:] and one.serves_batch(asked)
        }
        return sizes[min(sizes, key=lambda size: (max(size / asked, asked / size), size))] if sizes else None

    def as_text(self) -> str:
        """Return the file's content, an entry a line."""
        lines = [json.dumps({name: value})[1:-1] for name, value in vars(self).items() if name != "entries"]
        entries = sorted(self.entries, key=lambda entry: (entry.shape[1:], entry.shape.samples))
        rows = [
            json.dumps({**entry._asdict(), "shape": entry.shape._asdict(), "config": dataclasses.asdict(entry.config)})
            for entry in entries
        ]
        listed = "[\n" + ",\n".join(rows) + "\n]" if rows else "[]"
        return "{\n" + ",\n".join([f'"schema": "{SCHEMA}"', *lines, f'"entries": {listed}']) + "\n}\n"


def tables_for(device_name: str) -> tuple[list[TunedTable], list[str]]:
    """Return the tables by which a device launches heads, its own before one that it borrows; and why not by others."""
    tables, unused = [], []
    for owner in (device_name, BORROWERS.get(table_path(device_name).stem)):
        try:
            table = None if owner is None else table_of(owner)
        except BadTable as error:  # a forward goes on without it
            unused.append(str(error))
            continue
        if table is not None and is_measured_code(table.kernel):
            tables.append(table)
        elif table is not None:
            why = f"tuned for another kernel, {table.kernel}; the one here is {kernel_hash()}"
            unused.append(f"{table_path(table.device)}, of {table.device}: {why}: run auxhead-tune everything there")
    return tables, unused


def table_path(device_name: str) -> Path:
    """Return the path of a device's table, whether it exists or not."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"


def tuned_devices() -> list[str]:
    """Return the names of the tables' files, without their endings."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@lru_cache
def table_of(device_name: str) -> TunedTable | None:
    """Read the table of a device, named as by ``torch.cuda.get_device_name`` or "cpu", once; None if it has none.

    Raises:
        BadTable: see ``read_table``; or the table is that of another device.
    """
    path = table_path(device_name)
    if not path.exists():
        return None
    table = read_table(path)
    if table_path(table.device) != path:
        raise BadTable(f"{path}: device: got {table.device!r}, wants the one that the file is named after")
    return table


def read_table(path: Path) -> TunedTable:
    """Read a table.

    Raises:
        BadTable: no such file, another schema, or fields that are missing, unknown or out of range.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadTable(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else error
        raise BadTable(f"{path}: is not JSON ({why})") from None
    schema = values.get("schema") if isinstance(values, dict) else None
    where, entries = str(path), dict[HeadShape, Entry]()
    try:
        _check(schema == SCHEMA, "schema", schema, f"{SCHEMA!r}: delete that of another version, and measure anew")
        names = {field.name for field in dataclasses.fields(TunedTable)}
        _check_names("table", values, names | {"schema"})
        head = {name: values[name] for name in names - {"entries"}}
        for name in ("device", "kernel"):
            _check(isinstance(head[name], str), name, head[name], "text")
        _check_count("sm_count", head["sm_count"])
        for name in VERSIONS:
            _check(isinstance(head[name], str | None), name, head[name], "text or null")
        _check(isinstance(values["entries"], list), "entries", values["entries"], "a list")
        for number, row in enumerate(values["entries"] if is_measured_code(head["kernel"]) else [], start=1):
            where = f"{path}, entry {number}"
            entry = _entry(row)
            _check(entry.shape not in entries, "shape", str(entry.shape), "no second entry for it")
            entries[entry.shape] = entry
    except ValueError as error:
        raise BadTable(f"{where}: {error}") from None
    return TunedTable(**head, entries=tuple(entries.values()))


def _entry(row: Any) -> Entry:
    _check_names("entry", row, set(Entry._fields))
    shape = _shape(row["shape"])
    config = config_from(row["config"], shape)
    serves, margin = row["serves"], row["margin"]
    fits = isinstance(serves, list) and len(serves) == 2 and all(type(size) is int for size in serves)
    fits = fits and 1 <= serves[0] <= shape.samples <= serves[1] < 2**31
    _check(fits, "serves", serves, "[low, high] around samples")
    _check(type(margin) in (int, float) and abs(margin) < 100, "margin", margin, "a number, 0.1 for 10 %")
    return Entry(shape, config, (serves[0], serves[1]), margin)


def _shape(values: Any) -> HeadShape:
    _check_names("shape", values, set(HeadShape._fields))
    for name, allowed in (("layout", LAYOUTS), ("pool", REDUCTIONS), ("dtype", DTYPES)):
        _check(values[name] in allowed, name, values[name], f"one of {', '.join(allowed)}")
    for name in set(HeadShape._fields) - {"layout", "pool", "dtype"}:
        _check_count(name, values[name])
    return HeadShape(**values)


#: What fields of a configuration may be, and that in words; those that are not named are powers of two.
_ALLOWED: dict[str, tuple[Container[Any], str]] = {
    "max_programs": (range(2**31), "a whole number, 0 for no limit"),
    "max_registers": ((0, *range(32, 256)), "0 for no limit, or 32 to 255"),
    "weight_buffers": (range(6), "0 to 5"),
    "last_rows": ((0, 16, 32, 64, 128, 256), "0, or a power of two from 16 to 256"),
    "features": ((*FEATURES, "library"), f"one of {', '.join(FEATURES)}, library"),
    "waits": ((False, True), "true or false"),
}
_POWERS = [2**n for n in range(MOST_ELEMENTS.bit_length())], f"a power of two, at most {MOST_ELEMENTS}"


def config_from(values: Any, shape: HeadShape) -> LaunchConfig:
    """Check and return a configuration for a head; ``ValueError`` says what does not fit."""
    if isinstance(values, dict):  # written before there was a choice
        values = {"features": FEATURES[0], "last_rows": 0, **values}
    _check_names("config", values, {field.name for field in dataclasses.fields(LaunchConfig)})
    for field in dataclasses.fields(LaunchConfig):
        value, (allowed, wanted) = values[field.name], _ALLOWED.get(field.name, _POWERS)
        _check(type(value) is field.type and value in allowed, field.name, value, wanted)
    config = LaunchConfig(**values)
    for name, value in vars(by_library(shape.classes)).items() if config.by_library else ():
        packs = name in ("block_c", "block_p", "block_a", "stages")
        _check(packs or values[name] == value, name, values[name], f"{value} where a library multiplies")
    block_n, block_f, split, reads = config.block_n, config.block_f, not config.tiled, config.reads
    surveys = config.surveys_of(shape.classes)
    pooled, in_a_block = config.block_c * config.block_p, f"at most {MOST_ELEMENTS} elements in a block with it"
    # else Triton 3.6 aborts in LLVM: "Illegal shared layout"
    fewest = 16 // shape.element_size if config.in_place else 1
    view = shape.view
    one_position = config.block_p == view.positions == 1
    for name, fits, wanted in (
        ("num_warps", config.num_warps <= 32, "at most 32"),
        ("block_f", not reads or not split, f"16 or more where features are {config.features}"),
        ("window_parts", shape.pool != "max" or config.window_parts == 1, "1: a maximum is not added up"),
        ("window_parts", not reads or config.window_parts == 1, f"1 where features are {config.features}"),
        ("features", not config.in_place or view.unpooled, "another one: x is pooled"),
        ("weight_buffers", block_n > 1 or config.weight_buffers == 0, "0 where block_n is 1"),
        ("weight_buffers", not reads or config.weight_buffers > 0, f"1 to 5 where features are {config.features}"),
        ("block_n", not split or block_n == 1, "1 where the programs that pool multiply (block_f is 1)"),
        ("block_n", split or reads or block_n == 1 or block_n >= 16, "1, or 16 or more for tensor cores"),
        ("block_n", not reads or block_n >= 8, f"8 or more where features are {config.features}"),
        ("block_f", not config.in_place or block_f == pooled, "block_c times block_p where features are in place"),
        ("block_c", config.block_c >= fewest or not view.turned, f"{fewest} or more of a channels-last map in place"),
        ("block_p", config.block_p >= fewest or one_position, f"{fewest} or more of a map in place"),
        ("block_f", split or block_f >= 16, "1, or 16 or more where other programs multiply than those that pool"),
        ("block_k", split or config.block_k >= 16, "16 or more where other programs multiply: rows are padded"),
        ("waits", split or not config.waits, "false where other programs multiply: they all wait"),
        ("block_p", pooled <= MOST_ELEMENTS, in_a_block),
        ("block_a", pooled * config.block_a <= MOST_ELEMENTS, in_a_block),
        ("block_k", config.block_k * (pooled if split else max(block_f, block_n)) <= MOST_ELEMENTS, in_a_block),
        ("block_k", not surveys or config.block_k * MOST_ELEMENTS >= shape.classes, f"at most {MOST_ELEMENTS} slices"),
        ("block_f", block_n * block_f <= MOST_ELEMENTS, in_a_block),
        ("block_j", config.block_s * config.block_j <= MOST_ELEMENTS, in_a_block),
    ):
        _check(fits, name, values[name], wanted)
    return config


def _check_names(what: str, values: Any, wanted: set[str]) -> None:
    _check(isinstance(values, dict), what, values, "fields and their values")
    for problem, names in (("unknown", set(values) - wanted), ("missing", wanted - set(values))):
        if names:
            listed = f"{', '.join(sorted(names))!r:.60}".strip("'")
            raise ValueError(f"{what}: {problem} {listed}, wants {', '.join(sorted(wanted))}")


def _check_count(name: str, value: Any) -> None:
    _check(type(value) is int and 1 <= value < 2**31, name, value, "a whole number of at least 1, below 2 ** 31")


def _check(fits: bool, name: str, value: Any, wanted: str) -> None:
    if not fits:
        raise ValueError(f"{name}: got {value!r:.80}, wants {wanted}")
