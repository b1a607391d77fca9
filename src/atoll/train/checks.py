"""What `join` is given, checked before anything is started: each fault is one line with its remedy."""

from __future__ import annotations

import logging
import os
import re
import socket

import torch
from torch import nn

from atoll.core.config import choice
from atoll.core.layout import EXTRA_LENGTH_MAX, TensorSpec
from atoll.errors import ConfigError
from atoll.tensors.names import BUFFERS, local_names
from atoll.wire.channel import parse_address
from atoll.wire.check import NAME_PATTERN

_log = logging.getLogger("atoll")
DEFAULT_ADDRESS = "127.0.0.1:7700"
WAIT_MAX_S = 31 * 86_400.0
NAME_LENGTH_MAX = 64


def default_name() -> str:
    """Host and process, in the letters that names may have."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "learner"
    tail = f"-{os.getpid()}"
    return host[: NAME_LENGTH_MAX - len(tail)] + tail


def check_name(name: str) -> None:
    """ConfigError where no learner can be called so."""
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"name={name[:80]!r} must be 1 to {NAME_LENGTH_MAX} letters, digits, '.', '_' or '-'")


def check_reach(address: str, bulk_address: str | None, **waits_s: float) -> None:
    """ConfigError where an address is none, or one of the waits makes no sense."""
    for target in filter(None, (address, bulk_address)):
        parse_address(target)
    for wait, wait_s in waits_s.items():
        if not 0 <= wait_s <= WAIT_MAX_S:
            raise ConfigError(f"{wait}={wait_s:g} must be between 0 and {WAIT_MAX_S:,.0f} seconds")


def warn_of_local_state(model: nn.Module, tensors: tuple[TensorSpec, ...]) -> None:
    """Name what the model holds and the run does not."""
    local = local_names(model, tensors)
    if local:
        names = ", ".join(local[:3]) + (", ..." if len(local) > 3 else "")
        told = "%d tensors stay with this learner and are not in the merged model (frozen, or local buffers): %s"
        _log.warning(told, len(local), names)


def check_agreement(buffers: str, fingerprint_extra: str) -> None:
    """ConfigError where what learners must agree on is not well-formed."""
    choice("buffers", buffers, BUFFERS)
    if len(fingerprint_extra) > EXTRA_LENGTH_MAX or not (fingerprint_extra.isprintable() or not fingerprint_extra):
        raise ConfigError(
            f"fingerprint_extra={fingerprint_extra[:40]!r} must be one printable line of at most {EXTRA_LENGTH_MAX} "
            "characters"
        )


def check_optimizers(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """ConfigError names the first trainable parameter that no optimizer holds, or what is foreign to the model."""
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    held_ids = {id(parameter) for parameter in held}
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    for identity, name in trainable.items():
        if identity not in held_ids:
            raise ConfigError(f"parameter {name!r} is trainable but not in the optimizer; add it, or freeze it")
    frozen = {id(p): name for name, p in model.named_parameters() if not p.requires_grad}
    for parameter in held:
        if id(parameter) in frozen:
            raise ConfigError(f"the optimizer holds parameter {frozen[id(parameter)]!r}, which is frozen; leave it out")
        if id(parameter) not in trainable:
            shape = list(parameter.shape)
            raise ConfigError(f"the optimizer holds a tensor {shape} that is not a parameter of the model")
