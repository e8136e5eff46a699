"""A client of the soak run: makes runners of one network, asks them in turn, and compares each answer with a table."""

from collections.abc import Callable, Sequence
from random import Random

import numpy
import torch
from auxhead.model import ExitResult, Runner, make_runner
from support.example_models import SmallNet
from support.soak_beside import MAKING, Beside
from support.soak_delays import Delays
from support.soak_table import NOTHING, Table, with_pinned, write_answer

#: Requests between two looks at what the device has found.
THOUSAND = 1000
SIZES = (1, 4, 8)
WAYS = {
    "overlapped": {"exits": "overlapped", "forks": SmallNet.taps[:2]},
    "polled": {"exits": "polled"},
    "compact": {"exits": "polled", "compact": True},
    "gated": {"exits": "gated"},
    "eager": {"exits": "eager"},
}
#: Shares of the requests.
_EAGER, _NEW_RULE, _NEW_STREAM, _BESIDE, _OVERWRITTEN, _KEPT = 0.005, 0.1, 0.2, 0.125, 0.3, 0.02


def every_stop_pays() -> None:
    """Let runners stop and gather at every tap: the networks are too small for it to pay."""
    from auxhead.model.runners import compacting, gated, polled

    polled._LEAST_SEGMENT_US = gated._LEAST_GATED_US = compacting._LEAST_STOP_US = 0.0
    compacting._BUBBLE_US = compacting._MOVE_US = -1e6


