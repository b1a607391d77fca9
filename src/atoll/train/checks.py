"""What a script hands to `atoll.join` and `step`, checked: one line says what is wrong, before anything has begun."""

from __future__ import annotations

import logging
import multiprocessing
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.config import choice
from atoll.core.layout import DTYPES, EXTRA_LENGTH_MAX, TensorSpec
from atoll.errors import ConfigError, JoinError
from atoll.tensors.names import BUFFERS, has_address, identity_of, local_names
from atoll.wire.channel import parse_address
from atoll.wire.check import NAME_PATTERN

_log = logging.getLogger("atoll")
WAIT_MAX_S = 31 * 86_400.0
NAME_LENGTH_MAX = 64
TOKENS_MAX = 2**48
"""Of one step; sums of a life stay far below 2**63."""


# ---------------------------------------------------------------- who may join at all


def check_process(*, alone: bool) -> None:
    """JoinError in a worker that runs the script again, and where several ranks would each become a learner."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a spawned one that still imports the script
        raise JoinError(
            "atoll.join was called in a worker that multiprocessing started, which runs the script again; put the "
            'script below `if __name__ == "__main__":`'
        )
    ranks = _ranks()
    if ranks > 1 and not alone:
        raise JoinError(
            f"torch.distributed has {ranks} ranks here; each would become a learner of its own, and replicas "
            "drift apart; a learner of several ranks is not supported yet: start one process per learner, or give "
            "alone=True where this process trains a whole model by itself"
        )


def _ranks() -> int:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


def check_name(name: str) -> None:
    """ConfigError where no learner can be called so."""
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"name={str(name)[:80]!r} must be 1 to {NAME_LENGTH_MAX} letters, digits, '.', '_' or '-'")


def check_reach(address: str, bulk_address: str | None, **waits_s: float) -> None:
    """ConfigError where an address is none, or one of the waits makes no sense."""
    for target in filter(None, (address, bulk_address)):
        parse_address(target)
    for wait, wait_s in waits_s.items():
        number = isinstance(wait_s, int | float)
        if not number or not 0 <= wait_s <= WAIT_MAX_S:
            shown = format(wait_s, "g") if number else repr(wait_s)[:60]
            raise ConfigError(f"{wait}={shown} must be between 0 and {WAIT_MAX_S:,.0f} seconds")


def check_agreement(buffers: str, fingerprint_extra: str) -> None:
    """ConfigError where what learners must agree on is not well-formed."""
    choice("buffers", buffers, BUFFERS)
    if len(fingerprint_extra) > EXTRA_LENGTH_MAX or not (fingerprint_extra.isprintable() or not fingerprint_extra):
        raise ConfigError(
            f"fingerprint_extra={fingerprint_extra[:40]!r} must be one printable line of at most {EXTRA_LENGTH_MAX} "
            "characters"
        )


# ---------------------------------------------------------------- model and optimizers


def check_model(model: Any) -> None:
    """ConfigError where it is no module, or not ready: lazy, on meta, or of values that cannot be merged."""
    if not isinstance(model, nn.Module):
        given = model.__name__ if isinstance(model, type) else type(model).__name__
        hint = "; call it to build one" if isinstance(model, type) else "; join takes (model, optimizer)"
        raise ConfigError(f"model={given} is not a torch.nn.Module{hint}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError("model is a TorchScript module; join with the module it was made of, which has its tensors")
    if torch.is_inference_mode_enabled():
        raise ConfigError("join was called inside torch.inference_mode(), where nothing trains; call it outside")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(f"parameter {name!r} is lazy and has no shape yet; run one forward pass before join")
        if parameter.is_inference():
            raise ConfigError(
                f"parameter {name!r} was made inside torch.inference_mode() and can never be trained; build the model "
                "outside of it"
            )
        if parameter.device.type == "meta":
            raise ConfigError(f"parameter {name!r} is on the meta device; give it memory (model.to_empty) before join")
        if parameter.requires_grad:
            _check_values(name, parameter)
    _check_memory({name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad})


def _check_values(name: str, parameter: Tensor) -> None:
    dtype = str(parameter.dtype).removeprefix("torch.")
    if dtype not in DTYPES or parameter.is_sparse:
        what = "sparse" if parameter.is_sparse else dtype
        raise ConfigError(f"parameter {name!r} is {what}; what is trained must be dense and one of {', '.join(DTYPES)}")
    if not parameter.numel():
        raise ConfigError(f"parameter {name!r} has no values (shape {list(parameter.shape)}); freeze or remove it")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter lies: bytes from `start` to `stop`, with or without gaps between its values."""

    name: str
    parameter: Tensor
    start: int
    stop: int

    @property
    def dense(self) -> bool:
        return self.stop - self.start == self.parameter.nbytes


def _place(name: str, parameter: Tensor) -> _Place:
    values = 1 + sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
    if values < parameter.numel():
        raise ConfigError(
            f"parameter {name!r} has several values in one place of memory, as `expand` makes them; clone() it"
        )
    start = parameter.data_ptr()
    return _Place(name, parameter, start, start + values * parameter.element_size())


