"""The model of a finished run, read back: `RUN/model/` and `RUN/recipe.toml`."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from atoll.core.config import DATA_PARALLEL
from atoll.core.layout import fingerprint
from atoll.errors import RunError
from atoll.recipes.model import MODELS, ByteModel, build_model
from atoll.store.rundir import RECIPE_FILE, read_settings, read_toml
from atoll.tensors.hashing import payload_hash
from atoll.tensors.names import specs_of
from atoll.watch.read import fold_run, not_begun
from atoll.watch.view import BROKEN_OFF


@dataclass(frozen=True, slots=True)
class Saved:
    """A model and what it was trained on."""

    name: str
    model: ByteModel
    data: tuple[str, ...] | None
    """As the run's learners were told; None where the run was made by hand."""
    length: int | None


def load_saved(run: Path) -> Saved:
    """RunError where the run is not there, has no model yet, or its model is damaged or of another kind."""
    manifest = _manifest(run)
    name = _model_of(str(manifest.get("fingerprint")), run)
    model = build_model(name, 0)
    path = run / "model" / "model.safetensors"
    try:
        content = path.read_bytes()
        if payload_hash(content) != manifest.get("file_hash"):
            raise RunError(f"{path} does not match the hash in its manifest; it is damaged")
        model.load_state_dict(load(content))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise RunError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    recipe = read_recipe(run)
    data = tuple(json.loads(recipe["data"])) if "data" in recipe else None
    return Saved(name, model, data, recipe.get("length"))


def read_recipe(run: Path) -> dict[str, Any]:
    """recipe.toml; empty where the run was made by hand."""
    try:
        return read_toml(run / RECIPE_FILE)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RunError(f"{run / RECIPE_FILE} cannot be read: {' '.join(str(error).split())}") from error


def _manifest(run: Path) -> dict[str, Any]:
    settings = read_settings(run)
    path = run / "model" / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        why = _why_no_model(run, parallel=settings.get("mode") == DATA_PARALLEL)
        raise RunError(f"run {os.fspath(run)!r} has no model: {why}") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    return manifest


def _why_no_model(run: Path, *, parallel: bool) -> str:
    """With what to do about it."""
    if parallel and (run / "summary.json").exists():
        return f"it ended early, and mode={DATA_PARALLEL} writes none then; start it again"
    if parallel:
        return f"a run of mode={DATA_PARALLEL} writes it when all its ranks have ended; try again then"
    tape = run / "tape.jsonl"
    if not tape.exists():
        return f"it {not_begun(tape)}"
    view = fold_run(run)
    if view.phase == BROKEN_OFF:
        return f"it broke off: {view.end_reason}"
    if view.phase == "over":
        return "it ended before anything was merged; start another"
    return "it goes on and writes it at its end; `atoll pull RUN --to DIR` saves what is merged so far"


def _model_of(wanted: str, run: Path) -> str:
    """The built-in model with this fingerprint."""
    for name in MODELS:
        if fingerprint(specs_of(build_model(name, 0))) == wanted:
            return name
    raise RunError(f"the model of run {os.fspath(run)!r} is none of {', '.join(MODELS)}; {how_to_load(run)}")


def how_to_load(run: Path) -> str:
    """For a model that only its user can build: what to type, in ASCII whatever the path is called."""
    return f"load it into yours, in Python: atoll.load(model, {str(run / 'model' / 'model.safetensors')!a})"


def next_step(run: Path) -> str | None:
    """What to do with a run's model; None where it has none."""
    try:
        _model_of(str(_manifest(run).get("fingerprint")), run)
    except RunError:
        return how_to_load(run) if (run / "model" / "model.safetensors").exists() else None
    return f"held-out loss: atoll evaluate {run}"