class Client:
    """Asks runners of one network, from one thread at a time."""

    def __init__(self, name: str, table: Table, device: torch.device, seed: int, delays: Delays | None = None) -> None:
        """Hold room for the answers of a thousand requests."""
        self.name = name
        self.table = table
        self.requests = 0
        self.replays = 0
        self._inputs = with_pinned(table.inputs) if device.type == "cuda" else table.inputs
        self._device, self._delays = device, delays
        self._numpy, self._random = numpy.random.default_rng(seed), Random(seed)
        self._ids = torch.empty(THOUSAND, table.ids.shape[1], dtype=torch.int64, device=device)
        self._numbers = torch.empty(THOUSAND, table.numbers.shape[1], device=device)
        self._per_sample = table.numbers.shape[1] // (table.ids.shape[1] // 2)  # numbers
        self._rule = -1

    def round(
        self,
        callers: Sequence[torch.cuda.Stream],
        others: Sequence[torch.cuda.Stream],
        requests: int,
        *,
        alone: bool,
        goes_on: Callable[[], bool],
    ) -> list[str]:
        """Make runners, ask them on streams in turn while others' work is on more, and let them go; returns alarms.

        With ``alone`` no other thread is at work. Ends early at the first alarm, or once ``goes_on`` is False.
        """
        alarms: list[str] = []
        with torch.cuda.stream(callers[0]):
            beside = Beside(self._device, [*callers, *others], self._random)
            runners = self._make_runners()
            callers[0].synchronize()
            asked = 0
            while asked < requests and not alarms and goes_on():
                count = min(THOUSAND, requests - asked)
                alarms += self.ask(runners, callers, beside, count, alone=alone)
                asked += count
            for runner in list(runners.values())[::2]:
                runner.close()
            runner = None
            runners.clear()  # the others go without being closed
            beside.check_all()
            if changed := beside.changed():
                alarms.append(f"{self.name}: {changed} elements of others' memory were changed, by the end of a round")
        return alarms

    def _make_runners(self) -> dict[str, Runner]:
        runners = {}
        for name, options in WAYS.items():
            with MAKING:
                example = self.table.inputs[-1]
                runners[name] = make_runner(
                    self.table.network, example, batch_sizes=SIZES, trunk=self.table.trunk, **options
                )
        return runners

    def ask(
        self,
        runners: dict[str, Callable[[torch.Tensor], ExitResult]],
        callers: Sequence[torch.cuda.Stream],
        beside: Beside,
        count: int,
        *,
        alone: bool,
    ) -> list[str]:
        """Make some requests, at most a thousand, of inputs, rules, runners and streams at random; returns alarms.

        The host waits for none of them, and looks at what the device has found at the end.
        """
        self._ids.fill_(NOTHING)
        self._numbers.fill_(NOTHING)
        torch.cuda.current_stream().synchronize()
        delays = self._delays
        ways, each = list(runners), list(runners.values())
        # Eager mode takes no batch that is on the host.
        inputs = [self.table.inputs if way == "eager" else self._inputs for way in ways]
        plan = self._plan(count, len(self._inputs), ways, len(self.table.rules), len(callers))
        kept = []
        with torch.cuda.stream(callers[0]):  # left as it was found
            current = callers[0]
            for slot, (case, which, rule, where, does_more, overwrites, keeps) in enumerate(zip(*plan, strict=True)):
                caller, runner, x = callers[where], each[which], inputs[which][case]
                if caller is not current:
                    torch.cuda.set_stream(caller)
                    current = caller
                if rule != self._rule:
                    self._assign(rule, callers)
                if does_more:
                    beside.step(clears_workspaces=alone)
                if delays is not None:
                    delays.before(caller, runner)
                if overwrites:
                    x = x.clone()
                answer = runner(x)
                self._write(slot, len(x), answer)
                if overwrites:
                    x.fill_(float("nan"))
                if delays is not None:
                    delays.after(caller)
                if keeps:
                    kept.append((slot, answer))
        self.requests += count
        self.replays += sum(ways[which] != "eager" for which in plan[1])
        beside.synchronize()
        alarms = self._differences(plan, ways, "")
        for slot, answer in kept:  # still the same, with all that came after
            self._write(slot, len(answer.label), answer)
        alarms = alarms or self._differences(plan, ways, ", kept by the caller until now")
        if changed := beside.changed():
            alarms.append(
                f"{self.name}: {changed} elements of others' memory were changed, in the thousand requests up to "
                f"{self.requests:,}"
            )
        return alarms

    def _write(self, slot: int, samples: int, answer: ExitResult) -> None:
        write_answer(answer, self._ids[slot, : 2 * samples], self._numbers[slot, : self._per_sample * samples])

    def _plan(self, count: int, inputs: int, ways: list[str], rules: int, callers: int) -> list[list]:
        """Draw, a list each: input, runner, rule, stream, others' work first, input overwritten after, answer kept."""
        draw = self._numpy
        graphs = (1.0 - _EAGER) / (len(ways) - ("eager" in ways))
        shares = [_EAGER if way == "eager" else graphs for way in ways]

        def lasting(values: int, changes: float) -> numpy.ndarray:
            """Values that stay for some requests."""
            drawn = draw.integers(values, size=count)
            begins = numpy.where(draw.random(count) < changes, numpy.arange(count), 0)
            return drawn[numpy.maximum.accumulate(begins)]

        columns = [
            draw.integers(inputs, size=count),
            draw.choice(len(ways), size=count, p=numpy.array(shares) / sum(shares)),
            lasting(rules, _NEW_RULE),
            lasting(callers, _NEW_STREAM),
            *(draw.random(count) < share for share in (_BESIDE, _OVERWRITTEN, _KEPT)),
        ]
        return [column.tolist() for column in columns]

    def _assign(self, rule: int, callers: Sequence[torch.cuda.Stream]) -> None:
        """Give the network other rules, on any of the callers' streams."""
        stream = self._random.choice(callers)
        if self._delays is not None:
            self._delays.after(stream)
        with torch.cuda.stream(stream):
            self.table.network.set_rules(self.table.rules[rule])
        self._rule = rule

    def _differences(self, plan: list[list], ways: list[str], when: str) -> list[str]:
        """Compare on the device, and say of each answer that is wrong who gave it to which request."""
        rows = torch.tensor(
            [case * len(self.table.rules) + rule for case, rule in zip(plan[0], plan[2], strict=True)],
            device=self._device,
        )
        count = len(rows)
        wrong = self.table.differing(rows, self._ids[:count], self._numbers[:count])
        slots = torch.nonzero(wrong)[:, 0].tolist()
        if not slots:
            return []
        alarms = [f"{self.name}: {len(slots)} of {count} answers differ from eager mode's{when}; first of all"]
        for slot in slots[:5]:
            case, way, rule, where = (column[slot] for column in plan[:4])
            row = case * len(self.table.rules) + rule
            alarms.append(
                f"  request {self.requests - count + slot:,} to {ways[way]!r}: batch of {len(self._inputs[case])} "
                f"(input {case}), rules {rule} ({self._words_of(rule)}), stream {where}"
                f"{', input overwritten after the call' if plan[5][slot] else ''}: "
                + self.table.explain(row, self._ids[slot], self._numbers[slot])
            )
        return alarms

    def _words_of(self, rule: int) -> str:
        return "; ".join(f"{tap}: {each.extra_repr()}" for tap, each in self.table.rules[rule].items())
