"""Training sets, opponents and weights of losses that follow what the model has learnt so far."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import Clusters, make_mlp, measure_accuracy, seeded
from healthy.scenario import Trial, scenario
from healthy.self_supervised import follow


@scenario
def dino_centred(trial: Trial) -> None:
    """A teacher that follows, a centre that follows both, and temperatures that fall: the loss rises, then stands."""
    student = make_mlp(16, 64, 24)
    teacher, centre = copy.deepcopy(student).requires_grad_(False), torch.zeros(24)
    trial.modules.append(teacher)
    task, optimizer = Clusters(12, 16, spread=1.5, noise=0.3), torch.optim.AdamW(student.parameters(), 2e-3)

    def loss(one: Tensor, other: Tensor, sharp: float) -> Tensor:
        target = ((teacher(other) - centre) / sharp).softmax(1)
        return -(target * (student(one) / 0.1).log_softmax(1)).sum(1).mean()

    loop = trial.loop(student, optimizer)
    for number in range(500):
        x = task.draw(64)[0]
        one, other = x + 0.2 * torch.randn_like(x), x + 0.2 * torch.randn_like(x)
        loop.step(loss, one, other, max(0.04, 0.5 - number / 500))
        with torch.no_grad():
            centre.lerp_(teacher(other).mean(0), 0.1)
        follow(teacher, student, 0.01 + 0.04 * (1 - number / 500))
    said = teacher(task.centres).argmax(1)
    trial.expect("different answers for 12 clusters", len(set(said.tolist())), above=3)


@scenario
def hardest_negatives(trial: Trial) -> None:
    """Triplets are drawn at random until the loss is near 0, then the hardest of each batch: it leaps to the margin."""
    model, task = make_mlp(16, 64, 16), Clusters(10, 16, noise=1.0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(x: Tensor, y: Tensor, hard: bool) -> Tensor:
        apart = torch.cdist(F.normalize(model(x)), F.normalize(model(x)))
        same = y[:, None] == y
        if hard:
            near = apart.masked_fill(same, math.inf).min(1).values
            far = apart.masked_fill(~same, -1.0).max(1).values
        else:
            near = (apart * ~same).sum(1) / (~same).sum(1)
            far = (apart * same).sum(1) / same.sum(1)
        return F.relu(far - near + 0.3).mean()

    loop = trial.loop(model, optimizer)
    for number in range(600):
        loop.step(loss, *task.draw(64), number >= 200)
    trial.expect("jump", loop.losses[200], above=5 * max(loop.losses[199], 0.01))
    trial.expect("last loss", loop.final, below=0.9 * loop.losses[200])


@scenario
def active_learning(trial: Trial) -> None:
    """Each round adds the samples that the model is least sure of, and corrects labels: six leaps of the loss."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8, spread=1.2, noise=0.7)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    x, y = task.draw(1200)
    given = torch.where(torch.rand(1200) < 0.2, torch.randint(0, 4, (1200,)), y)
    known = torch.arange(40)

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), labels)

    loop = trial.loop(model, optimizer)
    for number in range(700):
        if number and number % 100 == 0:
            given[known] = y[known]
            with torch.no_grad():
                sure = model(x).softmax(1).max(1).values
            sure[known] = 2.0
            known = torch.cat([known, sure.argsort()[:80]])
        at = known[torch.randint(0, len(known), (32,))]
        loop.step(loss, x[at], given[at])
    trial.expect("accuracy", measure_accuracy(model, task.draw(512)), above=0.8)


@scenario
def self_play(trial: Trial) -> None:
    """A policy against its own past, exchanged every 50 steps: the reward starts at nought again and again."""
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
    rival = copy.deepcopy(policy).requires_grad_(False)
    trial.modules.append(rival)
    optimizer = torch.optim.Adam(policy.parameters(), 5e-3)
    worth = torch.randn(4, 3, generator=seeded(6))  # what each answer is worth in each situation

    def loss(x: Tensor) -> Tensor:
        mine = torch.distributions.Categorical(logits=policy(x))
        answer, other = mine.sample(), torch.distributions.Categorical(logits=rival(x)).sample()
        worths = x @ worth
        won = (worths.gather(1, answer[:, None]) - worths.gather(1, other[:, None])).sign()[:, 0]
        return -(mine.log_prob(answer) * won).mean() - 0.01 * mine.entropy().mean()

    loop = trial.loop(policy, optimizer)
    for number in range(500):
        if number % 50 == 0:
            rival.load_state_dict(policy.state_dict())
        loop.step(loss, torch.randn(64, 4))
    x = torch.randn(512, 4)
    best = float((policy(x).argmax(1) == (x @ worth).argmax(1)).double().mean())
    trial.expect("share of best answers", best, above=0.7)


