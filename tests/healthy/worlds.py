"""Small worlds for reinforcement learning. They live outside the step function: a step more changes them."""

from __future__ import annotations

import torch
from torch import Tensor


def sample(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An action from each row, the logarithm of its chance, and the entropy; a fifth of Categorical's time."""
    chances = logits.log_softmax(-1)
    action = torch.multinomial(chances.detach().exp(), 1)
    entropy = -(chances.exp() * chances).sum(-1)
    return action[:, 0], chances.gather(1, action)[:, 0], entropy


class Balance:
    """Poles in a wind, each pushed left or right; one that falls, or stood for `limit` steps, is set up again."""

    def __init__(self, count: int, *, limit: int = 60) -> None:
        self.count, self.limit, self.num_steps = count, limit, 0
        self.state = 0.05 * torch.randn(count, 4)
        self.age = torch.zeros(count)
        self.lengths: list[float] = []
        """Of the episodes that ended."""

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Push: the new state, the reward of each pole and whether it ended."""
        self.num_steps += 1
        x, speed, wind, _ = self.state.unbind(1)
        push = 0.2 * (2 * action.float() - 1)
        wind = 0.9 * wind + 0.02 * torch.randn(self.count)
        self.state = torch.stack([x + 0.3 * speed, 1.05 * speed + 0.15 * x + push + wind, wind, x * speed], 1)
        self.age = self.age + 1
        ended = (self.state[:, 0].abs() > 1) | (self.age >= self.limit)
        self.lengths += self.age[ended].tolist()
        fresh = 0.05 * torch.randn(self.count, 4)
        self.state = torch.where(ended[:, None], fresh, self.state)
        self.age = self.age * ~ended
        return self.state, torch.ones(self.count), ended


class Corridor:
    """A row of rooms; one end pays. `turn()` moves the pay to the other end: whatever was learnt is wrong."""

    def __init__(self, count: int, *, length: int = 6) -> None:
        self.count, self.length, self.num_steps, self.paying = count, length, 0, length - 1
        self.room = torch.full((count,), length // 2)

    @property
    def state(self) -> Tensor:
        """The rooms as one-hot rows."""
        return torch.nn.functional.one_hot(self.room, self.length).float()  # (count, length)

    def turn(self) -> None:
        """Let the other end pay from now on."""
        self.paying = self.length - 1 - self.paying

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Go left (0) or right (1): the new state, the reward, and whether an end was reached."""
        self.num_steps += 1
        self.room = (self.room + 2 * action - 1).clamp(0, self.length - 1)
        reward = (self.room == self.paying).float()
        ended = (self.room == 0) | (self.room == self.length - 1)
        state = self.state
        self.room = torch.where(ended, torch.full_like(self.room, self.length // 2), self.room)
        return state, reward, ended
