"""Memory layouts of maps, tokens and vectors: each views a larger or permuted tensor as the wanted shape."""

import torch

MAP_LAYOUTS = {
    "nchw": lambda make, n, c, h, w: make((n, c, h, w)),
    "channels_last": lambda make, n, c, h, w: make((n, c, h, w)).contiguous(memory_format=torch.channels_last),
    "steps": lambda make, n, c, h, w: make((2 * n, 3 * c, 2 * h, 2 * w))[::2, ::3, ::2, 1::2],
    "offset": lambda make, n, c, h, w: make((n + 1, c + 2, h + 1, w + 3))[1:, 2:, 1:, 3:],
    "padded_rows": lambda make, n, c, h, w: make((n, c, h, w + 2))[..., :w],
    "padded_planes": lambda make, n, c, h, w: make((n, c, h + 2, w))[:, :, 1 : h + 1],
    "channels_last_slice": lambda make, n, c, h, w: make((n, c + 3, h, w)).contiguous(
        memory_format=torch.channels_last
    )[:, 2 : c + 2],
    "transposed_hw": lambda make, n, c, h, w: make((n, c, w, h)).transpose(2, 3),
    "permuted_batch": lambda make, n, c, h, w: make((c, h, n, w)).permute(2, 0, 1, 3),
    "expanded_batch": lambda make, n, c, h, w: make((1, c, h, w)).expand(n, c, h, w),
    "expanded_channels": lambda make, n, c, h, w: make((n, 1, h, w)).expand(n, c, h, w),
    "expanded_map": lambda make, n, c, h, w: make((n, c, 1, 1)).expand(n, c, h, w),
    "expanded_rows": lambda make, n, c, h, w: make((n, c, 1, w)).expand(n, c, h, w),
    "overlapping": lambda make, n, c, h, w: make((n, c * h * w)).as_strided((n, c, h, w), (c, 2, 1, 1)),
}

TOKEN_LAYOUTS = {
    "transposed": lambda make, n, t, d: make((n, d, t)).transpose(1, 2),
    "steps": lambda make, n, t, d: make((2 * n, 2 * t, 3 * d))[1::2, ::2, ::3],
    "without_class_token": lambda make, n, t, d: make((n, t + 1, d))[:, 1:],
    "sequence_first": lambda make, n, t, d: make((t, n, d)).transpose(0, 1),
    "expanded_tokens": lambda make, n, t, d: make((n, 1, d)).expand(n, t, d),
}

VECTOR_LAYOUTS = {
    "transposed": lambda make, n, d: make((d, n)).t(),
    "steps": lambda make, n, d: make((3 * n, 2 * d))[::3, 1::2],
    "offset": lambda make, n, d: make((n + 1, d + 5))[1:, 5:],
    "expanded": lambda make, n, d: make((1, d)).expand(n, d),
    "one_column": lambda make, n, d: make((n, 1)).expand(n, d),
}

#: By the number of dimensions.
LAYOUTS = {4: MAP_LAYOUTS, 3: TOKEN_LAYOUTS, 2: VECTOR_LAYOUTS}