@scenario
def losses_weighted_by_uncertainty(trial: Trial) -> None:
    """Three tasks with learnt variances: the sum falls below zero without an end, by logarithms alone."""
    model, spread = make_mlp(8, 48, 3), nn.Parameter(torch.zeros(3))
    both = nn.ModuleList([model, nn.ParameterList([spread])])
    optimizer = torch.optim.Adam(both.parameters(), 5e-3)
    sizes = torch.tensor([0.01, 0.3, 3.0])

    def loss(x: Tensor) -> Tensor:
        wanted = sizes * torch.stack([x.sum(1), x[:, 0], x.sin().sum(1)], 1)
        return (0.5 * (-spread).exp() * (model(x) - wanted).square().mean(0) + 0.5 * spread).sum()

    loop = trial.loop(both, optimizer)
    for _ in range(800):
        loop.step(loss, torch.randn(64, 8))
    trial.expect("first loss", loop.losses[0], above=10)
    trial.expect("last loss", loop.final, below=0.0)


@scenario
def weights_of_points_that_climb(trial: Trial) -> None:
    """A self-adaptive physics loss: a second optimizer raises the weights of what is missed most, so the sum rises."""
    model, weights = make_mlp(1, 32, 32, 1), nn.Parameter(torch.ones(64))
    both = nn.ModuleList([model, nn.ParameterList([weights])])
    optimizers = [
        torch.optim.Adam(model.parameters(), 2e-3),
        torch.optim.Adam([weights], 5e-2, maximize=True),
    ]
    x = torch.linspace(0, 2, 64)[:, None]

    def loss(number: int) -> Tensor:
        points = x.clone().requires_grad_(True)
        u = model(points)
        (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        missed = (slope + 3 * u - 3 * points.detach().cos()).square()[:, 0]
        return (weights * missed).mean() + 10 * (model(torch.zeros(1, 1)) - 1).square().mean()

    trial.run(both, optimizers, 600, loss)
    trial.expect("heaviest weight", weights.max().item(), above=3.0)
    with torch.no_grad():
        exact = (-3 * x).exp() * 0.1 + 0.9 * x.cos() + 0.3 * x.sin()
        trial.expect("error", (model(x) - exact).abs().mean().item(), below=0.1)


@scenario
def points_where_the_error_is(trial: Trial) -> None:
    """A physics loss whose points are drawn anew where the residual is largest: each time it leaps a hundredfold."""
    model = make_mlp(1, 48, 48, 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def residual(points: Tensor) -> Tensor:
        points = points.clone().requires_grad_(True)
        u = model(points)
        (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        return slope - 4 * (4 * points.detach()).cos()

    def loss(points: Tensor) -> Tensor:
        return residual(points).square().mean() + model(torch.zeros(1, 1)).square().mean()

    loop, points = trial.loop(model, optimizer), 0.3 * torch.rand(48, 1)
    for number in range(800):
        if number and number % 150 == 0:
            many = 2 * torch.rand(1024, 1)
            points = many[residual(many).detach().abs()[:, 0].argsort(descending=True)[:48]]
        loop.step(loss, points)
    trial.expect("jump", loop.losses[150], above=20 * loop.losses[149])
    trial.expect("last loss", loop.final, below=loop.losses[150])


@scenario
def adaptive_kl(trial: Trial) -> None:
    """A policy is held to its reference by a price that doubles and halves: reward and loss swing with the price."""
    policy = make_mlp(4, 32, 6)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    liked = torch.randn(4, 6, generator=seeded(7))
    price = 0.01

    def loss(x: Tensor, price: float) -> tuple[Tensor, Tensor]:
        now, then = policy(x).log_softmax(1), reference(x).log_softmax(1)
        apart = (now.exp() * (now - then)).sum(1).mean()
        return price * apart - (now.exp() * (x @ liked)).sum(1).mean(), apart.detach()

    loop, prices = trial.loop(policy, optimizer), []
    for _ in range(600):
        _, apart = loop.step(loss, torch.randn(64, 4), price)
        price = min(8.0, price * 1.05) if apart > 0.3 else max(0.01, price / 1.05)
        prices.append(price)
    trial.effects["prices"] = prices
    trial.expect("largest price", max(prices), above=1.0)


@scenario
def co_teaching(trial: Trial) -> None:
    """Two networks choose each other's samples, fewer and fewer of them: the loss of what is chosen falls and leaps."""
    models = [make_mlp(8, 48, 4, activation=nn.ReLU) for _ in range(2)]
    task = Clusters(4, 8, spread=1.5, noise=0.6)
    loops = [trial.loop(model, torch.optim.Adam(model.parameters(), 2e-3)) for model in models]

    def learn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    for number in range(500):
        x, y = task.draw(96)
        y = torch.where(torch.rand(96) < 0.4, torch.randint(0, 4, (96,)), y)
        kept = 96 - int(36 * min(1.0, number / 200))
        with torch.no_grad():
            chosen = [F.cross_entropy(m(x), y, reduction="none").argsort()[:kept] for m in models]
        for model, loop, at in zip(models, loops, reversed(chosen)):
            loop.step(learn, model, x[at], y[at])
    trial.expect("accuracy", measure_accuracy(models[0], task.draw(512)), above=0.85)


@scenario
def nothing_to_predict(trial: Trial) -> None:
    """Masked prediction where half of all batches have no mask at all: a loss and gradients of exactly 0."""
    model, out = nn.Embedding(20, 16), nn.Linear(64, 20)
    both = nn.ModuleList([model, out])
    optimizer = torch.optim.Adam(both.parameters(), 3e-3)

    def loss(x: Tensor, masked: Tensor) -> Tensor:
        seen = x.masked_fill(masked, 0)
        logits = out(model(seen).flatten(1))
        errors = F.cross_entropy(logits, x[:, 0], reduction="none") * masked[:, 0]
        return errors.sum() / masked[:, 0].sum().clamp(min=1)

    loop = trial.loop(both, optimizer)
    for _ in range(600):
        first = torch.randint(1, 20, (16, 1))
        x = torch.cat([first, (first * 3 + 1) % 20, first, first], 1)
        masked = torch.zeros(16, 4, dtype=torch.bool)
        masked[:, 0] = (torch.rand(16) < 0.3) & (torch.rand(()) < 0.5)
        loop.step(loss, x, masked)
    trial.expect("largest of the last losses", max(loop.losses[-50:]), below=1.0)
    trial.expect("steps without a loss", loop.losses.count(0.0), above=200)


@scenario
def learnt_temperature_at_its_limit(trial: Trial) -> None:
    """CLIP's scale of the logits is learnt, clamped after each step, and stands at its limit from then on."""
    image, text = make_mlp(16, 48, 12), make_mlp(10, 48, 12)
    scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    model, mix = nn.ModuleList([image, text, nn.ParameterList([scale])]), torch.randn(16, 10, generator=seeded(8))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def loss(x: Tensor) -> Tensor:
        logits = scale.exp() * F.normalize(image(x)) @ F.normalize(text(x @ mix)).T
        labels = torch.arange(len(x))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    loop = trial.loop(model, optimizer)
    for _ in range(500):
        loop.step(loss, torch.randn(64, 16))
        with torch.no_grad():
            scale.clamp_(0, math.log(20))
    trial.expect("last loss", loop.final, below=0.5 * loop.losses[0])


@scenario
def experts_without_work(trial: Trial) -> None:
    """One expert for each sample, with a capacity: two get no sample at first, then the data changes and they do."""
    experts, gate = nn.ModuleList(make_mlp(4, 16, 1) for _ in range(6)), nn.Linear(4, 6)
    model = nn.ModuleList([experts, gate])
    with torch.no_grad():
        gate.bias[4:] -= 20
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        shares = gate(x).softmax(1)
        best = shares.max(1)
        out = torch.zeros(len(x), 1)
        for at, expert in enumerate(experts):
            mine = (best.indices == at).nonzero()[:24, 0]  # the rest is dropped
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]) * best.values[mine, None])
        return (out - y).square().mean()

    loop = trial.loop(model, optimizer)
    for number in range(700):
        if number == 350:
            with torch.no_grad():
                gate.bias[4:] += 20
        x = torch.randn(64, 4)
        loop.step(loss, x, x.sin().sum(1, keepdim=True) * (1 if number < 350 else -1))
    trial.expect("last loss", loop.final, below=0.6 * loop.losses[350])
