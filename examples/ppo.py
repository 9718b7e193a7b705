"""PPO on a pole to balance. The value loss rises while the policy improves, and the guard leaves that alone.

The program keeps its own clip between `guard.backward` and `guard.step`. One rollout has a reward of NaN, as from a
broken simulator; the updates on it are skipped, and training continues.

    python examples/ppo.py
"""

import torch
from torch import nn
from torch.nn import functional as F

from steadygrad import Guard

torch.manual_seed(0)
NUM_WORLDS, NUM_MOVES = 16, 32


class Pole:
    """Poles that fall over unless pushed back; each stands for at most 60 moves."""

    def __init__(self):
        self.state, self.age, self.lengths = 0.05 * torch.randn(NUM_WORLDS, 2), torch.zeros(NUM_WORLDS), []

    def push(self, action):
        angle, speed = self.state.unbind(1)
        speed = 1.05 * speed + 0.15 * angle + 0.2 * (2 * action - 1) + 0.02 * torch.randn(NUM_WORLDS)
        self.state = torch.stack([angle + 0.3 * speed, speed], 1)
        self.age += 1
        fell = (self.state[:, 0].abs() > 1) | (self.age >= 60)
        self.lengths += self.age[fell].tolist()
        self.state = torch.where(fell[:, None], 0.05 * torch.randn(NUM_WORLDS, 2), self.state)
        self.age = torch.where(fell, 0.0, self.age)
        return torch.ones(NUM_WORLDS), fell.float()


policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
model, world = nn.ModuleList([policy, critic]), Pole()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-5)


@torch.no_grad()
def play(broken):
    moves = []
    for _ in range(NUM_MOVES):
        state = world.state
        chances = torch.distributions.Categorical(logits=policy(state))
        action = chances.sample()
        reward, ended = world.push(action)
        moves.append((state, action, chances.log_prob(action), reward * (float("nan") if broken else 1.0), ended))
    states, actions, old, rewards, ends = (torch.stack(column) for column in zip(*moves))
    returns, following = torch.zeros_like(rewards), critic(world.state)[:, 0]
    for at in reversed(range(NUM_MOVES)):
        following = returns[at] = rewards[at] + 0.97 * following * (1 - ends[at])
    advantage = returns - critic(states)[..., 0]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    return [column.flatten(0, 1) for column in (states, actions, old, advantage, returns)]


with Guard(model, optimizer, run_dir="runs/ppo") as guard:
    for update in range(30):
        rollout = play(broken=update == 20)
        for rows in torch.randperm(NUM_WORLDS * NUM_MOVES).split(128):
            states, actions, old, advantage, returns = (column[rows] for column in rollout)
            chances = torch.distributions.Categorical(logits=policy(states))
            ratio = (chances.log_prob(actions) - old).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            value_loss = F.mse_loss(critic(states)[:, 0], returns)
            guard.backward(0.5 * value_loss - surrogate - 0.01 * chances.entropy().mean())
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            guard.step()

early, late = (sum(part) / len(part) for part in (world.lengths[:100], world.lengths[-100:]))
print(f"a pole stands for {early:.0f} moves at first, {late:.0f} at the end")
print(f"{guard.stats()['num_skipped']} updates skipped, {guard.stats()['num_rollbacks']} rollbacks")
