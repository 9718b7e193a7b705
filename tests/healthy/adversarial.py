"""Adversaries: two networks, or a network and an attack. A loss that rises says that the other side got better."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from healthy.parts import Clusters, make_mlp, seeded
from healthy.scenario import Trial, scenario

CENTRE = torch.tensor([2.0, -1.0])
"""Where the real points of the small GANs lie."""


def draw_real(count: int = 64) -> Tensor:
    return CENTRE + 0.5 * torch.randn(count, 2)


def penalise_slope(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """The penalty of WGAN-GP: the critic's slope between real and fake should be 1."""
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(2, 1) - 1).square().mean()


@scenario
def adversarial_eps_ramp(trial: Trial) -> None:
    """Adversarial training whose attack grows stronger for 400 steps: the loss rises with it, by design."""
    model = make_mlp(8, 64, 2, activation=nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    direction = torch.randn(8, generator=seeded(1))

    def loss(number: int) -> Tensor:
        x = torch.randn(128, 8)
        y = (x @ direction > 0).long()
        x.requires_grad_(True)
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        attacked = (x + min(0.4, number / 1000) * slope.sign()).detach()
        return F.cross_entropy(model(attacked), y)

    loop = trial.run(model, optimizer, 600, loss)
    trial.expect("last loss", loop.final, below=0.69)


@scenario
def attack_switched_on(trial: Trial) -> None:
    """At step 300 a classifier that makes no mistake meets an attack of three steps: its loss leaps a hundredfold."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8, spread=2.0, noise=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def attack(x: Tensor, y: Tensor) -> Tensor:
        moved = x.clone()
        for _ in range(3):
            moved.requires_grad_(True)
            (slope,) = torch.autograd.grad(F.cross_entropy(model(moved), y), moved)
            moved = (moved + 0.5 * slope.sign()).detach()
        return moved

    def loss(x: Tensor, y: Tensor, attacked: bool) -> Tensor:
        return F.cross_entropy(model(attack(x, y) if attacked else x), y)

    loop = trial.loop(model, optimizer)
    for number in range(600):
        loop.step(loss, *task.draw(64), number >= 300)
    trial.expect("jump", loop.losses[300], above=50 * max(loop.losses[250:300]))
    trial.expect("last loss", loop.final, below=loop.losses[300] / 2)


@scenario
def wgan_critic_negative(trial: Trial) -> None:
    """A critic against a generator that comes and goes: its loss is negative, and drifts up whenever they come near."""
    critic = make_mlp(2, 32, 1, activation=nn.ReLU)
    optimizer = torch.optim.RMSprop(critic.parameters(), 5e-4)

    def loss(number: int) -> Tensor:
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.1, 0.1)
        real = torch.randn(64, 2) + 2
        fake = torch.randn(64, 2) * 0.5 + 2 * math.sin(number / 200)
        return critic(fake).mean() - critic(real).mean()

    loop = trial.run(critic, optimizer, 800, loss)
    trial.expect("last loss", loop.final, below=-0.3)


@scenario
def gradient_penalty(trial: Trial) -> None:
    """A critic with a penalty on its slope, so a loss of second derivatives that starts at 10 and ends below zero."""
    critic = make_mlp(4, 32, 1)
    optimizer = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.0, 0.9))

    def loss(number: int) -> Tensor:
        real, fake = torch.randn(32, 4) + 1, torch.randn(32, 4)
        return critic(fake).mean() - critic(real).mean() + 10 * penalise_slope(critic, real, fake)

    loop = trial.run(critic, optimizer, 500, loss)
    trial.expect("last loss", loop.final, below=-1.0)


@scenario
def bf16_autocast_gan_hinge(trial: Trial) -> None:
    """A hinge discriminator in bfloat16 against fakes that cross the real points twice: the loss follows them."""
    critic = make_mlp(2, 32, 1, activation=nn.ReLU)
    optimizer = torch.optim.Adam(critic.parameters(), 2e-3, betas=(0.0, 0.9))

    def loss(number: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            real, fake = torch.randn(64, 2), torch.randn(64, 2) + 3 * math.cos(number / 150)
            return F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake)).mean()

    loop = trial.run(critic, optimizer, 900, loss)
    trial.expect("last loss", loop.final, below=1.0)


@scenario
def gan_of_two_guards(trial: Trial) -> None:
    """A GAN that converges: the discriminator's loss rises to log 4 as it should, the generator's swings."""
    generator, critic = make_mlp(2, 32, 2), make_mlp(2, 32, 1, activation=nn.LeakyReLU)
    making = trial.loop(generator, torch.optim.Adam(generator.parameters(), 2e-3, betas=(0.5, 0.9)))
    judging = trial.loop(critic, torch.optim.Adam(critic.parameters(), 2e-3, betas=(0.5, 0.9)))

    def judge(real: Tensor, noise: Tensor) -> Tensor:
        fake = generator(noise).detach()
        return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()

    def fool(noise: Tensor) -> Tensor:
        return F.softplus(-critic(generator(noise))).mean()

    for _ in range(500):
        judging.step(judge, draw_real(), torch.randn(64, 2))
        making.step(fool, torch.randn(64, 2))
    away = generator(torch.randn(512, 2)).mean(0) - CENTRE
    trial.expect("distance of the means", away.norm().item(), below=0.6)


@scenario
def wgan_gp_of_two_guards(trial: Trial) -> None:
    """Three critic steps for each of the generator; both losses are distances that grow, shrink and change sign."""
    generator, critic = make_mlp(2, 32, 2), make_mlp(2, 32, 1, activation=nn.LeakyReLU)
    making = trial.loop(generator, torch.optim.Adam(generator.parameters(), 5e-3, betas=(0.0, 0.9)))
    judging = trial.loop(critic, torch.optim.Adam(critic.parameters(), 5e-3, betas=(0.0, 0.9)))

    def judge(real: Tensor, fake: Tensor) -> Tensor:
        return critic(fake).mean() - critic(real).mean() + penalise_slope(critic, real, fake)

    for _ in range(150):
        for _ in range(3):
            with torch.no_grad():
                fake = generator(torch.randn(64, 2))
            judging.step(judge, draw_real(), fake)
        making.step(-critic(generator(torch.randn(64, 2))).mean())
    away = generator(torch.randn(512, 2)).mean(0) - CENTRE
    trial.expect("distance of the means", away.norm().item(), below=0.6)


@scenario
def gan_of_one_guard(trial: Trial) -> None:
    """Both players in one function, an optimizer for each: the sum of their losses swings and means nothing."""
    model = nn.ModuleDict({"generator": make_mlp(2, 32, 2), "critic": make_mlp(2, 32, 1, activation=nn.LeakyReLU)})
    optimizers = [torch.optim.Adam(part.parameters(), 2e-3, betas=(0.5, 0.9)) for part in model.values()]

    def loss(number: int) -> dict[str, Tensor]:
        fake, critic = model["generator"](torch.randn(64, 2)), model["critic"]
        judged = F.softplus(-critic(draw_real())).mean() + F.softplus(critic(fake.detach())).mean()
        fixed = {name: weight.detach() for name, weight in critic.named_parameters()}
        fooled = F.softplus(-functional_call(critic, fixed, (fake,))).mean()
        return {"loss": judged + fooled, "critic": judged.detach(), "generator": fooled.detach()}

    trial.run(model, optimizers, 600, loss)
    away = model["generator"](torch.randn(512, 2)).mean(0) - CENTRE
    trial.expect("distance of the means", away.norm().item(), below=1.0)


@scenario
def adversarial_term_joins(trial: Trial) -> None:
    """A critic joins a trained autoencoder at step 300: it catches up with whatever it sees, so old weights fool it."""
    model = nn.ModuleDict({"encoder": make_mlp(8, 32, 3), "decoder": make_mlp(3, 32, 8)})
    critic, mixing = make_mlp(8, 32, 1, activation=nn.LeakyReLU), torch.randn(4, 8, generator=seeded(4))
    making = trial.loop(model, torch.optim.Adam(model.parameters(), 2e-3))
    judging = trial.loop(critic, torch.optim.Adam(critic.parameters(), 2e-3))

    def reconstruct(x: Tensor) -> Tensor:
        return model["decoder"](model["encoder"](x))

    def make(x: Tensor, weight: float) -> Tensor:
        made = reconstruct(x)
        return (made - x).abs().mean() - weight * critic(made).mean()

    def judge(real: Tensor, fake: Tensor) -> Tensor:
        return F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake)).mean()

    for number in range(600):
        x = (torch.randn(32, 4) @ mixing).tanh()
        critic.requires_grad_(False)
        making.step(make, x, 2.0 if number >= 300 else 0.0)
        critic.requires_grad_(True)
        if number >= 300:
            judging.step(judge, x, reconstruct(x).detach())
    x = (torch.randn(256, 4) @ mixing).tanh()
    trial.expect("reconstruction", (reconstruct(x) - x).abs().mean().item(), below=0.6)


@scenario
def gradient_reversal(trial: Trial) -> None:
    """Domain-adversarial training: the encoder unlearns the domain, so the domain's loss rises to log 2."""
    encoder, labeller, domain = make_mlp(6, 32, 8), nn.Linear(8, 2), make_mlp(8, 16, 2)
    model = nn.ModuleList([encoder, labeller, domain])
    optimizer = torch.optim.SGD(model.parameters(), 0.2)

    def loss(x: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        where = torch.randint(0, 2, (len(x),))
        hidden = encoder(torch.cat([x, 4.0 * where[:, None] - 2], 1))
        backwards = (1 + strength) * hidden.detach() - strength * hidden  # the same value, the gradient reversed
        told = F.cross_entropy(domain(backwards), where)
        return F.cross_entropy(labeller(hidden), (x.sum(1) > 0).long()) + told, told.detach()

    loop, domains = trial.loop(model, optimizer), []
    for number in range(700):
        _, told = loop.step(loss, torch.randn(64, 5), min(1.0, max(0.0, number - 200) / 300))
        domains.append(float(told))
    trial.expect("domain's loss before", domains[200], below=0.6)
    trial.expect("domain's loss at the end", sum(domains[-50:]) / 50, above=0.5, below=1.2)
    trial.expect("labels' loss", loop.final - sum(domains[-50:]) / 50, below=0.3)
