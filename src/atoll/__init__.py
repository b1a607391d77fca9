"""Atoll: one model trained on islands of compute. `import atoll; learner = atoll.join(model, optimizer)`.

Names are resolved on first use, so that processes which need no torch (the agent, the simulator) never import it.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "join", "load"]


def __getattr__(name: str) -> Any:
    if name == "join":
        from atoll.train.learner import join

        return join
    if name == "load":
        from atoll.train.load import load

        return load
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
