"""Reinforcement learning: targets that the policy itself moves, so that a rising loss may be the best of news."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import make_mlp, seeded
from healthy.scenario import Trial, scenario
from healthy.worlds import sample


@scenario
def ppo_value_growth(trial: Trial) -> None:
    """Actor and critic learn to balance. Returns grow as the policy improves, and the value loss grows with them."""
    model, lengths = make_mlp(4, 32, 3), []
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(number: int) -> Tensor:
        x, alive = torch.randn(32, 4) * 0.05, torch.ones(32)
        chosen, values, rewards = [], [], []
        for _ in range(30):
            out = model(x)
            action, chance, _ = sample(out[:, :2])
            chosen.append(chance)
            values.append(out[:, 2])
            rewards.append(alive.clone())
            push = (action * 2 - 1).float() * 0.2
            speed = x[:, 1] * 1.05 + 0.15 * x[:, 0] + push
            wind = x[:, 2] * 0.9 + 0.1 * torch.randn(32)
            x = torch.stack([x[:, 0] + 0.3 * x[:, 1], speed, wind, x[:, 3]], 1).detach()
            alive = alive * (x[:, 0].abs() < 1)
        reward, value = torch.stack(rewards), torch.stack(values)  # (time, episodes)
        returns = reward.flip(0).cumsum(0).flip(0)
        advantage = (returns - value.detach()) * reward
        lengths.append(reward.sum(0).mean().item())
        policy_loss = -(torch.stack(chosen) * (advantage / (advantage.std() + 1e-6)) * reward).mean()
        return policy_loss + 0.5 * ((value - returns).square() * reward).mean()

    trial.run(model, optimizer, 300, loss)
    trial.effects["lengths"] = lengths
    trial.expect("episode length", sum(lengths[-20:]) / 20, above=1.3 * sum(lengths[:20]) / 20)


@scenario
def dqn_sparse_reward(trial: Trial) -> None:
    """The loss is almost 0 until the first reward is seen at step 120, then it is there for good."""
    model, target = make_mlp(4, 64, 3, activation=nn.ReLU), make_mlp(4, 64, 3, activation=nn.ReLU)
    target.load_state_dict(model.state_dict())
    nn.init.zeros_(model[-1].bias)
    trial.modules.append(target)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(number: int) -> Tensor:
        if number % 25 == 0:
            target.load_state_dict(model.state_dict())
        x, action = torch.randn(64, 4), torch.randint(0, 3, (64,))
        reward = ((x[:, 0] > 1.2) & (action == 1)).float() * (number > 120)
        with torch.no_grad():
            wanted = reward + 0.95 * target(x.roll(1, 1)).max(1).values
        return F.mse_loss(model(x).gather(1, action[:, None])[:, 0], wanted)

    loop = trial.run(model, optimizer, 800, loss)
    trial.expect("last loss", loop.final, below=0.2)


@scenario
def ppo_small_head(trial: Trial) -> None:
    """An orthogonal start, a policy head of gain 0.01: a noisy loss around zero that says nothing of progress."""
    model, rewards = make_mlp(4, 32, 32, 4), []
    for layer in model[::2]:
        nn.init.orthogonal_(layer.weight, 0.5)
    nn.init.orthogonal_(model[-1].weight, 0.01)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    worth = torch.randn(4, 4, generator=seeded(7))

    def loss(number: int) -> Tensor:
        x = torch.randn(16, 4)
        action, chance, _ = sample(model(x))
        reward = (x @ worth).gather(1, action[:, None])[:, 0] + 2 * torch.randn(16)
        rewards.append(reward.mean().item())
        return -(chance * (reward - reward.mean())).mean()

    trial.run(model, optimizer, 400, loss)
    trial.effects["rewards"] = rewards
    trial.expect("reward", sum(rewards[-100:]) / 100, above=1.0)


@scenario
def a2c_returns_grow(trial: Trial) -> None:
    """A critic follows returns that grow thirtyfold: its loss grows all the way, a constant step behind them."""
    model = make_mlp(2, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(number: int) -> Tensor:
        x = torch.randn(64, 2)
        return (model(x) - (1 + number / 20) * (1 + 0.3 * x[:, :1])).square().mean()

    loop = trial.run(model, optimizer, 600, loss)
    trial.expect("last loss", loop.final, above=10 * loop.losses[0], below=0.3 * 31**2)


@scenario
def td_target_sawtooth(trial: Trial) -> None:
    """Each copy of the target network throws the loss up a hundredfold, because the values climb by one more step.

    The loss is a sawtooth for the whole run; the values it learns approach the true ones at its end.
    """
    model, target = make_mlp(4, 64, 1), make_mlp(4, 64, 1)
    target.load_state_dict(model.state_dict())
    trial.modules.append(target)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = 1 + 0.1 * x[:, :1] + 0.9 * target(x)
        return F.mse_loss(model(x), wanted)

    loop = trial.loop(model, optimizer)
    for number in range(900):
        if number % 60 == 0:
            target.load_state_dict(model.state_dict())
        loop.step(loss, torch.randn(64, 4))
    trial.expect("value", model(torch.zeros(1, 4)).item(), above=6.5, below=10.5)
    trial.expect("tooth", loop.losses[360], above=20 * loop.losses[359])


@scenario
def q_ensemble_min_target(trial: Trial) -> None:
    """Five critics learn the smallest target of them all: the loss moves with their values and their spread."""
    critics = nn.ModuleList(make_mlp(3, 32, 1, activation=nn.ReLU) for _ in range(5))
    targets = nn.ModuleList(make_mlp(3, 32, 1, activation=nn.ReLU) for _ in range(5))
    targets.load_state_dict(critics.state_dict())
    trial.modules.append(targets)
    optimizer = torch.optim.Adam(critics.parameters(), 2e-3)

    def follow() -> None:
        with torch.no_grad():
            for slow, fast in zip(targets.parameters(), critics.parameters()):
                slow.lerp_(fast, 0.05)

    def loss(number: int) -> Tensor:
        x = torch.randn(32, 3)
        with torch.no_grad():
            best = torch.stack([critic(x.tanh()) for critic in targets]).amin(0)
            wanted = 5 * (x[:, :1] > 0).float() + 0.9 * best
        return sum((F.mse_loss(critic(x), wanted) for critic in critics), torch.zeros(()))

    loop = trial.loop(critics, optimizer)
    for number in range(400):
        loop.step(loss, number)
        follow()
    trial.expect("value", critics[0](torch.ones(1, 3)).item(), above=8.0, below=60.0)
