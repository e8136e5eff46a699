"""Triton kernels of auxhead, plain PyTorch references beside them, and the choice of launch configurations.

In: a head's input ([N, C, H, W], [N, T, D] or [N, D]), weight, bias, temperature and threshold. Out: a ``HeadOutput``,
or from ``ExitLaunch`` one answer per sample, merged over the exits of a network.

    fused_head           one head, one launch: the operator; head_backward has its gradients, head_arguments and
                         criteria check arguments; fused_head_kernel is the kernel, fused_head_reference the same in
                         plain PyTorch
    exit_launch          the heads of a network in one launch, answers merged on the device and packed; exit_kernel is
                         the kernel
    head_plan            a head's call again, without what was checked and chosen before: a launch of which noted_launch
                         has noted all arguments, or cpu_head there; exits_plan is the same for the exits of a network
    hidden_layers        ReLU, norm and linear layer before a head's last one; hidden_layers_kernel is the same inside
                         the kernels, layer_arguments what they are told of them
    patience             counts successive heads that agree, in PyTorch; exit_kernel does the same
    criteria             what a head is sure by, in PyTorch; criteria_kernel is the same inside the kernels
    head_stages          shared by both kernels: pool, product, softmax, decision; numbers pass between programs by
                         hand_over, in memory of workspace and arrival_counters
    compaction           open samples move into a smaller batch; compact_kernel is the kernel
    max_pool             max-pooling of channels_last maps; max_pool_kernel is the kernel
    choose_config        the launch choice: an override, else tuned_table (tuned/, a JSON file a device), else
                         launch_rule; launch_config is what is chosen, head_shape the key, head_view the input's layout
    kernel_hash          of the code that tuned tables were measured with
    residency            records where and when programs run; residency_kernel is the part inside the kernels
    compile_only         compiles for a GPU that is not here

To add a criterion: a row with its definition in criteria.py, the same in criteria_kernel.py, a case in
tests/kernels/test_criteria.py. It changes kernel_hash, but not what is compiled for heads without it, which
tests/kernels/test_machine_code.py shows: then the earlier hash goes into ``SAME_MACHINE_CODE``, and tables hold.
"""

from .compaction import Answer, collect, destination, gather_open, moves_rows, new_destinations
from .exits import ExitBuffers, ExitHead, ExitLaunch
from .fused_head import fused_head, runs_triton
from .head_output import HeadOutput
from .launch.head_arguments import check_input, check_pool
from .launch.launch_config import LaunchConfig
from .max_pool import max_pool2d
from .reference.criteria import CRITERIA, check_criterion, check_temperature, check_threshold, number_of
from .reference.fused_head import decide, fused_head_reference, pooled_features
from .reference.hidden_layers import ACTIVATIONS, HiddenLayers
from .reference.merge import Merged, all_exit, decide_in_order, heads_in_a_row, in_order, merge

__all__ = [
    "ACTIVATIONS",
    "CRITERIA",
    "Answer",
    "ExitBuffers",
    "ExitHead",
    "ExitLaunch",
    "HeadOutput",
    "HiddenLayers",
    "LaunchConfig",
    "Merged",
    "all_exit",
    "check_criterion",
    "check_input",
    "check_pool",
    "check_temperature",
    "check_threshold",
    "collect",
    "decide",
    "decide_in_order",
    "destination",
    "fused_head",
    "fused_head_reference",
    "gather_open",
    "heads_in_a_row",
    "in_order",
    "max_pool2d",
    "merge",
    "moves_rows",
    "new_destinations",
    "number_of",
    "pooled_features",
    "runs_triton",
]
