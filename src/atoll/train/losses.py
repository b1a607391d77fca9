"""The sum of tokens * loss of a life, without making an accelerator wait at each step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class LossSum:
    """A CPU loss is read at once. Losses on an accelerator are summed there; the sum comes back asynchronously, so what
    `value` says is one reading old until `settle`."""

    def __init__(self) -> None:
        self.value = 0.0
        self._sum: Tensor | None = None
        self._host: Tensor | None = None
        self._event: Any = None
        self._cpu = 0.0
        self._device_value = 0.0

    def add(self, tokens: int, loss: float | Tensor | None) -> bool:
        """Add one step. False where the loss, as far as it is known yet, is not finite."""
        if loss is None:
            return True
        if isinstance(loss, Tensor):
            if loss.device.type != "cpu":
                self._add_device(tokens, loss)
                return math.isfinite(self._device_value)
            loss = loss.item()
        if not math.isfinite(loss):
            return False
        self._cpu += tokens * float(loss)
        self.value = self._cpu + self._device_value
        return True

    def _add_device(self, tokens: int, loss: Tensor) -> None:
        if self._sum is None:
            self._sum = torch.zeros((), dtype=torch.float64, device=loss.device)
            self._host = torch.zeros((), dtype=torch.float64, device="cpu", pin_memory=loss.device.type == "cuda")
        self._sum += loss.detach().to(torch.float64).reshape(()) * tokens

    def read(self) -> float:
        """The newest known sum; starts the next reading. Never waits on CUDA."""
        if self._sum is None or self._host is None:
            return self.value
        if self._sum.device.type != "cuda":
            return self.settle()
        if self._event is None or self._event.query():
            if self._event is not None:
                self._know(self._host.item())
            self._host.copy_(self._sum, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        return self.value

    def settle(self) -> float:
        """The sum of all steps so far; waits for the accelerator."""
        if self._sum is not None:
            self._know(float(self._sum.item()))
        return self.value

    def _know(self, device_value: float) -> None:
        self._device_value = device_value
        if math.isfinite(device_value):
            self.value = self._cpu + device_value
