"""Reinforcement learning whose objective moves by design: temperatures, entropy bonuses, curiosity, a new best arm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import make_mlp, seeded
from healthy.scenario import Trial, scenario
from healthy.worlds import sample


@scenario
def sac_temperature(trial: Trial) -> None:
    """Actor, critic and temperature, a guard for each. The temperature's loss crosses zero again and again."""
    actor, critic = make_mlp(2, 32, 2), make_mlp(3, 32, 1, activation=nn.ReLU)
    temperature = nn.ParameterList([nn.Parameter(torch.tensor(-3.0))])  # logarithm
    acting = trial.loop(actor, torch.optim.Adam(actor.parameters(), 3e-3))
    judging = trial.loop(critic, torch.optim.Adam(critic.parameters(), 2e-2))
    cooling = trial.loop(temperature, torch.optim.Adam(temperature.parameters(), 2e-2))

    def act(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = actor(x).chunk(2, 1)
        policy = torch.distributions.Normal(mean, spread.clamp(-4, 1).exp())
        action = policy.rsample()
        return action, policy.log_prob(action)

    def judge(x: Tensor) -> Tensor:
        with torch.no_grad():
            action, _ = act(x)
            reward = 10 - 2 * (action - x[:, :1] * x[:, 1:]).square() + torch.randn_like(action)
        return F.mse_loss(critic(torch.cat([x, action], 1)), reward)

    def improve(x: Tensor) -> Tensor:
        action, chance = act(x)
        return (temperature[0].exp().detach() * chance - critic(torch.cat([x, action], 1))).mean()

    for _ in range(400):
        x = torch.randn(64, 2)
        judging.step(judge, x)
        acting.step(improve, x)
        with torch.no_grad():
            surprise = (act(x)[1] + 0.5).mean()  # wanted: an entropy of 0.5
        cooling.step(-(temperature[0].exp() * surprise))
    trial.expect("actor's loss", acting.final, below=-7.0)
    trial.expect("lowest temperature loss", min(cooling.losses), below=0.0)
    trial.expect("highest temperature loss", max(cooling.losses), above=0.0)


@scenario
def policy_collapses_and_recovers(trial: Trial) -> None:
    """The policy settles on one arm; at step 300 another one pays, its loss leaps, and an entropy bonus gets it out."""
    model, rewards = make_mlp(3, 16, 5), []
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def play(x: Tensor, paying: int) -> Tensor:
        action, chance, entropy = sample(model(x))
        reward = (action == paying).float() * 10 + 0.1 * torch.randn(len(x))
        rewards.append(reward.mean().item())
        return -(chance * (reward - 5)).mean() - 0.5 * entropy.mean()

    loop = trial.loop(model, optimizer)
    for number in range(700):
        loop.step(play(torch.randn(32, 3), 0 if number < 300 else 3))
    trial.effects["rewards"] = rewards
    trial.expect("reward before", sum(rewards[250:300]) / 50, above=9.0)
    trial.expect("reward right after", sum(rewards[300:310]) / 10, below=1.0)
    trial.expect("reward at the end", sum(rewards[-50:]) / 50, above=9.0)


@scenario
def entropy_bonus_annealed(trial: Trial) -> None:
    """A bonus for entropy is taken away over 500 steps, so the loss rises all the way while the reward rises too."""
    model, rewards = make_mlp(4, 32, 16), []
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    worth = torch.randn(4, 16, generator=seeded(3)) * 0.3

    def loss(number: int) -> Tensor:
        x = torch.randn(64, 4)
        chances = model(x).softmax(1)
        reward = (chances * (x @ worth)).sum(1).mean()
        entropy = -(chances * chances.log()).sum(1).mean()
        rewards.append(reward.item())
        return -reward - 3 * max(0.0, 1 - number / 500) * entropy

    loop = trial.run(model, optimizer, 600, loss)
    trial.expect("rise of the loss", loop.final - loop.losses[0], above=5.0)
    trial.expect("reward", sum(rewards[-50:]) / 50, above=0.6)


@scenario
def curiosity_bonus(trial: Trial) -> None:
    """A world model is rewarded with new rooms: each one that opens throws its prediction error up a thousandfold."""
    model = make_mlp(6, 64, 4)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    laws = torch.randn(4, 6, 4, generator=seeded(4))  # (rooms, inputs, outputs)

    def loss(x: Tensor, room: Tensor) -> dict[str, Tensor]:
        wanted = torch.einsum("ni,nio->no", x, laws[room]).sin() + 10 * room[:, None]
        surprise = (model(x + 3 * F.one_hot(room, 6)) - wanted).square().mean(1)
        return {"loss": surprise.mean(), "bonus": surprise.detach().max()}

    loop = trial.loop(model, optimizer)
    for number in range(800):
        room = torch.randint(0, 1 + number // 200, (32,))
        loop.step(loss, torch.randn(32, 6) * 0.3, room)
    trial.expect("jump at the second room", max(loop.losses[200:220]), above=100 * loop.losses[199])
    trial.expect("last loss", loop.final, below=3.0)


@scenario
def sparse_reward_found_late(trial: Trial) -> None:
    """No reward, no gradient for 250 steps; then a lucky try, and gradients of hundreds from nothing."""
    model = make_mlp(3, 16, 6)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    rewards: list[float] = []

    def loss(number: int) -> Tensor:
        x = torch.randn(32, 3)
        action, chance, _ = sample(model(x))
        reward = 100 * (action == 4).float() * (number >= 250)
        rewards.append(reward.mean().item())
        return -(chance * (reward - reward.mean())).mean()

    trial.run(model, optimizer, 600, loss)
    trial.effects["rewards"] = rewards
    trial.expect("first rewards", sum(rewards[:250]), above=-1.0, below=1.0)
    trial.expect("reward", sum(rewards[-50:]) / 50, above=90.0)


@scenario
def reward_scale_raised(trial: Trial) -> None:
    """Rewards are counted in cents from step 250 on: the critic's loss leaps ten-thousandfold and is learnt again."""
    model = make_mlp(4, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def loss(x: Tensor, reward: Tensor) -> Tensor:
        return F.smooth_l1_loss(model(x), reward)

    loop = trial.loop(model, optimizer)
    for number in range(800):
        x = torch.randn(32, 4)
        reward = x.sum(1, keepdim=True).sigmoid() * (1 if number < 250 else 100)
        loop.step(loss, x, reward)
    trial.expect("jump", loop.losses[250], above=1000 * loop.losses[249])
    trial.expect("last loss", loop.final, below=2.0)
