"""``TrainingLoop``: one training, epoch by epoch, and what is said of its steps and epochs."""

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..basics.arguments import kind_of
from ..basics.bad_input import BadInput
from ..basics.tables import text_table
from ..listening.batches import tensors_by_name
from ..network.early_exit_network import EarlyExitNetwork
from ..network.learned_from import fingerprint, learned_by
from ..processes.process_group import own_rank, ranks
from .batches import PixelBatches, SampleLog, all_finite, all_on_device, count_batches
from .learners import AllExits, HeadsOnFeatures, accuracies, cache_features, new_classifier
from .plan import TrainingPlan, distillation_loss, joint_loss, one_cycle
from .training_state import (
    Average,
    TrainingState,
    averaged,
    from_rank_0,
    generators_of,
    seed_all,
    seed_of,
    set_epoch,
    shared,
)

_T = TypeVar("_T")
#: Of more epochs than this the last ones are shown.
_MOST_EPOCHS = 20


class Step(NamedTuple):
    """One batch of training."""

    epoch: int
    """From 0."""
    images: int
    """Images in the batch, of all processes."""
    loss: Tensor
    """The loss in nats, a scalar on the device: reading it waits for the device."""


class Epoch(NamedTuple):
    """One epoch of training."""

    epoch: int
    """From 0."""
    loss: float
    """Mean over the batches, in nats."""
    learning_rate: float
    """Of the last step."""
    accuracy: tuple[float, ...] | None
    """Of every exit on the validation images, the classifier's last, from 0 to 1; None without them."""


@dataclass(frozen=True)
class Training:
    """What was trained: its epochs, and which of them the network was left in."""

    epochs: tuple[Epoch, ...]
    """In their order; those before a resumed one among them."""
    best: int
    """Index of the epoch whose parameters the network has: the best on the validation images, else the last."""

    def __repr__(self) -> str:
        """Show the epochs as a table: of many the best and the last."""
        shown = [one for one in self.epochs if one.epoch == self.best or len(self.epochs) - one.epoch <= _MOST_EPOCHS]
        left = f"Trained for {len(self.epochs)} epochs, counted from 0; left as after epoch {self.best}."
        rows = [["epoch", "loss", "learning\nrate", "right at each exit,\nvalidation, %"]]
        for one in shown:
            right = "-" if one.accuracy is None else " ".join(f"{100 * share:5.1f}" for share in one.accuracy)
            rows.append([f"{one.epoch}", f"{one.loss:.4f}", f"{one.learning_rate:.2g}", right])
        return f"{left}\n{text_table(rows)}" if self.epochs else left


class LossNotFinite(BadInput):
    """A loss that is no finite number, and its cause; the network is as after its best epoch before that."""

    def __init__(self, message: str, done: Training) -> None:
        resumed = f"as after epoch {done.best + 1}, from which a resumed training goes on with another rate"
        super().__init__(f"{message}; the network is {resumed if done.epochs else 'as before: no epoch was done'}")
        self.done = done
        """The epochs before, if there are any."""


