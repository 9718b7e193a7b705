"""Steps with loops inside: solvers, inner trainings, gradients that the program makes itself."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from healthy.parts import Clusters, make_mlp, measure_accuracy, miss_sines, miss_sum, seeded
from healthy.scenario import Trial, scenario


@scenario
def deep_equilibrium(trial: Trial) -> None:
    """A fixed point found without gradients, then one step with them: the solver takes longer as the model learns."""
    inner, inject, head = parametrizations.spectral_norm(nn.Linear(24, 24)), nn.Linear(8, 24), nn.Linear(24, 1)
    model = nn.ModuleList([inner, inject, head])
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    rounds: list[int] = []

    def loss(x: Tensor) -> Tensor:
        given, z = inject(x), torch.zeros(len(x), 24)
        with torch.no_grad():
            rounds.append(0)
            while rounds[-1] < 60:
                z, before = (0.95 * inner(z) + given).tanh(), z
                rounds[-1] += 1
                if (z - before).norm() < 1e-3 * z.norm():
                    break
        z = (0.95 * inner(z) + given).tanh()
        return (head(z) - x.sin().sum(1, keepdim=True)).square().mean()

    loop = trial.loop(model, optimizer)
    for _ in range(500):
        loop.step(loss, torch.randn(64, 8))
    trial.effects["rounds"] = rounds
    trial.expect("last loss", loop.final, below=0.3)


@scenario
def ode_with_finer_steps(trial: Trial) -> None:
    """A trajectory of Runge-Kutta steps, at first coarse and short, from step 120 finer and three times as long."""
    field, turn = make_mlp(2, 48, 2), torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    optimizer = torch.optim.Adam(field.parameters(), 5e-3)

    def advance(f: nn.Module, x: Tensor, h: float) -> Tensor:
        k1 = f(x)
        k2 = f(x + h / 2 * k1)
        k3 = f(x + h / 2 * k2)
        return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(x + h * k3))

    def loss(x: Tensor, num: int, h: float) -> Tensor:
        y, total = x, torch.zeros(())
        for _ in range(num):
            x, y = advance(field, x, h), y @ torch.linalg.matrix_exp(h * turn).T
            total = total + (x - y).square().sum(1).mean()
        return total

    loop = trial.loop(field, optimizer)
    for number in range(240):
        loop.step(loss, torch.randn(32, 2), *((2, 0.2) if number < 120 else (8, 0.15)))
    trial.expect("jump", loop.losses[120], above=3 * loop.losses[119])
    trial.expect("last loss", loop.final, below=0.5 * loop.losses[120])


@scenario
def gradients_projected_by_hand(trial: Trial) -> None:
    """Gradient surgery: of two tasks' gradients the conflicting part is taken out, and no loss is handed over."""
    model = make_mlp(8, 48, 2)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    parameters = list(model.parameters())

    def slopes(error: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(error, parameters, retain_graph=True))

    loop, errors = trial.loop(model, optimizer), []
    for _ in range(500):
        x = torch.randn(64, 8)
        out = model(x)
        first, second = F.mse_loss(out[:, 0], x.sum(1)), 10 * F.mse_loss(out[:, 1], x.sin().sum(1))
        one, other = slopes(first), slopes(second)
        along = sum((a * b).sum() for a, b in zip(one, other))
        size = sum(b.square().sum() for b in other)
        for parameter, a, b in zip(parameters, one, other):
            parameter.grad = a + b - (min(along, torch.zeros(())) / size) * b
        loop.step()
        errors.append(first.item() + second.item())
    trial.expect("last error", sum(errors[-20:]) / 20, below=0.2 * errors[0])