def _check_memory(trainable: dict[str, Tensor]) -> None:
    """Every value has a place of its own, unless two parameters are the same values in the same shape (tied)."""
    places = [_place(name, parameter) for name, parameter in trainable.items() if has_address(parameter)]
    before: dict[torch.device, list[_Place]] = {}
    for place in sorted(places, key=lambda place: (place.start, place.name)):
        reaching = [other for other in before.get(place.parameter.device, []) if other.stop > place.start]
        for other in reaching:
            if identity_of(other.parameter) != identity_of(place.parameter) and _overlap(other, place):
                raise ConfigError(
                    f"parameters {other.name!r} and {place.name!r} share memory, but are not equal in shape and "
                    "strides; tie them as one Parameter, or clone() one"
                )
        before[place.parameter.device] = [*reaching, place]


def _overlap(first: _Place, second: _Place) -> bool:
    """Whether a byte belongs to both. Their ranges overlap; with gaps, each byte is looked at."""
    if first.dense and second.dense:
        return True
    start = min(first.start, second.start)
    taken = torch.zeros(max(first.stop, second.stop) - start, dtype=torch.bool, device="cpu")
    _bytes_of(first, taken, start).fill_(True)
    return bool(_bytes_of(second, taken, start).any())


def _bytes_of(place: _Place, memory: Tensor, start: int) -> Tensor:
    """The bytes of a parameter, in `memory`, which stands for those from `start` on."""
    size = place.parameter.element_size()
    strides = [step * size for step in place.parameter.stride()]
    return memory.as_strided([*place.parameter.shape, size], [*strides, 1], place.start - start)


def optimizers_of(optimizer: Any) -> list[Any]:
    """The optimizer, or the list of them: anything with `param_groups`, wrapped or not. ConfigError for all else."""
    if _has_groups(optimizer):
        return [optimizer]
    if isinstance(optimizer, Iterable) and not isinstance(optimizer, str | bytes | dict | nn.Module):
        several = list(optimizer)
        if several and all(map(_has_groups, several)):
            return several
    given = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
    raise ConfigError(
        f"optimizer={given} has no param_groups; give a torch optimizer, one that wraps it, or a list of them"
    )


def _has_groups(optimizer: Any) -> bool:
    if isinstance(optimizer, type | nn.Module):
        return False
    groups = getattr(optimizer, "param_groups", None)
    return isinstance(groups, list | tuple) and all(isinstance(group, dict) and "params" in group for group in groups)


def check_optimizers(model: nn.Module, optimizers: list[Any]) -> None:
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


def warn_of_local_state(model: nn.Module, tensors: tuple[TensorSpec, ...]) -> None:
    """Name what the model holds and the run does not."""
    local = local_names(model, tensors)
    if local:
        names = ", ".join(local[:3]) + (", ..." if len(local) > 3 else "")
        told = "%d tensors stay with this learner and are not in the merged model (frozen, or local buffers): %s"
        _log.warning(told, len(local), names)


def warn_of_environment() -> None:
    """A launcher of ranks that nobody has initialised yet: several learners may be meant, or not."""
    if _ranks() == 1 and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        _log.warning(
            "WORLD_SIZE=%s is set: each process that calls atoll.join becomes a learner of its own",
            os.environ["WORLD_SIZE"][:20],
        )


# ---------------------------------------------------------------- a step


def tokens_of(tokens: Any) -> int:
    """The tokens of a step, from any kind of whole number: int, numpy, a tensor of one value. ConfigError else."""
    found: int | None = None
    if isinstance(tokens, Tensor) and tokens.numel() == 1 and not (tokens.is_floating_point() or tokens.is_meta):
        tokens = tokens.item()
    if not isinstance(tokens, bool) and not (isinstance(tokens, Tensor) and tokens.is_meta):
        try:
            found = operator.index(tokens)
        except TypeError:
            found = None
    if found is None or not 0 <= found <= TOKENS_MAX:
        shown = f"a tensor {list(tokens.shape)}" if isinstance(tokens, Tensor) else _shown(tokens)
        raise ConfigError(
            f"tokens={shown} must be a whole number from 0 to 2**48: the tokens of this step (0: an empty batch)"
        )
    return found


def loss_of(loss: Any) -> float | Tensor | None:
    """The loss of a step, from any kind of number; a tensor of one value as it is. ConfigError else."""
    if loss is None:
        return None
    if isinstance(loss, Tensor):
        if loss.numel() != 1 or loss.is_complex() or loss.is_meta:
            what = f"{list(loss.shape)}{' on the meta device' if loss.is_meta else ''}"
            raise ConfigError(f"loss is a tensor {what}; give its mean over the batch, one real value")
        return loss
    try:
        if not isinstance(loss, str | bytes | bytearray):
            return float(loss)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(f"loss={_shown(loss)} must be a number, a tensor of one value, or None")


def _shown(value: Any) -> str:
    """Also of a number with too many digits for `repr`."""
    try:
        return repr(value)[:60]
    except ValueError:
        return f"a {type(value).__name__}"
