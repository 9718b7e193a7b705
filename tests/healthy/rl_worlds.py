"""Reinforcement learning in worlds that remember: the step function acts in them, so it must run once a step."""

from __future__ import annotations

import random
from collections import deque

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

from healthy.parts import make_mlp
from healthy.scenario import Trial, scenario
from healthy.worlds import Balance, Corridor, sample


@scenario
def reinforce_in_a_world(trial: Trial) -> None:
    """The function plays in a corridor. At step 150 the other end pays: the surrogate jumps, and the policy turns."""
    model, world = make_mlp(6, 32, 2), Corridor(32)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    rewards: list[float] = []

    def play() -> Tensor:
        chosen, earned, entropies = [], [], []
        for _ in range(8):
            action, chance, entropy = sample(model(world.state))
            _, reward, _ = world.step(action)
            chosen.append(chance)
            earned.append(reward)
            entropies.append(entropy)
        reward = torch.stack(earned)  # (time, worlds)
        returns = reward.flip(0).cumsum(0).flip(0)
        rewards.append(reward.mean().item())
        surrogate = torch.stack(chosen) * (returns - returns.mean(1, keepdim=True))
        return -surrogate.mean() - 0.1 * torch.stack(entropies).mean()

    loop = trial.loop(model, optimizer)
    for number in range(350):
        if number == 150:
            world.turn()
        loop.step(play)
    trial.effects |= {"world": world.num_steps, "rewards": rewards}
    trial.expect("reward before the turn", max(rewards[100:150]), above=0.3)
    trial.expect("reward at the end", sum(rewards[-20:]) / 20, above=0.3)


@scenario
def ppo_epochs(trial: Trial) -> None:
    """Four epochs over each rollout. The surrogate starts at 0 in each, and the value loss grows with the returns."""
    policy, critic = make_mlp(4, 32, 2), make_mlp(4, 32, 1)
    model, world = nn.ModuleList([policy, critic]), Balance(16)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    @torch.no_grad()
    def collect() -> tuple[Tensor, ...]:
        steps = []
        for _ in range(32):
            state = world.state
            action, _, _ = sample(policy(state))
            _, reward, ended = world.step(action)
            steps.append((state, action, reward, ended.float(), critic(state)[:, 0]))
        states, actions, rewards, ends, values = (torch.stack(column) for column in zip(*steps))  # (time, worlds, ...)
        returns, following = torch.zeros_like(rewards), critic(world.state)[:, 0]
        for at in reversed(range(32)):
            following = returns[at] = rewards[at] + 0.97 * following * (1 - ends[at])
        old = Categorical(logits=policy(states)).log_prob(actions)
        advantage = returns - values
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        return tuple(column.flatten(0, 1) for column in (states, actions, old, advantage, returns))

    def loss(states: Tensor, actions: Tensor, old: Tensor, advantage: Tensor, returns: Tensor) -> tuple[Tensor, float]:
        now = Categorical(logits=policy(states))
        ratio = (now.log_prob(actions) - old).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        value_loss = (critic(states)[:, 0] - returns).square().mean()
        return 0.5 * value_loss - surrogate - 0.01 * now.entropy().mean(), value_loss.item()

    loop = trial.loop(model, optimizer)
    for _ in range(40):
        rollout = collect()
        for _ in range(4):
            for chosen in torch.randperm(512).split(128):
                loop.step(loss, *(column[chosen] for column in rollout))
    trial.effects |= {"world": world.num_steps, "lengths": world.lengths}
    trial.expect("episode length", sum(world.lengths[-50:]) / 50, above=1.5 * sum(world.lengths[:50]) / 50)


@scenario
def dqn_replay_buffer(trial: Trial) -> None:
    """The function acts, fills a replay buffer, draws from it and renews its target: nothing of that can be replayed.

    The loss is 0 until the paying room is found, and rises once more when the corridor turns.
    """
    model, target, world = make_mlp(6, 32, 2), make_mlp(6, 32, 2), Corridor(4)
    target.load_state_dict(model.state_dict())
    trial.modules.append(target)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    memory: deque[tuple[Tensor, ...]] = deque(maxlen=1000)
    calls = 0

    def learn(epsilon: float) -> Tensor:
        nonlocal calls
        calls += 1
        if calls % 40 == 0:
            target.load_state_dict(model.state_dict())
        state = world.state
        with torch.no_grad():
            greedy = model(state).argmax(1)
        action = torch.where(torch.rand(4) < epsilon, torch.randint(0, 2, (4,)), greedy)
        following, reward, ended = world.step(action)
        memory.extend(zip(state, action, reward, following, ended.float()))
        drawn = random.choices(memory, k=64)
        states, actions, rewards, nexts, ends = (torch.stack(column) for column in zip(*drawn))
        with torch.no_grad():
            wanted = 10 * rewards + 0.9 * (1 - ends) * target(nexts).amax(1)
        return F.smooth_l1_loss(model(states).gather(1, actions[:, None])[:, 0], wanted)

    loop = trial.loop(model, optimizer)
    for number in range(900):
        if number == 300:
            world.turn()
        loop.step(learn, 0.5)
    trial.effects |= {"calls": calls, "world": world.num_steps, "memory": len(memory)}
    trial.expect("rooms in which it goes left", (model(torch.eye(6)[1:5]).argmax(1) == 0).sum().item(), above=2)


@scenario
def actor_critic_episodes(trial: Trial) -> None:
    """One step an episode, on a loss summed over it: the longer it stays up, the larger the loss. `guard.step(loss)`.

    This is the actor-critic of pytorch/examples on a world of ours.
    """
    torso, head, critic = make_mlp(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)
    model, world = nn.ModuleList([torso, head, critic]), Balance(8, limit=40)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def play() -> Tensor:
        chosen, values, earned, alive = [], [], [], torch.ones(8)
        world.state, world.age = 0.05 * torch.randn(8, 4), torch.zeros(8)
        while alive.any():
            hidden = torso(world.state).relu()
            action, chance, _ = sample(head(hidden))
            _, reward, ended = world.step(action)
            chosen.append(chance * alive)
            values.append(critic(hidden)[:, 0] * alive)
            earned.append(reward * alive)
            alive = alive * ~ended
        value, reward = torch.stack(values), torch.stack(earned)  # (time, worlds)
        returns = reward.flip(0).cumsum(0).flip(0)
        advantage = (returns - value).detach() / 10
        policy_loss = -(torch.stack(chosen) * advantage).sum(0).mean()
        return policy_loss + F.smooth_l1_loss(value, returns, reduction="none").sum(0).mean()

    loop = trial.loop(model, optimizer)
    for _ in range(120):
        loop.step(play())
    trial.effects |= {"world": world.num_steps, "lengths": world.lengths}
    trial.expect("episode length", sum(world.lengths[-80:]) / 80, above=1.3 * sum(world.lengths[:80]) / 80)
