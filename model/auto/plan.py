"""``Plan``: the runner chosen for one batch size and the times it was chosen by, in words and as JSON.

``PlanFile`` keeps plans, which are used again where the conditions that they were measured under are the same.
"""

import dataclasses
import hashlib
import json
import os
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..answers.exit_rule import ExitRule
from ..basics.bad_input import one_line
from ..basics.files import led_to, read_json, write_json
from ..basics.machine import driver_version, package_version, processor_name
from ..network.early_exit_network import EarlyExitNetwork
from ..runners.table import RUNNERS
from ..trunk.trunk import check_kind
from .candidates import Candidate
from .compiled_backbone import COMPILED
from .pass_times import BUDGETS, PassTimes, shares_of

#: No request takes less or more microseconds: a nanosecond, a day.
_US = (1e-3, 86_400e6)
#: Nor more joules: a day of ten kilowatts.
_JOULES = (0.0, 1e9)


@dataclass(frozen=True)
class Plan:
    """The way to run a network for one batch size, and why."""

    chosen: Candidate
    plain: str
    """Name of the plain graph, which ``exits="overlapped"`` captures: nothing slower is chosen."""
    times: Mapping[str, PassTimes]
    """Times of each candidate by its name, simplest first."""
    trunk_times: Mapping[str, PassTimes]
    """Times of the plain graph by the kind of its trunk, if there was a choice of them; measured before ``times``."""
    left_out: Mapping[str, str]
    """Reason why a candidate or a trunk was not measured, by its name."""
    shares: tuple[float, ...]
    """Shares, 0 to 1, of the samples measured with that left at each tap and, last, at the classifier."""
    utc: str
    """Time of the measurement, ISO 8601."""
    joules: Mapping[str, float] = field(default_factory=dict)
    """Energy of a request to the chosen runner and to the plain graph, by name, among requests back to back, all of the
    device's power included; none where the driver counts none."""
    compiled: Mapping[str, PassTimes] = field(default_factory=dict)
    """Times of the chosen runner and, beside it, of the backbone alone through torch.compile; none if that was not
    there in time."""
    hurried: bool = False
    """True if there was no time for a trunk, which the next process looks at once more, with caches of what this one
    has compiled; what it finds stays."""
    sooner: Mapping[str, bool] = field(default_factory=dict)
    """Whether layers took no longer as one launch of ours, by digests of :func:`asked_once`: trunks of the next process
    are those that were measured, and what was compiled for them is found."""
    from_file: bool = False
    """True if it was read from a file, False if it was measured for this runner."""

    def describe(self) -> str:
        """Say what was chosen, by which measurement, and why others were not measured."""
        when = f"measured on {self.utc[:10]}" if self.from_file else "measured"
        sentences = [f"{self.chosen.name}, {when} {self.reason()}."]
        others = [
            f"{name} {self._us(name)}"
            for name in self.times
            if name not in (self.chosen.name, self._fastest, self.plain)
        ]
        if others:
            sentences.append(f"The others: {', '.join(others)} us.")
        if self.trunk_times:
            trunks = [f"{kind} {statistics.median(times.host):,.1f}" for kind, times in self.trunk_times.items()]
            sentences.append(f"The plain graph by trunk: {', '.join(trunks)} us.")
        sentences += [f"{name} left out: {why.rstrip('.')}." for name, why in self.left_out.items()]
        return " ".join(sentences)

    def others(self) -> list[str]:
        """Name in a sentence each what else was measured, and what was not."""
        measured = [name for name in self.times if name not in (self.chosen.name, self.plain)]
        measured += [f"trunk {kind}" for kind in self.trunk_times if kind not in ("as_is", self.chosen.trunk)]
        parts = {"Also measured": measured, "Left out": self.left_out}
        return [f"{what}: {', '.join(names)}." for what, names in parts.items() if names]

    def reason(self) -> str:
        """Say why it was chosen, beginning with the time of a request, and its energy where that was counted."""
        chosen, plain, fastest = self.chosen.name, self.plain, self._fastest
        reason = f"{self._cost(chosen)} to the answer: "
        if chosen == plain:
            reason += "nothing is faster than this plain graph" if fastest == plain else "this is the plain graph"
        else:
            less = 1 - self._host_us(chosen) / self._host_us(plain)
            reason += f"{less:.1%} less time than the plain graph, {plain}, {self._cost(plain)}"
        if self.compiled:
            mine, its = (statistics.median(self.compiled[name].host) for name in (chosen, COMPILED))
            by = f"{1 - mine / its:.1%} less" if mine <= its else f"{mine / its - 1:.1%} more"
            compared = f"{mine:,.1f} us for {its:,.1f}, measured beside each other"
            reason += f"; {by} than torch.compile of the backbone alone, in a graph ({compared})"
        if fastest == chosen:
            return reason
        simpler = "" if chosen == plain else ", and less simple"
        return f"{reason}; {fastest}, {self._us(fastest)}, is no faster beyond the noise{simpler}"

    @property
    def _fastest(self) -> str:
        return min(self.times, key=lambda name: (self._host_us(name), name != self.plain))

    def _host_us(self, name: str) -> float:
        return statistics.median(self.times[name].host)

    def _us(self, name: str) -> str:
        return f"{self._host_us(name):,.1f}"

    def _cost(self, name: str) -> str:
        if name not in self.joules:
            return f"{self._us(name)} us"
        mj = 1000.0 * self.joules[name]
        return f"{self._us(name)} us and {mj:,.{0 if mj >= 10 else 1}f} mJ"

    def as_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` takes."""
        return {
            "chosen": self.chosen._asdict(),
            "plain": self.plain,
            "times": _times_as_json(self.times),
            "trunk_times": _times_as_json(self.trunk_times),
            "left_out": dict(self.left_out),
            "shares": list(self.shares),
            "utc": self.utc,
            "joules": dict(self.joules),
            "compiled": _times_as_json(self.compiled),
            "hurried": self.hurried,
            "sooner": dict(self.sooner),
        }

    @classmethod
    def from_json(cls, content: Any) -> "Plan":
        """Read what :meth:`as_json` returned.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: content of any other form.
        """
        chosen = Candidate(**{**content["chosen"], "forks": tuple(content["chosen"]["forks"])})
        gathers = type(chosen.compact) is bool and (chosen.exits == "polled" or not chosen.compact)
        if not gathers or not all(isinstance(fork, str) for fork in chosen.forks):
            raise ValueError(f"chosen: got {chosen!r:.100}")
        plan = cls(
            chosen,
            content["plain"],
            _times_from_json(content["times"]),
            _times_from_json(content["trunk_times"]),
            {str(name): str(why) for name, why in content["left_out"].items()},
            tuple(_number("shares", share, 0.0, 1.0) for share in content["shares"]),
            str(content["utc"]),
            {str(name): _number("joules", joules, *_JOULES) for name, joules in content["joules"].items()},
            _times_from_json(content["compiled"]),
            content["hurried"],
            {str(key): answer for key, answer in content["sooner"].items()},
        )
        for name, values in {"hurried": [plan.hurried], "sooner": [*plan.sooner.values()]}.items():
            if not all(type(value) is bool for value in values):
                raise ValueError(f"{name}: got {values!r:.60}")
        check_kind("trunk", chosen.trunk)
        if chosen.exits not in RUNNERS:
            raise ValueError(f"chosen: got {chosen!r:.100}")
        if chosen.name not in plan.times or plan.plain not in plan.times:
            raise ValueError(f"times: {chosen.name:.60} or {plan.plain!s:.60} is not among them")
        if plan.compiled and plan.compiled.keys() != {chosen.name, COMPILED}:
            raise ValueError(f"compiled: got {[*plan.compiled]!r:.100}, wants {chosen.name:.60} and {COMPILED}")
        return plan


def _times_as_json(times: Mapping[str, PassTimes]) -> dict[str, Any]:
    return {name: {"host_us": us.host, "device_us": us.device} for name, us in times.items()}


def _times_from_json(content: Any) -> dict[str, PassTimes]:
    return {
        str(name): PassTimes(_microseconds(us["host_us"]), _microseconds(us["device_us"]))
        for name, us in content.items()
    }


def _microseconds(values: Any) -> list[float]:
    if not values:
        raise ValueError("times: got none of a runner")
    return [_number("times", value, *_US) for value in values]


def _number(name: str, value: Any, least: float, most: float) -> float:
    if type(value) not in (int, float) or not least <= value <= most:
        raise ValueError(f"{name}: got {value!r:.60}, wants {least:g} to {most:g}")
    return float(value)


FORMAT = 6
#: Shares are told apart in steps of 5 %: a few samples more or less at an exit change no choice.
_STEPS = 20


class PlanFile:
    """The plans of one runner, for all its batch sizes, in a file with the conditions that they were measured under."""

    def __init__(self, path: str | os.PathLike[str], conditions: Mapping[str, Any]) -> None:
        """Name a file, which need not exist, in a folder that does; for conditions see :func:`conditions_of`.

        Raises:
            TypeError, ValueError: the path is none, is a folder, or lies in a folder that does not exist.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"plan: got {type(path).__name__}, wants the path of a JSON file")
        if "\0" in os.fsdecode(path):
            raise ValueError(f"plan: got {os.fsdecode(path)!r}, with a null character, wants the path of a JSON file")
        self.path = Path(path)
        if self.path.is_dir() or not self.path.parent.is_dir():
            why = "a folder" if self.path.is_dir() else "in a folder that does not exist"
            raise ValueError(f"plan: got {str(path)!r}, {why}, wants the path of a JSON file")
        self._conditions = json.loads(json.dumps(conditions))  # as they come back from a file: tuples are lists there
        self.differing: list[str] = []
        """Names of the conditions that were others when the file was written."""

    def read(self) -> dict[int, Plan]:
        """Return the plans by batch size, or none where there is no file or its conditions differ.

        A damaged file is named in a warning, and none of its plans is used.
        """
        try:
            content = read_json(self.path)
            if type(content["format"]) is int and 0 < content["format"] < FORMAT:
                self.differing = ["format"]
                return {}
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r:.60}, wants {FORMAT}")
            measured = content["conditions"]
            names = dict.fromkeys((*self._conditions, *measured))
            self.differing = [name for name in names if not _fits(name, measured.get(name), self._conditions.get(name))]
            plans = {
                int(size): dataclasses.replace(Plan.from_json(plan), from_file=True)
                for size, plan in content["plans"].items()
            }
            if measured.get("budget") != self._conditions.get("budget"):  # within less time nobody would find more
                plans = {size: dataclasses.replace(plan, hurried=False) for size, plan in plans.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"{type(error).__name__}: {one_line(error)}"
            warnings.warn(f"{self.path} holds no plan ({why}); measuring anew", stacklevel=2)
            return {}
        return {} if self.differing else plans

    def write(self, plans: Mapping[int, Plan]) -> None:
        """Replace the file, if there is one; where nothing can be written, say so in a warning: the runner is made."""
        by_size = {str(size): plan.as_json() for size, plan in plans.items()}
        content = {"format": FORMAT, "conditions": self._conditions, "plans": by_size}
        try:
            write_json(led_to(self.path), content)  # a link stays one
        except OSError as error:
            warnings.warn(f"{self.path}: the plan is not kept ({error.strerror or error})", stacklevel=2)


def _fits(name: str, measured: Any, asked: Any) -> bool:
    """Return whether a condition is that of a file, or a smaller budget: a plan made within more is as good."""
    if name == "budget" and measured in BUDGETS:
        return BUDGETS[measured] >= BUDGETS[asked]
    return bool(measured == asked)


#: In place of a path: plans are kept in the user's cache folder.
REMEMBERED = "auto"
#: Conditions by which such a file is named; the others are in it.
_NAMES = ("GPU", "taps", "layers", "parameters", "trunk", "batch sizes", "samples")


def remembered(conditions: Mapping[str, Any]) -> PlanFile | None:
    """Return the file in the user's cache folder, one for a network and its batches; None if there can be no folder."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "")  # which its specification wants absolute
    if not caches.is_absolute():
        caches = Path(os.path.expanduser("~")) / ".cache"
    if not caches.is_absolute():  # nobody knows the user's home
        return None
    sizes = list(conditions["exit shares"])
    name = hashlib.sha256(json.dumps([*(conditions[name] for name in _NAMES), sizes]).encode()).hexdigest()[:32]
    folder = caches / "auxhead" / "plans"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return PlanFile(folder / f"{name}.json", conditions)
    except (OSError, ValueError):  # it is somebody else's, or no folder
        return None


def conditions_of(
    network: EarlyExitNetwork, example_input: Tensor, asked: Mapping[str, Any], exits: Mapping[int, Tensor]
) -> dict[str, Any]:
    """Return by name all that a choice among runners depends on, as JSON can hold it.

    Of that ``asked`` is what the caller chose; ``exits`` holds by batch size what :func:`exits_of` returned.
    """
    taps = len(network.taps)
    return {
        **_device_conditions(example_input.device),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "auxhead": package_version("auxhead"),
        "taps": list(network.taps),
        "layers": [_in_words(layer) for layer in network.modules() if not isinstance(layer, ExitRule)],
        "code": _code_of(network),
        "parameters": [
            f"{name} {list(parameter.shape)} {parameter.dtype}" for name, parameter in network.named_parameters()
        ],
        "rules": [
            [head.rule.criterion, head.rule.threshold, head.rule.temperature, head.rule.enabled]
            for head in network.exit_heads
        ],
        **asked,
        "samples": [list(example_input.shape[1:]), str(example_input.dtype), list(example_input.stride()[1:])],
        "exit shares": {
            str(size): {
                "of samples": _rounded(shares_of(of_samples, taps)),
                "of batches": _rounded(shares_of(of_samples.amax(dim=1), taps)),
            }
            for size, of_samples in exits.items()
        },
    }


def _in_words(layer: nn.Module) -> str:
    """Return a layer's class and options: strides and sizes of pools, say, which no parameter shows."""
    try:
        options = layer.extra_repr()
    except Exception:  # of the user's
        options = ""
    return f"{type(layer).__module__}.{type(layer).__qualname__}({options})"


def _code_of(network: nn.Module) -> str:
    """Return a hash of what the forwards of all layers do: of another one, another runner may be the best."""
    code = hashlib.sha256()
    forwards = [getattr(layer.forward, "__func__", layer.forward) for layer in network.modules()]
    for forward in {id(forward): forward for forward in forwards}.values():
        compiled = getattr(forward, "__code__", None)
        if compiled is not None:
            numbers = [one for one in compiled.co_consts if isinstance(one, (int, float))]
            code.update(repr((compiled.co_code, compiled.co_names, compiled.co_varnames, numbers)).encode())
    return code.hexdigest()


def _device_conditions(device: torch.device) -> dict[str, Any]:
    """Describe the GPU, and the processor that launches its graphs."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "GPU": gpu and f"{gpu.name}, {gpu.multi_processor_count} SMs",
        "driver": driver_version(),
        "processor": processor_name(),
    }


def _rounded(shares: tuple[float, ...]) -> list[float]:
    return [round(share * _STEPS) / _STEPS for share in shares]
