"""The smallest script that joins a run. Its four lines for Atoll are marked; without them it is plain PyTorch.

    terminal 1    atoll syncer --run runs/first --steps 2000
    terminal 2    python examples/minimal.py
    terminal 3    python examples/minimal.py          (as many as you like, at any time)
"""

import pydoc_data.topics
from pathlib import Path

import torch
from torch import nn

import atoll  # 1

text = torch.tensor(list(Path(pydoc_data.topics.__file__).read_bytes()))
model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * 16, 256), nn.GELU(), nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.set_num_threads(1)

learner = atoll.join(model, optimizer)  # 2: from here on the model holds the run's parameters

while True:
    starts = torch.randint(len(text) - 17, (256,)).tolist()
    windows = torch.stack([text[i : i + 17] for i in starts])
    loss = nn.functional.cross_entropy(model(windows[:, :16]), windows[:, 16])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if learner.steps % 200 == 0:
        print(f"{learner.name}: {learner.progress:4.0%} of the run, loss {loss.item():.3f}")
    if not learner.step(tokens=256, loss=loss):  # 3: publishes, takes what arrived, never waits
        break  # 4: the run is over, the model holds its final parameters

print(f"{learner.name}: the run is over, loss {loss.item():.3f}")
