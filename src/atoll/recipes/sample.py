"""Text from a byte model."""

from __future__ import annotations

import torch

from atoll.errors import ConfigError
from atoll.recipes.model import ByteModel

START = b"\n"


def sample(
    model: ByteModel, prompt: str = "", *, length: int = 200, temperature: float = 0.8, seed: int = 0
) -> str:
    """The prompt and `length` more bytes, as text; bytes that are no UTF-8 become U+FFFD.

    Temperature 0 takes the likeliest byte. An empty prompt starts after a newline, which is not returned; of
    a long one the model sees the last `context` bytes.
    """
    if length < 0 or not 0 <= temperature < float("inf"):
        raise ConfigError(f"length={length} and temperature={temperature} must be finite and at least 0")
    given = prompt.encode(errors="replace")
    device = next(model.parameters()).device
    chance = torch.Generator().manual_seed(seed)
    values = list(given or START)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for _ in range(length):
            context = torch.tensor([values[-model.config.context :]], device=device)
            logits = model(context)[0, -1].float().cpu()
            values.append(_choose(logits, temperature, chance))
    model.train(was_training)
    return bytes(values[0 if given else len(START) :]).decode(errors="replace")


def _choose(logits_V: torch.Tensor, temperature: float, chance: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    # A tiny temperature would overflow logits / temperature; differences to the peak only underflow, to 0.
    share_V = ((logits_V - logits_V.max()) / temperature).softmax(0)
    return int(torch.multinomial(share_V, 1, generator=chance))
