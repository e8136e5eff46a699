"""``train``: the one loop that trains exits, all together or heads alone."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..arguments import kind_of
from ..bad_input import BadInput
from ..early_exit_network import EarlyExitNetwork
from ..learned_from import fingerprint, learned_by
from ..processes.process_group import own_rank, ranks
from .batches import count_batches, on_device
from .cached_features import cache_features
from .evaluation import accuracies
from .learners import AllExits, HeadsOnFeatures
from .losses import check_weights, distillation_loss, joint_loss
from .plan import TrainingPlan, one_cycle
from .sample_log import SampleLog
from .seeds import generators_of, own_random_numbers, seed_all, seed_of, set_epoch
from .several_processes import averaged, file_of_rank_0, from_rank_0, shared
from .training_state import TrainingState


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
    best: int
    """Index of the epoch whose parameters the network has: the best on the validation images, else the last."""


def train(
    network: EarlyExitNetwork,
    batches: Iterable[tuple[Tensor, Tensor]],
    plan: TrainingPlan | None = None,
    *,
    validation: Iterable[tuple[Tensor, Tensor]] | None = None,
    seed: int = 0,
    state: Path | None = None,
    resume: bool = False,
    on_step: Callable[[Step], object] = lambda step: None,
    on_epoch: Callable[[Epoch], object] = lambda epoch: None,
) -> Training:
    """Train the exits of a network, in place, on the device where it is; it is left in eval mode, as channels_last.

    Under torchrun, with a process group, gradients are averaged over all processes (DistributedDataParallel); the
    network and ``seed`` are the same in each, and ``batches`` are each one's part: a DataLoader with a
    DistributedSampler, say. Rank 0 evaluates and writes. Batch norms see each one's part alone.

    Args:
        network: heads that know their width, and parameters in float32, or all in float64. Parameters that require
            no gradient stay as they are, and a backbone without any that do stays in eval mode.
        batches: (images [N, ...], labels [N] int64): a DataLoader, or anything else with a length that can be gone
            through again and again.
        plan: the settings; None for those of ``TrainingPlan()``.
        validation: images that are not learned from. After each epoch every exit answers for all of them; the network
            is left as it was after the epoch with the best mean of their accuracies. Choose thresholds on others.
        seed: of what is drawn: dropout, the order of a DataLoader, transforms. Each epoch seeds the random numbers of
            Python, NumPy and PyTorch anew; outside they go on as before.
        state: a file that gets the state of the training after every epoch; rank 0's, other hosts need none.
        resume: go on where ``state`` ends. The result is that of a training without interruption, bit for bit where
            the device repeats its results, unless workers that outlive an epoch (``persistent_workers``) draw.
        on_step: called after every batch.
        on_epoch: called after every epoch, in each process.

    Returns:
        The epochs, those before a resumed one among them.

    Raises:
        TypeError, ValueError: arguments or batches that are not as described.
        BadInput: a loss that is no finite number, or a ``state`` to resume that is damaged or of another training.
    """
    plan = TrainingPlan() if plan is None else plan
    _check_arguments(network, plan, validation, state, resume)
    device = next(network.parameters()).device
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a tenth faster, on the CPU too
    with own_random_numbers(device):
        seed_all(seed_of(seed, own_rank()))
        run = _Run(network, batches, validation, plan, seed, device)
        if resume and state is not None:
            with file_of_rank_0(state) as file:
                run.resume(file)
        while not run.is_done():
            run.train_epoch(on_step)
            if state is not None and own_rank() == 0:
                run.state.save(state, run.settings())
            on_epoch(_as_epoch(run.state.epochs[-1]))
        return run.finish()


def _check_arguments(network: object, plan: TrainingPlan, validation: object, state: Path | None, resume: bool) -> None:
    if not isinstance(network, EarlyExitNetwork):
        raise TypeError(f"network: got {kind_of(network)}, wants an EarlyExitNetwork")
    lazy = [tap for tap, head in zip(network.taps, network.heads, strict=True) if any(map(is_lazy, head.parameters()))]
    if lazy:
        raise ValueError(
            f"network: the heads at {lazy} do not know their width yet; call network.check_taps(example_input) before"
        )
    kinds = {parameter.dtype for parameter in network.parameters()}
    if other := kinds - {torch.float32, torch.float64}:
        raise TypeError(f"network: has parameters of {other.pop()}, wants torch.float32; TrainingPlan has a precision")
    if torch.float64 in kinds and (len(kinds) > 1 or plan.precision != "float32"):  # autocast passes float64 over
        got = " and ".join(sorted(map(str, kinds)))
        raise TypeError(
            f"network: has parameters of {got} for the precision {plan.precision!r}, wants torch.float32; "
            "torch.float64 alone works without autocast, under the precision 'float32'"
        )
    if plan.weights is not None:
        check_weights(plan.weights, len(network.taps) + (plan.method != "heads"))
    if plan.patience is not None and validation is None:
        raise ValueError("validation: missing, wants images by which patience can stop the training")
    if resume and state is None:
        raise ValueError("state: missing, wants the file to resume from")


class _Run:
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
        self._autocast = torch.autocast(device.type, dtype, enabled=plan.precision != "float32")
        self._learner: nn.Module = AllExits(network)
        for name, each in (("batches", batches), ("validation", validation)):
            if each is not None:
                count_batches(name, each)
        before = learned_by(network)
        if before.unknown is not None:
            own = "its heads have" if plan.method == "heads" else "training here has"
            before = replace(before, unknown=f"what {own} learned from is, of before it is not: {before.unknown}")
        self._learned_before = before
        self._logs = logs = [SampleLog(each) for each in (batches, validation) if each is not None]
        if plan.method == "heads":
            self._learner = HeadsOnFeatures(network.exit_heads)
            batches = cache_features(network, logs[0].watched(batches), self._autocast, seed=seed)
            if validation is not None:
                validation = cache_features(network, logs[1].watched(validation), self._autocast, seed=None)
        self._batches, self._validation = batches, validation
        self._count = count_batches("batches", batches)
        self._steps = math.ceil(self._count / plan.accumulate) * plan.epochs
        parameters = [parameter for parameter in self._learner.parameters() if parameter.requires_grad]
        if not parameters:
            raise ValueError("network: has no parameter that requires a gradient, wants one to train")
        self._model = shared(self._learner, device)
        optimizer = torch.optim.AdamW(parameters, lr=plan.learning_rate, weight_decay=plan.weight_decay)
        scaler = torch.amp.GradScaler(device.type, enabled=plan.precision == "float16")
        self.state = TrainingState(self._learner, optimizer, scaler, generators_of(batches))

    def settings(self) -> dict[str, Any]:
        """Return what a training that goes on must have in common, as JSON has it."""
        plan = asdict(self._plan)
        weights = None if self._plan.weights is None else list(self._plan.weights)
        plan["images"] = [log.digest() for log in self._logs]
        return {**plan, "weights": weights, "seed": self._seed, "batches": self._count, "processes": ranks()}

    def resume(self, file: Path) -> None:
        """Go on where a state ends; of batches that are no known images nobody has noted what came before."""
        self.state.restore(file, self.settings())
        if self._plan.method != "heads" and not all(log.digest() for log in self._logs):
            self._learned_before = self._learned_before.but("training was resumed, and its samples of before not noted")

    def is_done(self) -> bool:
        """Return whether all epochs are done, or as many as patience has were no better than the best."""
        done, best = len(self.state.epochs), self.state.best
        patience = math.inf if self._plan.patience is None or best is None else self._plan.patience
        return done >= self._plan.epochs or (best is not None and done - 1 - best >= patience)

    def train_epoch(self, on_step: Callable[[Step], object]) -> None:
        """Go through all batches once, and see how the exits do."""
        epoch = len(self.state.epochs)
        set_epoch(self._batches, epoch)
        seed_all(seed_of(self._seed, own_rank(), 1 + epoch))
        self._model.train()
        total = torch.zeros((), device=self._device)
        for index, (inputs, labels) in zip(range(self._count), self._watched(0), strict=True):
            x, wanted = self._moved(inputs, labels)
            loss = self._learn(index, x, wanted)
            total += loss
            on_step(Step(epoch, len(wanted) * ranks(), loss))
        mean = averaged(total / self._count).item()
        if not math.isfinite(mean):
            raise BadInput(
                f"learning_rate: got {self._plan.learning_rate}, with which the loss is {mean} in epoch {epoch + 1}; "
                "wants a smaller one"
            )
        accuracy = None if self._validation is None else self._validate()
        rate = self.state.optimizer.param_groups[0]["lr"]
        self.state.epochs.append({"epoch": epoch, "loss": mean, "learning_rate": rate, "accuracy": accuracy})
        if accuracy is not None:
            best = self.state.best
            if best is None or sum(accuracy) > sum(self.state.epochs[best]["accuracy"]):
                self.state.keep_best()

    def _watched(self, which: int) -> Iterable[Any]:
        """Return the batches of training (0) or validation (1), which are logged; those of features were, as images."""
        batches = self._validation if which else self._batches
        return batches if self._plan.method == "heads" else self._logs[which].watched(batches)

    def _moved(self, inputs: Any, labels: Any) -> tuple[Any, Tensor]:
        """Return a batch on the device; features are there already."""
        if self._plan.method == "heads":
            return inputs, labels
        return on_device(inputs, labels, self._network, self._device)

    def _learn(self, index: int, x: Any, labels: Tensor) -> Tensor:
        """Add the gradients of a batch, and step where it is the last of those that are averaged; returns the loss."""
        state, accumulate = self.state, self._plan.accumulate
        first = index // accumulate * accumulate
        averaged_batches = min(accumulate, self._count - first)
        if index == first:
            state.optimizer.zero_grad(set_to_none=True)
        steps = index == first + averaged_batches - 1
        model = self._model
        with model.no_sync() if isinstance(model, DistributedDataParallel) and not steps else nullcontext():
            with self._autocast:
                exits = model(x)
            loss = self._loss(exits, labels)
            state.scaler.scale(loss / averaged_batches).backward()
        if steps:
            for group in state.optimizer.param_groups:
                group["lr"] = self._plan.learning_rate * one_cycle(state.step, self._steps)
            state.scaler.step(state.optimizer)
            state.scaler.update()
            state.step += 1
        return loss.detach()

    def _loss(self, exits: list[Tensor], labels: Tensor) -> Tensor:
        plan = self._plan
        if plan.method == "distill":
            return distillation_loss(
                exits, labels, plan.weights, temperature=plan.temperature, teacher_share=plan.teacher_share
            )
        return joint_loss(exits[:-1] if plan.method == "heads" else exits, labels, plan.weights)

    def _validate(self) -> list[float]:
        """Return the accuracies of all exits, found by rank 0."""
        found = torch.zeros(len(self._network.taps) + 1, dtype=torch.float64, device=self._device)
        if own_rank() == 0:
            moved = (self._moved(*batch) for batch in self._watched(1))
            found.copy_(torch.tensor(accuracies(self._learner, moved), dtype=torch.float64))
        from_rank_0([found])
        return found.tolist()

    def finish(self) -> Training:
        """Leave the network at its best, the same in all processes, in eval mode."""
        if self.state.best is not None:
            self.state.restore_best()
        from_rank_0(list(self._network.buffers()))  # each process has seen other images
        self._network.eval()
        self.state.optimizer.zero_grad(set_to_none=True)
        learned = self._learned_before
        for log in self._logs:
            learned = log.added_to(learned)
        self._network.learned_from = replace(learned, parameters=fingerprint(self._network))
        best = len(self.state.epochs) - 1 if self.state.best is None else self.state.best
        return Training(tuple(_as_epoch(each) for each in self.state.epochs), best)


def _as_epoch(said: dict[str, Any]) -> Epoch:
    accuracy = None if said["accuracy"] is None else tuple(said["accuracy"])
    return Epoch(said["epoch"], said["loss"], said["learning_rate"], accuracy)
