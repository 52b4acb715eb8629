"""Rounding keys and values so that what is lost lies where little is looked at.

GPTQ (Frantar et al., arXiv 2210.17323, section 3) rounds a layer's weights one input channel after
the other and lets the channels to come make good the error so far, weighted by the inputs that the
layer sees. Here a key takes the place of the weights and queries that of the inputs; and a value,
with the rows of the output projection.
"""

from __future__ import annotations

import torch
from torch import Tensor

DAMPING = 0.01
"""Share of a head's mean eigenvalue that every direction weighs besides: other queries will come
than those at hand."""

_BLOCK = 16
"""Channels whose errors reach those behind the block in one product."""


def round_with_feedback(
    numbers: Tensor, scale: Tensor, offset: Tensor, hessian: Tensor, top: int
) -> Tensor:
    """Codes (T, G, D) uint8, from 0 to ``top``.

    With each head's error e, of ``code * scale + offset``, e' H e is kept small: the sum of its
    squared products with the queries that H is made of. Rounding to the nearest keeps e' e small.

    numbers, scale, offset: (T, G, D) float32. hessian: (G, D, D), H of each head, symmetric and
    positive semi-definite.
    """
    factor = _triangular(hessian)
    # e' H e is the squared length of R' e, whose channel j sees the errors up to j: R as rows
    feedback = -factor / factor.diagonal(dim1=-2, dim2=-1)[:, None]  # (G, D, D)
    of_channel = feedback.permute(1, 2, 0).contiguous()[..., None]  # (D, D, G, 1)
    # Channel by channel, (D, G, T), so that every step works on whole rows; numbers become codes in
    # place, and what stands against them errors.
    codes = (numbers - offset).permute(2, 1, 0).contiguous()
    errors, step = -codes, scale.permute(2, 1, 0).contiguous()
    n_channels = len(codes)
    for begin in range(0, n_channels, _BLOCK):
        end = min(begin + _BLOCK, n_channels)
        for channel in range(begin, end):
            code = codes[channel].div_(step[channel]).round_().clamp_(0, top)
            error = errors[channel].addcmul_(code, step[channel])
            after = slice(channel + 1, end)
            codes[after].addcmul_(of_channel[channel, after], error)
        if end < n_channels:
            behind = feedback[:, begin:end, end:].mT  # (G, channels to come, block)
            codes[end:].transpose(0, 1).baddbmm_(behind, errors[begin:end].transpose(0, 1))
    return codes.to(torch.uint8).permute(2, 1, 0).contiguous()


def _triangular(hessian: Tensor) -> Tensor:
    """R (G, D, D) float32, upper triangular, R R' being the damped H."""
    wide = hessian.double()
    weight = wide.diagonal(dim1=-2, dim2=-1).mean(-1)
    weight = torch.where(weight > 0, DAMPING * weight, 1.0)  # without queries, round to the nearest
    wide = wide + torch.diag_embed(weight[:, None].expand(-1, wide.shape[-1]))
    factor: Tensor = torch.linalg.cholesky(wide.flip(1, 2))
    return factor.flip(1, 2).float()
