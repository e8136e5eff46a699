"""Networks with early exits, the heads they consist of, and the runners that answer fast.

Names are loaded when they are first used, so that commands need not wait for PyTorch to show their help. What PyTorch
itself has to know (``torch.ops.auxhead``, and ``HeadOutput`` in programs of ``torch.export``) is registered by
``import auxhead.kernels``.
"""

import sys
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any

#: The modules of the public names; ``__init__.pyi`` says the same to type checkers.
_MODULES = {
    "Accelerated": ".accelerate",
    "AnytimeReport": ".calibration.curve",
    "AutoRunner": ".auto.auto_runner",
    "CalibrationReport": ".calibration.report",
    "Checkpoint": ".saving.checkpoint",
    "CompactingRunner": ".runners.compacting",
    "DriftWarning": ".answers.exit_monitor",
    "EagerRunner": ".runners.runner",
    "EarlyExitNetwork": ".network.early_exit_network",
    "ExitLatencies": ".calibration.exit_latency",
    "ExitLog": ".calibration.retuning",
    "ExitMonitor": ".answers.exit_monitor",
    "ExitResult": ".answers.exit_result",
    "ExitRule": ".answers.exit_rule",
    "ExportReport": ".export.exporting",
    "Extract": ".listening.reading",
    "FuseReport": ".heads.fuse_aux_heads",
    "FusedAuxHead": ".heads.fused_aux_head",
    "GatedRunner": ".runners.gated",
    "HeadOutput": "..kernels",
    "ModuleHead": ".heads.module_head",
    "OverlappedRunner": ".runners.overlapped",
    "PipelinedRunner": ".parallel.pipeline.runner",
    "PolledRunner": ".runners.polled",
    "Preprocessing": ".basics.preprocessing",
    "Retuner": ".calibration.retuning",
    "Runner": ".runners.runner",
    "Training": ".training.training_loop",
    "TrainingPlan": ".training.plan",
    "Trunk": ".trunk.trunk",
    "accelerate": ".accelerate",
    "accuracy_of_exits": ".training.learners",
    "anytime_curve": ".calibration.curve",
    "attach": ".attach",
    "attach_exits": ".own_exits.attach_exits",
    "calibrate_network": ".calibration.calibrate_network",
    "distillation_loss": ".training.plan",
    "export_decision": ".export.decision",
    "export_exits": ".export.exporting",
    "export_stages": ".export.exporting",
    "fuse_aux_heads": ".heads.fuse_aux_heads",
    "joint_loss": ".training.plan",
    "load_checkpoint": ".saving.checkpoint",
    "make_runner": ".make_runner",
    "make_trunk": ".trunk.trunk",
    "measure_exit_latencies": ".calibration.exit_latency",
    "parallelize": ".parallel.parallelize",
    "pipelined": ".parallel.pipeline.pipelined",
    "replay": ".calibration.retuning",
    "retune_thresholds": ".calibration.retuning",
    "sample_identities": ".calibration.samples",
    "save_checkpoint": ".saving.checkpoint",
    "train": ".training.train",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("auxhead")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


class _Package(ModuleType):
    """This package: importing a module named like its function leaves the function under that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _MODULES and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
