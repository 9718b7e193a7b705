"""Reinforcement learning as short programs write it: the loop computes the loss and hands it over.

Nothing can be replayed here, so nothing finite may be acted on. These are also trained with every default of a Guard,
its clipping included: gradient norms rise as the episodes grow longer, and none of them is an outlier.
"""

from __future__ import annotations

import random
from collections import deque

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import make_mlp
from healthy.scenario import Trial, scenario
from healthy.worlds import Balance, sample


@scenario
def actor_critic_program(trial: Trial) -> None:
    """One pole, one step an episode, a loss summed over it: episodes of 8 moves become episodes of 100."""
    torso, head, critic = make_mlp(4, 64), nn.Linear(64, 2), nn.Linear(64, 1)
    model, world = nn.ModuleList([torso, head, critic]), Balance(1, limit=100)
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)
    loop = trial.loop(model, optimizer)
    for _ in range(150):
        chosen, values, ended = [], [], torch.zeros(1, dtype=torch.bool)
        while not ended:
            hidden = torso(world.state).relu()
            action, chance, _ = sample(head(hidden))
            chosen.append(chance)
            values.append(critic(hidden)[:, 0])
            _, _, ended = world.step(action)
        returns = 0.99 ** torch.arange(len(chosen)).float()
        returns = returns.cumsum(0).flip(0)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        chance, value = torch.cat(chosen), torch.cat(values)
        policy_loss = -(chance * (returns - value.detach())).sum()
        optimizer.zero_grad()
        loop.step(policy_loss + F.smooth_l1_loss(value, returns, reduction="sum"))
    trial.effects["lengths"] = world.lengths
    trial.expect("episode length", sum(world.lengths[-40:]) / 40, above=2 * sum(world.lengths[:20]) / 20)


@scenario
def ppo_program(trial: Trial) -> None:
    """Rollouts, epochs, a rate that the program anneals, and a clip of its own between backward and step."""
    policy, critic = make_mlp(4, 32, 2), make_mlp(4, 32, 1)
    model, world = nn.ModuleList([policy, critic]), Balance(8)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3, eps=1e-5)
    loop = trial.loop(model, optimizer)
    for update in range(30):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - update / 30)
        rollout = _play_for_ppo(policy, critic, world)
        for chosen in [part for _ in range(4) for part in torch.randperm(256).split(64)]:
            states, actions, old, advantage, returns = (column[chosen] for column in rollout)
            now = policy(states).log_softmax(-1)
            ratio = (now.gather(1, actions[:, None])[:, 0] - old).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            entropy = -(now.exp() * now).sum(-1).mean()
            value_loss = F.mse_loss(critic(states)[:, 0], returns)
            optimizer.zero_grad()
            loop.backward(0.5 * value_loss - surrogate - 0.01 * entropy)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            loop.step()
    trial.effects["lengths"] = world.lengths
    trial.expect("episode length", sum(world.lengths[-50:]) / 50, above=1.5 * sum(world.lengths[:50]) / 50)


@torch.no_grad()
def _play_for_ppo(policy: nn.Module, critic: nn.Module, world: Balance) -> tuple[Tensor, ...]:
    """States, actions, logarithms of their chances, advantages and returns of 32 moves in each of 8 worlds."""
    moves = []
    for _ in range(32):
        state = world.state
        action, chance, _ = sample(policy(state))
        _, reward, ended = world.step(action)
        moves.append((state, action, chance, reward, ended.float(), critic(state)[:, 0]))
    states, actions, chances, rewards, ends, values = (torch.stack(column) for column in zip(*moves))
    returns, following = torch.zeros_like(rewards), critic(world.state)[:, 0]
    for at in reversed(range(32)):
        following = returns[at] = rewards[at] + 0.97 * following * (1 - ends[at])
    advantage = returns - values
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    return tuple(column.flatten(0, 1) for column in (states, actions, chances, advantage, returns))


@scenario
def dqn_program(trial: Trial) -> None:
    """A replay buffer and a target network that is overwritten through `.data`: the loss jumps each time."""
    model, target, world = make_mlp(4, 48, 2), make_mlp(4, 48, 2), Balance(4)
    target.load_state_dict(model.state_dict())
    trial.modules.append(target)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    loop, memory = trial.loop(model, optimizer), deque[tuple[Tensor, ...]](maxlen=3000)
    for number in range(900):
        state = world.state
        with torch.no_grad():
            greedy = model(state).argmax(1)
        explores = torch.rand(4) < max(0.05, 1 - number / 400)
        action = torch.where(explores, torch.randint(0, 2, (4,)), greedy)
        following, reward, ended = world.step(action)
        memory.extend(zip(state, action, reward, following, ended.float()))
        if number < 50:
            continue
        states, actions, rewards, nexts, ends = (torch.stack(c) for c in zip(*random.choices(memory, k=64)))
        with torch.no_grad():
            wanted = rewards + 0.95 * (1 - ends) * target(nexts).amax(1)
        optimizer.zero_grad()
        loop.step(F.mse_loss(model(states).gather(1, actions[:, None])[:, 0], wanted))
        if number % 50 == 0:
            for kept, new in zip(target.parameters(), model.parameters()):
                kept.data.copy_(new.data)
    trial.effects["lengths"] = world.lengths
    trial.expect("episode length", sum(world.lengths[-40:]) / 40, above=1.5 * sum(world.lengths[:40]) / 40)