@scenario
def reptile(trial: Trial) -> None:
    """Ten steps of a copy on one task, then the way that it went is the gradient: no backward of the model at all."""
    model = make_mlp(1, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def adapt(phase: Tensor) -> tuple[nn.Module, float]:
        student = copy.deepcopy(model)
        quick = torch.optim.SGD(student.parameters(), 0.05)
        for _ in range(10):
            x = 4 * torch.rand(20, 1) - 2
            error = F.mse_loss(student(x), (x + phase).sin())
            quick.zero_grad()
            error.backward()
            quick.step()
        return student, error.item()

    loop, errors = trial.loop(model, optimizer), []
    for _ in range(150):
        student, error = adapt(torch.rand(1) * 2)
        for parameter, learnt in zip(model.parameters(), student.parameters()):
            parameter.grad = (parameter - learnt).detach()
        loop.step()
        errors.append(error)
    trial.expect("error after ten steps", sum(errors[-30:]) / 30, below=0.6 * sum(errors[:10]) / 10)


@scenario
def evolution_strategy(trial: Trial) -> None:
    """Gradients from 32 random directions and a reward that is not differentiable: mostly noise, and it learns."""
    model, task = make_mlp(6, 8, 3), Clusters(3, 6, spread=2.0, noise=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    parameters = list(model.parameters())

    def play(x: Tensor, y: Tensor) -> float:
        return float((model(x).argmax(1) == y).double().mean())

    loop = trial.loop(model, optimizer)
    for _ in range(120):
        batch = task.draw(64)
        with torch.no_grad():
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            for _ in range(16):
                noises = [0.1 * torch.randn_like(parameter) for parameter in parameters]
                rewards = []
                for sign in (1, -2):
                    for parameter, noise in zip(parameters, noises):
                        parameter.add_(sign * noise)
                    rewards.append(play(*batch))
                for parameter, noise in zip(parameters, noises):
                    parameter.add_(noise)
                    parameter.grad -= (rewards[0] - rewards[1]) * noise
        loop.step()
    trial.expect("accuracy", measure_accuracy(model, task.draw(512)), above=0.5)


@scenario
def gradients_normalised_by_hand(trial: Trial) -> None:
    """A cellular automaton with a pool: gradients are divided by their norms, and fresh seeds cost far more."""
    rule = make_mlp(12, 48, 4, activation=nn.ReLU)
    nn.init.zeros_(rule[-1].weight)
    optimizer = torch.optim.Adam(rule.parameters(), 2e-3)
    target = torch.rand(16, generator=seeded(2))
    seed = torch.zeros(16, 4)
    seed[8] = 1.0
    pool = seed.repeat(64, 1, 1)  # (pool, cells, channels)

    def grow(state: Tensor) -> Tensor:
        for _ in range(12):
            seen = torch.cat([state, state.roll(1, 1), state.roll(-1, 1)], 2)
            state = state + rule(seen) * (torch.rand(len(state), 16, 1) < 0.5)
        return state

    loop, errors = trial.loop(rule, optimizer), []
    for number in range(300):
        at = torch.randperm(64)[:8]
        if number % 8 == 0:
            pool[at] = seed
        optimizer.zero_grad()
        state = grow(pool[at])
        error = F.mse_loss(state[:, :, 0], target.expand(8, 16))
        error.backward()
        for parameter in rule.parameters():
            parameter.grad.div_(parameter.grad.norm() + 1e-8)
        loop.step()
        pool[at] = state.detach()
        errors.append(error.item())
    trial.effects["pool"] = pool.sum().item()
    trial.expect("last error", sum(errors[-20:]) / 20, below=0.3 * errors[0])


@scenario
def lottery_tickets(trial: Trial) -> None:
    """Three rounds of torch's own pruning: the smallest half is masked, the rest goes back to where it began."""
    model = make_mlp(8, 64, 1)
    begun = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(x: Tensor) -> Tensor:
        return miss_sum(model, x)

    loop, jumps = trial.loop(model, optimizer), []
    for number in range(900):
        loop.step(loss, torch.randn(64, 8))
        if number in (250, 500):
            for layer, name in ((model[0], "0"), (model[2], "2")):
                prune.l1_unstructured(layer, "weight", amount=0.3)
                with torch.no_grad():
                    layer.weight_orig.copy_(begun[f"{name}.weight"])
                    layer.bias.copy_(begun[f"{name}.bias"])
            jumps.append(number + 1)
    for jump in jumps:
        trial.expect("jump", loop.losses[jump], above=20 * loop.losses[jump - 1])
    trial.expect("last loss", loop.final, below=0.1)


@scenario
def pruned_by_hand(trial: Trial) -> None:
    """Three rounds of pruning down to a quarter, the masks multiplied into the weights after each step."""
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    weights = [p for p in model.parameters() if p.dim() > 1]
    kept, masks = {100: 0.9, 200: 0.5, 300: 0.25}, [torch.ones_like(p) for p in weights]

    def loss(x: Tensor) -> Tensor:
        return (model(x).squeeze(1) - x.sin().sum(1)).square().mean()

    loop = trial.loop(model, optimizer)
    for number in range(600):
        if number in kept:
            masks = [p.abs() > p.abs().quantile(1 - kept[number]) for p in weights]
        loop.step(loss, torch.randn(16, 4))
        with torch.no_grad():
            for p, mask in zip(weights, masks):
                p.mul_(mask)
    trial.expect("last loss", loop.final, below=0.7 * loop.losses[0])


@scenario
def optimizer_exchanged(trial: Trial) -> None:
    """Adam for 300 steps, then SGD with momentum by a loop of its own: another norm of steps, and a bump between."""
    model = make_mlp(8, 64, 1)

    def loss(x: Tensor) -> Tensor:
        return miss_sines(model, x)

    first = trial.loop(model, torch.optim.Adam(model.parameters(), 5e-3))
    for _ in range(300):
        first.step(loss, torch.randn(64, 8))
    second = trial.loop(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True))
    for _ in range(300):
        second.step(loss, torch.randn(64, 8))
    trial.expect("last loss", second.final, below=0.1)


@scenario
def range_test_then_training(trial: Trial) -> None:
    """A learning rate that grows a hundred-thousandfold until the loss explodes; then the first weights come back."""
    model = make_mlp(8, 64, 1)
    begun = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def loss(x: Tensor) -> Tensor:
        return miss_sum(model, x)

    loop = trial.loop(model, optimizer)
    for _ in range(120):
        loop.step(loss, torch.randn(64, 8))
        if loop.losses[-1] > 10 * loop.losses[0]:
            break
        optimizer.param_groups[0]["lr"] *= 1.12
    model.load_state_dict(begun)
    optimizer.param_groups[0]["lr"] = 0.05
    for _ in range(400):
        loop.step(loss, torch.randn(64, 8))
    trial.expect("largest loss", max(loop.losses), above=10 * loop.losses[0])
    trial.expect("last loss", loop.final, below=0.1)


@scenario
def stochastic_depth(trial: Trial) -> None:
    """Each block is left out of half of all steps: its gradients are None then, and come back."""
    blocks, out = nn.ModuleList(make_mlp(8, 32, 8) for _ in range(6)), nn.Linear(8, 1)
    model = nn.ModuleList([blocks, out])
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)

    def loss(x: Tensor) -> Tensor:
        hidden = x
        for block in blocks:
            if torch.rand(()) < 0.5:
                hidden = hidden + block(hidden)
        return (out(hidden) - x.sin().sum(1, keepdim=True)).square().mean()

    loop = trial.loop(model, optimizer)
    for _ in range(500):
        loop.step(loss, torch.randn(64, 8))
    trial.expect("last loss", loop.final, below=0.5 * loop.losses[0])


@scenario
def weight_norm_at_large_gains(trial: Trial) -> None:
    """Weight norm with gains of ten: directions hardly turn, gains fall, and gradients shrink a hundredfold."""
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 64)), nn.Tanh(), parametrizations.weight_norm(nn.Linear(64, 1))
    )
    for layer in (model[0], model[2]):
        with torch.no_grad():
            layer.parametrizations.weight.original0.mul_(10)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loop = trial.run(model, optimizer, 700, lambda _: miss_sum(model, torch.randn(64, 8)))
    trial.expect("last loss", loop.final, below=0.2 * loop.losses[0])
