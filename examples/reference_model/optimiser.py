"""Muon for the matrices, AdamW for the rest, with the work split between the processes.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum
by the nearest orthogonal matrix, found with five Newton-Schulz steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MATRIX_RATE = 0.02
OTHER_RATE = 0.003
MOMENTUM = 0.95
DECAY = 0.02  # of the matrices, times the learning rate
LONGEST = 1.0  # gradient norm of what AdamW updates


class Optimiser:
    """Updates parameters in place from the gradients that they hold.

    Every process holds all parameters and hands over the gradients of its own data; each works
    out the update of its share of the matrices.
    """

    def __init__(self, parameters: dict[str, Tensor], *, rank: int = 0, processes: int = 1) -> None:
        self._parameters = parameters
        self._rank, self._processes = rank, processes
        self._matrices = [name for name in parameters if name.endswith("_proj.weight")]
        others = [value for name, value in parameters.items() if name not in self._matrices]
        self._others = others
        self._adam = torch.optim.AdamW(others, betas=(0.9, 0.97), eps=1e-10, weight_decay=0.0)
        by_size: dict[torch.Size, list[str]] = {}
        for name in self._matrices:
            by_size.setdefault(parameters[name].shape, []).append(name)
        self._mine = [
            names[rank::processes] for names in by_size.values() if names[rank::processes]
        ]
        self._momenta = {
            name: torch.zeros_like(parameters[name]) for names in self._mine for name in names
        }

    def step(self, factor: float) -> None:
        """Update everything and drop the gradients.

        Args:
            factor: of the learning rates.
        """
        self._average_gradients()
        torch.nn.utils.clip_grad_norm_(self._others, LONGEST)
        for group in self._adam.param_groups:
            group["lr"] = OTHER_RATE * factor
        self._adam.step()
        self._muon_step(MATRIX_RATE * factor)
        for parameter in self._parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """All that a later run needs to go on; all processes must call it together."""
        momenta = self._shared({name: self._momenta.get(name) for name in self._matrices})
        return {"adam": self._adam.state_dict(), "momenta": momenta}

    def restore(self, state: dict[str, Any]) -> None:
        self._adam.load_state_dict(state["adam"])
        for name, momentum in self._momenta.items():
            momentum.copy_(state["momenta"][name])

    def _average_gradients(self) -> None:
        gradients: list[Tensor] = []
        for parameter in self._parameters.values():
            if parameter.grad is None:  # a hint of which this step had none
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        if self._processes == 1:
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self._processes
        parts = flat.split([gradient.numel() for gradient in gradients])
        for parameter, part in zip(self._parameters.values(), parts, strict=True):
            parameter.grad = part.view(parameter.shape)

    @torch.no_grad()
    def _muon_step(self, rate: float) -> None:
        mine: dict[str, Tensor] = {}
        for names in self._mine:
            looked_ahead = []
            for name in names:
                gradient = self._parameters[name].grad
                assert gradient is not None  # the averages are there
                self._momenta[name].lerp_(gradient, 1 - MOMENTUM)
                looked_ahead.append(gradient.lerp(self._momenta[name], MOMENTUM))
            mine |= dict(zip(names, orthogonal(torch.stack(looked_ahead)), strict=True))
        for name, update in self._shared({name: mine.get(name) for name in self._matrices}).items():
            parameter = self._parameters[name]
            tall = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
            parameter.mul_(1 - rate * DECAY).add_(update, alpha=-rate * tall)

    def _shared(self, mine: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """Every process's share of the matrices, joined."""
        whole = {
            name: torch.zeros_like(self._parameters[name]) if value is None else value.float()
            for name, value in mine.items()
        }
        if self._processes == 1 or not whole:
            return whole
        flat = torch.cat([value.reshape(-1) for value in whole.values()])
        dist.all_reduce(flat)  # all but one addend are zeros
        parts = flat.split([value.numel() for value in whole.values()])
        return {
            name: part.view(self._parameters[name].shape)
            for name, part in zip(whole, parts, strict=True)
        }


def orthogonal(matrices: Tensor) -> Tensor:
    """About the nearest orthogonal matrices: singular values between 0.7 and 1.2.

    Args:
        matrices: shape (count, rows, columns).
    """
    wide = matrices.shape[-2] <= matrices.shape[-1]
    turned: Tensor = (matrices if wide else matrices.mT).bfloat16()
    turned = turned / (turned.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = turned @ turned.mT
        turned = 3.4445 * turned + (-4.7750 * square + 2.0315 * square @ square) @ turned
    return turned if wide else turned.mT
