"""The tolerance rule of all tests: error against float64 at most twice PyTorch's own."""

import torch
from torch import Tensor

FLOAT32_ULP = torch.finfo(torch.float32).eps
#: PyTorch's result may be exact by luck, above all where the output has few elements. A correct kernel that sums in
#: another order, and whose exp is good to 2 ulps, is allowed this many ulps whatever PyTorch's luck.
FLOOR_ULPS = 4


def assert_as_accurate_as_pytorch(
    actual: Tensor, exact: Tensor, pytorch: Tensor, *, magnitude: float = 1.0, what: str = "result"
) -> None:
    """Assert that the error of ``actual`` is at most twice PyTorch's own.

    Errors are the largest difference from ``exact``. NaN and infinities have to be where ``exact`` has them.

    Args:
        actual: what is tested.
        exact: the float64 reference, from the very inputs that ``actual`` was computed from.
        pytorch: PyTorch's own result, in the dtype of the inputs and on their device.
        magnitude: the largest number that the way to the result rounds to float32, where that is larger than 1: a
            logit of 20 is rounded to 20 ulps, and its probability is off by as many.
        what: named in the message.
    """
    assert exact.dtype == torch.float64, "the reference has to be float64"
    assert actual.shape == exact.shape == pytorch.shape, f"{what}: {actual.shape}, {exact.shape}, {pytorch.shape}"
    actual, pytorch = actual.detach().double(), pytorch.detach().double()
    finite = exact.isfinite()
    assert torch.equal(actual.isfinite(), finite), f"{what}: not finite in other places than the reference"
    assert torch.equal(actual[~finite].nan_to_num(nan=0.5), exact[~finite].nan_to_num(nan=0.5)), f"{what}: NaN or Inf"
    if not finite.any():
        return
    error = (actual - exact)[finite].abs().max().item()
    pytorch_error = (pytorch - exact)[finite & pytorch.isfinite()].abs()
    twice_pytorch = 2 * pytorch_error.max().item() if pytorch_error.numel() else 0.0
    floor = FLOOR_ULPS * FLOAT32_ULP * exact[finite].abs().max().item() * max(1.0, magnitude)
    assert error <= max(twice_pytorch, floor), (
        f"{what}: error {error:.3g}, allowed {max(twice_pytorch, floor):.3g} "
        f"(twice PyTorch's {twice_pytorch:.3g}, floor {floor:.3g})"
    )
