"""Which tensors of a model belong to a run, and under which names.

A name is that of the plain model, as its script wrote it: what wrappers put in front is left out, so that a compiled, a
data-parallel and a plain learner train one model, and its file loads into any of them. Parameters are those that are
trainable. Buffers are those that a `state_dict` has: floating-point ones are averaged, integers stay as they were in
version 0 (protocol R29). Frozen parameters and all else stay with each learner.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.core.layout import (
    BUFFER,
    CONSTANT,
    CONSTANT_BYTES,
    CONSTANTS_BYTES_MAX,
    DTYPES,
    PARAMETER,
    TensorSpec,
    is_embedding_like,
)
from atoll.errors import LayoutError

BUFFERS = ("average", "local")
"""What becomes of buffers (R29)."""
WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Under these names wrappers keep what they wrap: torch.compile, FSDP, activation checkpointing."""
MODULE_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
"""These keep it under `module`, a name that a user's own module may have as well."""


@dataclass(frozen=True, slots=True)
class Held:
    """Where a module keeps a tensor: found again at each use, since both may be replaced."""

    module: nn.Module
    leaf: str
    buffer: bool

    @property
    def tensor(self) -> Tensor | None:
        """As it is now."""
        home = self.module._buffers if self.buffer else self.module._parameters
        return home.get(self.leaf)


def _modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(prefix without wrappers, module), depth first; a shared module once per place."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is None:
            continue
        wraps = name in WRAPPED or (name == "module" and isinstance(module, MODULE_WRAPPERS))
        yield from _modules(child, prefix if wraps else f"{prefix}{name}.")


def _held(model: nn.Module) -> Iterator[tuple[str, Held]]:
    """Every parameter and every buffer of a `state_dict`, with its name; tied ones under all their names."""
    for prefix, module in _modules(model):
        for leaf in module._parameters:
            yield prefix + leaf, Held(module, leaf, False)
        for leaf in module._buffers.keys() - module._non_persistent_buffers_set:
            yield prefix + leaf, Held(module, leaf, True)


def has_address(tensor: Tensor) -> bool:
    """Whether it lies in memory that can be compared; subclasses (DTensor) and meta tensors have no address."""
    return type(tensor) in (nn.Parameter, Tensor) and tensor.device.type != "meta" and tensor.numel() > 0


def identity_of(tensor: Tensor) -> Hashable:
    """Equal for what is tied: two Parameters over the same memory are it as surely as one with two names."""
    if not has_address(tensor):
        return id(tensor)
    return (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())


@dataclass(frozen=True, slots=True)
class _Group:
    """A tensor with all its names, sorted."""

    names: list[str]
    held: Held
    tensor: Tensor


def _groups(model: nn.Module, kind: str) -> list[_Group]:
    """Tensors of a kind, sorted by first name; buffers that are a parameter too are left out."""
    groups: dict[Hashable, _Group] = {}
    trained = set()
    for name, held in _held(model):
        tensor = held.tensor
        if tensor is None:
            continue
        if not held.buffer:
            trained.add(identity_of(tensor))
        if _kind_of(held, tensor) == kind:
            groups.setdefault(identity_of(tensor), _Group([], held, tensor)).names.append(name)
    if kind != PARAMETER:
        groups = {identity: group for identity, group in groups.items() if identity not in trained}
    for group in groups.values():
        group.names.sort()
    return sorted(groups.values(), key=lambda group: group.names[0])


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kind_of(held: Held, tensor: Tensor) -> str | None:
    """None: it stays with its learner."""
    if not held.buffer:
        return PARAMETER if tensor.requires_grad else None
    if not tensor.numel() or tensor.is_sparse or tensor.is_quantized:
        return None
    if _dtype(tensor) in CONSTANT_BYTES:
        return None if tensor.device.type == "meta" else CONSTANT
    # A mask of infinities is no statistic, and what is not finite would be refused (R25).
    finite = _dtype(tensor) in DTYPES and (tensor.device.type == "meta" or bool(torch.isfinite(tensor).all()))
    return BUFFER if finite else None


def _embedding_weights(model: nn.Module) -> set[Hashable]:
    modules = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {identity_of(module.weight) for module in modules}


def specs_of(model: nn.Module, buffers: str = "average") -> tuple[TensorSpec, ...]:
    """The tensors of `model` that a run has, sorted by name: what a layout is made of.

    Tied tensors appear once, under the name that sorts first. `averaged` marks weights of nn.Embedding and
    nn.EmbeddingBag with everything tied to them, and tensors with a name that says embedding or head. buffers: average,
    or local, which leaves them out.
    """
    embeddings = _embedding_weights(model)
    specs = [
        TensorSpec(
            name=group.names[0],
            shape=tuple(group.tensor.shape),
            dtype=_dtype(group.tensor),
            averaged=identity_of(group.tensor) in embeddings or any(map(is_embedding_like, group.names)),
            aliases=tuple(group.names[1:]),
        )
        for group in _groups(model, PARAMETER)
    ]
    if buffers == "average":
        specs += [_buffer_spec(group) for group in _groups(model, BUFFER)]
        specs += _constants(model)
    return tuple(sorted(specs, key=lambda spec: spec.name))


def _buffer_spec(group: _Group, kind: str = BUFFER, value: bytes = b"") -> TensorSpec:
    first, *others = group.names
    return TensorSpec(first, tuple(group.tensor.shape), _dtype(group.tensor), False, tuple(others), kind, value)


def _constants(model: nn.Module) -> list[TensorSpec]:
    """The smallest first, as many as may travel."""
    specs, room_bytes = [], CONSTANTS_BYTES_MAX
    for group in sorted(_groups(model, CONSTANT), key=lambda group: (group.tensor.nbytes, group.names[0])):
        room_bytes -= group.tensor.nbytes
        if room_bytes >= 0:
            value = group.tensor.detach().cpu().contiguous().numpy().tobytes()
            specs.append(_buffer_spec(group, CONSTANT, value))
    return specs


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> Parameter, for exactly the parameters of `specs_of(model)`."""
    return {group.names[0]: group.tensor for group in _groups(model, PARAMETER)}


def local_names(model: nn.Module, specs: tuple[TensorSpec, ...]) -> list[str]:
    """What a `state_dict` has and the run does not, sorted: it stays with each learner."""
    known = {name for spec in specs for name in (spec.name, *spec.aliases)}
    return sorted({name for name, held in _held(model) if held.tensor is not None} - known)


class ModelTensors(Mapping[str, Tensor]):
    """Name -> tensor of a model as it is now, for every tensor that it has, tied ones under all their names.

    Tensors are followed where they are replaced; modules that were replaced or added since are seen by `refresh`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.refresh()

    def refresh(self) -> None:
        """Look through the model's modules again."""
        self._held = dict(_held(self._model))

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._held[name].tensor
        if tensor is None:
            raise KeyError(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return (name for name, held in self._held.items() if held.tensor is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def set_constants(tensors: Mapping[str, Tensor], values: Mapping[str, bytes]) -> None:
    """Write integer tensors, in place. LayoutError where a value does not fit."""
    for name, value in values.items():
        tensor = tensors.get(name)
        if tensor is None or len(value) != tensor.nbytes:
            raise LayoutError(f"constant {name!r} of the run does not fit the model; join with the run's model")
        with torch.no_grad():
            tensor.copy_(torch.frombuffer(bytearray(value), dtype=tensor.dtype).view(tensor.shape))