class TrainingLoop:
    """One training from its first epoch, or a later one, to its last."""

    def __init__(
        self,
        network: EarlyExitNetwork,
        batches: Any,
        validation: Any,
        plan: TrainingPlan,
        seed: int,
        device: torch.device,
    ) -> None:
        dtype = torch.float32 if plan.precision == "float32" else getattr(torch, plan.precision)
        self._network, self._plan, self._seed, self._device = network, plan, seed, device
        self._trains_classifier = trains_classifier(network, plan)
        self._frozen: tuple[str, ...] = ()  # hashes of what features are computed with
        self._autocast = torch.autocast(device.type, dtype, enabled=plan.precision != "float32")
        self._learner: nn.Module = AllExits(network)
        given = {"batches": batches} if validation is None else {"batches": batches, "validation": validation}
        counts = {name: count_batches(name, each) for name, each in given.items()}
        self._learned_before = learned_by(network)
        self._logs = logs = {name: SampleLog(given[name], network) for name in counts}
        if plan.method == "heads":
            classifier = new_classifier(network)
            learned = {*([] if classifier is None else classifier.parameters())}
            names = {name for name, each in network.backbone.named_parameters() if each in learned}
            self._frozen = fingerprint(network.backbone, names)
            self._learner = HeadsOnFeatures(network.exit_heads, classifier)
            for name, count in counts.items():
                order, watched = seed if name == "batches" else None, logs[name].watched(given[name])
                given[name] = cache_features(
                    network, watched, self._autocast, classifier=classifier, seed=order, name=name, count=count
                )
                counts[name] = len(given[name])
        self._given, self._counts = given, counts
        self._count = counts["batches"]
        self._steps = math.ceil(self._count / plan.accumulate) * plan.epochs
        self._parameters = [parameter for parameter in self._learner.parameters() if parameter.requires_grad]
        if not self._parameters:
            raise ValueError("network: has no parameter that requires a gradient, wants one to train")
        self._model = shared(self._learner, device)
        optimizer = self._made("optimizer", torch.optim.Optimizer, self._parameters)
        if optimizer is None:
            optimizer = torch.optim.AdamW(self._parameters, lr=plan.learning_rate, weight_decay=plan.weight_decay)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        scheduler = self._made("scheduler", torch.optim.lr_scheduler.LRScheduler, optimizer, self._steps)
        scaler = torch.amp.GradScaler(device.type, enabled=plan.precision == "float16")
        average = None if plan.ema is None else Average(self._learner, plan.ema)
        self.state = TrainingState(
            self._learner, optimizer, scaler, generators_of(given["batches"]), scheduler, average
        )

    def _made(self, name: str, kind: type[_T], *arguments: Any) -> _T | None:
        """Return what the plan's function of that name makes; None where there is none."""
        make = getattr(self._plan, name)
        made = None if make is None else make(*arguments)
        if make is not None and not isinstance(made, kind):
            raise TypeError(f"{name}: made {kind_of(made)}, wants a {kind.__module__}.{kind.__name__}")
        return made

    def settings(self) -> dict[str, Any]:
        """Return what a training that goes on must have in common, as JSON has it."""
        plan = asdict(self._plan)
        weights = None if self._plan.weights is None else list(self._plan.weights)
        plan["images"] = [log.digest() for log in self._logs.values()]
        batches = self._given["batches"]
        plan["augment"] = batches.augment if isinstance(batches, PixelBatches) else None
        plan["frozen"] = list(self._frozen)
        for name in ("optimizer", "scheduler"):
            plan[name] = None if plan[name] is None else getattr(plan[name], "__qualname__", type(plan[name]).__name__)
        return {**plan, "weights": weights, "seed": self._seed, "batches": self._count, "processes": ranks()}

    def resume(self, file: Path) -> None:
        """Go on where a state ends; of batches that are no known images nobody has noted what came before."""
        self.state.restore(file, self.settings())
        if self._plan.method != "heads" and not all(log.digest() for log in self._logs.values()):
            self._learned_before = self._learned_before.but("training was resumed, and its samples of before not noted")

    def is_done(self) -> bool:
        """Return whether all epochs are done, or as many as patience has were no better than the best."""
        done, best = len(self.state.epochs), self.state.best
        patience = math.inf if self._plan.patience is None or best is None else self._plan.patience
        return done >= self._plan.epochs or (best is not None and done - 1 - best >= patience)

    def train_epoch(self, on_step: Callable[[Step], object]) -> None:
        """Go through all batches once, and see how the exits do."""
        epoch = len(self.state.epochs)
        set_epoch(self._given["batches"], epoch)
        seed_all(seed_of(self._seed, own_rank(), 1 + epoch))
        self._model.train()
        losses, finite, first_step = [], [], self.state.step
        for index, (x, wanted) in enumerate(self._on_device("batches")):
            finite.append(all_finite(x if isinstance(x, list) else tensors_by_name(x).values()))
            losses.append(self._learn(index, x, wanted))
            on_step(Step(epoch, len(wanted) * ranks(), losses[-1]))
        of_batches = averaged(torch.stack([torch.stack(losses), torch.stack(finite).to(losses[0].dtype)]))
        mean = of_batches[0].mean().item()
        if not math.isfinite(mean) or not all_finite(self._parameters):
            each_loss, each_finite = of_batches.tolist()
            raise LossNotFinite(self._cause(each_loss, each_finite, first_step), self._done())
        with self.state.averaged():
            self._end_epoch(epoch, mean)

    def _end_epoch(self, epoch: int, mean: float) -> None:
        """Note an epoch of that mean loss, and keep the learner as it is now, if it is the best so far."""
        accuracy = self._validate() if "validation" in self._counts else None
        rate = self.state.optimizer.param_groups[0]["lr"]
        self.state.epochs.append({"epoch": epoch, "loss": mean, "learning_rate": rate, "accuracy": accuracy})
        if accuracy is not None:
            best = self.state.best
            if best is None or sum(accuracy) > sum(self.state.epochs[best]["accuracy"]):
                self.state.best = epoch
        if self.state.best in (None, epoch):
            self.state.keep()

    def _cause(self, losses: list[float], finite: list[float], first_step: int) -> str:
        """Say which argument a loss that is no number comes from, given an epoch's, and where images are finite."""
        precision, rate = self._plan.precision, self._plan.learning_rate
        first = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if first is None:
            return f"learning_rate: got {rate}, with which parameters became NaN or infinite; wants a smaller one"
        loss = f"the loss is {losses[first]} in batch {first + 1} of epoch {len(self.state.epochs) + 1}"
        if finite[first] < 1.0:  # in one of the processes
            return f"batches: {loss}, whose images are not all finite numbers; wants no NaN and no infinity among them"
        if first_step == 0 and first < self._plan.accumulate:  # before the first step
            if precision == "float32":
                return f"network: {loss}, before anything is learned; wants finite logits"
            return f"precision: got {precision!r}, in which {loss}, before anything is learned; wants 'float32'"
        wants = "a smaller one" + (", or the precision 'bfloat16'" if precision == "float16" else "")
        return f"learning_rate: got {rate}, with which {loss}; wants {wants}"

    def _on_device(self, name: str) -> Iterable[tuple[Any, Tensor]]:
        """Return batches on the device, logged; features are there already, and their images were."""
        if self._plan.method == "heads":
            return self._given[name]
        watched = self._logs[name].watched(self._given[name])
        return all_on_device(name, watched, self._network, self._device, self._counts[name])

    def _learn(self, index: int, x: Any, labels: Tensor) -> Tensor:
        """Add the gradients of a batch, and step behind the last of those that are averaged; returns the loss."""
        state, plan = self.state, self._plan
        first = index // plan.accumulate * plan.accumulate
        averaged_batches = min(plan.accumulate, self._count - first)
        if index == first:
            state.optimizer.zero_grad(set_to_none=True)
        steps = index == first + averaged_batches - 1
        model = self._model
        with model.no_sync() if isinstance(model, DistributedDataParallel) and not steps else nullcontext():
            with self._autocast:
                exits = model(x)
            if plan.method == "distill":
                loss = distillation_loss(
                    exits, labels, plan.weights_of(len(exits)), temperature=plan.temperature,
                    teacher_share=plan.teacher_share, label_smoothing=plan.label_smoothing,
                )  # fmt: skip
            else:
                trained = exits if self._trains_classifier else exits[:-1]
                weights = plan.weights_of(len(exits))
                loss = joint_loss(trained, labels, weights, label_smoothing=plan.label_smoothing)
            state.scaler.scale(loss / averaged_batches).backward()
        if steps:
            if state.scheduler is None:
                for group, rate in zip(state.optimizer.param_groups, self._rates, strict=True):
                    group["lr"] = rate * one_cycle(state.step, self._steps)
            state.scaler.step(state.optimizer)
            state.scaler.update()
            if state.scheduler is not None:
                with warnings.catch_warnings():  # of a first step that the scaler has skipped
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                    state.scheduler.step()
            state.step += 1
            if state.average is not None:
                state.average.update(state.step)
        return loss.detach()

    def _validate(self) -> list[float]:
        """Return the accuracies of all exits, found by rank 0."""
        found = torch.zeros(len(self._network.taps) + 1, dtype=torch.float64, device=self._device)
        if own_rank() == 0:
            found.copy_(accuracies(self._learner, self._on_device("validation")))
        from_rank_0([found])
        return found.tolist()

    def finish(self) -> Training:
        """Leave the network at its best, the same in all processes."""
        if self.state.best is not None or self.state.average is not None:
            self.state.kept.put_back()
        from_rank_0(list(self._network.buffers()))  # each process has seen other images
        learned = self._learned_before
        for log in self._logs.values():
            learned = log.added_to(learned)
        self._network.learned_from = replace(learned, parameters=fingerprint(self._network))
        return self._done()

    def _done(self) -> Training:
        best = len(self.state.epochs) - 1 if self.state.best is None else self.state.best
        return Training(tuple(as_epoch(each) for each in self.state.epochs), best)


def trains_classifier(network: EarlyExitNetwork, plan: TrainingPlan) -> bool:
    """Return whether the last exit learns, too."""
    return plan.method != "heads" or new_classifier(network) is not None


def as_epoch(noted: dict[str, Any]) -> Epoch:
    """Return what a state has noted of an epoch."""
    accuracy = noted["accuracy"]
    return Epoch(**{**noted, "accuracy": None if accuracy is None else tuple(accuracy)})
