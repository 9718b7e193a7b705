"""Models that make data: likelihoods below zero, samples drawn by the model itself, codes that are thrown away."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import make_mlp, seeded
from healthy.scenario import Trial, scenario


@scenario
def flow_on_a_thin_line(trial: Trial) -> None:
    """A flow learns points near a line: the loss has no lower end, and a stray point now and then costs hundreds."""
    model = nn.ModuleList(make_mlp(1, 32, 2) for _ in range(4))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(x: Tensor) -> Tensor:
        volume = torch.zeros(len(x))
        for at, coupling in enumerate(model):
            kept, moved = (x[:, :1], x[:, 1:]) if at % 2 else (x[:, 1:], x[:, :1])
            shift, scale = coupling(kept).chunk(2, 1)
            scale = 2 * scale.tanh()
            moved, volume = (moved - shift) * scale.exp(), volume + scale[:, 0]
            x = torch.cat([kept, moved] if at % 2 else [moved, kept], 1)
        return (0.5 * x.square().sum(1) + math.log(2 * math.pi) - volume).mean()

    loop = trial.loop(model, optimizer)
    for number in range(800):
        first = torch.randn(128, 1)
        noise = 0.02 * torch.randn(128, 1)
        if number % 60 == 59:
            noise[0] = 0.5
        loop.step(loss, torch.cat([first, first.sin() + noise], 1))
    trial.expect("last loss", loop.final, below=0.0)


@scenario
def energy_with_langevin_samples(trial: Trial) -> None:
    """Real points against samples that the model draws by its own gradient: the loss swings around zero."""
    model = make_mlp(2, 32, 32, 1, activation=nn.SiLU)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, betas=(0.0, 0.99))
    pool = torch.randn(512, 2)

    def sample(at: Tensor) -> Tensor:
        x = torch.where(torch.rand(64, 1) < 0.05, torch.randn(64, 2), pool[at])
        for _ in range(10):
            x = x.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(model(x).sum(), x)
            x = x - 0.1 * slope + 0.1 * torch.randn_like(x)
        pool[at] = x.detach()
        return x.detach()

    def loss(real: Tensor, at: Tensor) -> Tensor:
        high, low = model(sample(at)), model(real)
        return (low - high).mean() + 0.05 * (high.square() + low.square()).mean()

    loop = trial.loop(model, optimizer)
    for _ in range(400):
        loop.step(loss, 0.3 * torch.randn(64, 2) + 1.5, torch.randint(0, 512, (64,)))
    trial.effects["pool"] = pool.sum().item()
    apart = model(torch.randn(256, 2) - 1.5).mean() - model(0.3 * torch.randn(256, 2) + 1.5).mean()
    trial.expect("energy elsewhere above that of the data", apart.item(), above=0.1)


@scenario
def codebook_with_resets(trial: Trial) -> None:
    """A VQ-VAE: every 60 steps codes that nobody used are put onto encoded points, so targets of the encoder leap."""
    encoder, decoder = make_mlp(8, 32, 4), make_mlp(4, 32, 8)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder, "codes": nn.Embedding(32, 4)})
    codes, mix = model["codes"].weight, torch.randn(12, 8, generator=seeded(3))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    used = torch.zeros(32)

    def draw() -> Tensor:
        return mix[torch.randint(0, 12, (64,))] + 0.1 * torch.randn(64, 8)

    def loss(x: Tensor) -> Tensor:
        z = encoder(x)
        nearest = torch.cdist(z, codes).argmin(1)
        used.index_add_(0, nearest.detach(), torch.ones(64))
        code = codes[nearest]
        passed = z + (code - z).detach()
        return F.mse_loss(decoder(passed), x) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())

    loop = trial.loop(model, optimizer)
    for number in range(700):
        if number % 60 == 59:
            with torch.no_grad():
                idle = (used == 0).nonzero()[:, 0]
                codes[idle] = encoder(draw())[: len(idle)]
            used.zero_()
        loop.step(loss, draw())
    trial.expect("last loss", loop.final, below=0.3 * loop.losses[0])


@scenario
def codebook_of_buffers(trial: Trial) -> None:
    """Codes that are no parameters: a running mean in the forward moves them, and the loss with them."""

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(24, 4))
            self.register_buffer("counts", torch.ones(24))
            self.register_buffer("sums", self.codes.clone())

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
            chosen = F.one_hot(torch.cdist(z, self.codes).argmin(1), 24).float()  # (batch, codes)
            if self.training:
                with torch.no_grad():
                    self.counts.mul_(0.95).add_(chosen.sum(0), alpha=0.05)
                    self.sums.mul_(0.95).add_(chosen.T @ z, alpha=0.05)
                    self.codes.copy_(self.sums / (self.counts[:, None] + 1e-5))
            code = chosen @ self.codes
            return z + (code - z).detach(), F.mse_loss(z, code)

    encoder, decoder, codes = make_mlp(8, 32, 4), make_mlp(4, 32, 8), Codes()
    model, mix = nn.ModuleList([encoder, decoder, codes]), torch.randn(12, 8, generator=seeded(3))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(x: Tensor) -> Tensor:
        passed, apart = codes(encoder(x))
        return F.mse_loss(decoder(passed), x) + 0.25 * apart

    loop = trial.loop(model, optimizer)
    for _ in range(600):
        loop.step(loss, mix[torch.randint(0, 12, (64,))] + 0.1 * torch.randn(64, 8))
    trial.expect("last loss", loop.final, below=0.5 * loop.losses[0])


@scenario
def diffusion_target_changed(trial: Trial) -> None:
    """At step 400 the network is asked for the velocity where it was asked for the noise, weighted up to a hundred."""
    model = make_mlp(3, 64, 64, 2, activation=nn.SiLU)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)

    def loss(x: Tensor, late: bool) -> Tensor:
        level, noise = torch.rand(len(x), 1) * 0.98 + 0.01, torch.randn_like(x)
        clean, dirty = (1 - level).sqrt(), level.sqrt()
        said = model(torch.cat([clean * x + dirty * noise, level], 1))
        if late:
            return ((said - (clean * noise - dirty * x)).square() * (1 / level).clamp(max=100)).mean()
        return (said - noise).square().mean()

    loop = trial.loop(model, optimizer)
    for number in range(900):
        loop.step(loss, torch.randn(64, 2).sign(), number >= 400)
    trial.expect("jump", loop.losses[400], above=3 * loop.losses[399])
    trial.expect("last loss", loop.final, below=0.7 * loop.losses[400])


@scenario
def discrete_latents_made_hard(trial: Trial) -> None:
    """Gumbel-softmax from soft to hard: the loss is lowest in the middle and rises while the codes become real ones."""
    encoder, decoder = make_mlp(8, 32, 12), make_mlp(12, 32, 8)
    model, mix = nn.ModuleList([encoder, decoder]), torch.randn(10, 8, generator=seeded(4))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(x: Tensor, temperature: float, hard: bool) -> Tensor:
        code = F.gumbel_softmax(encoder(x), tau=temperature, hard=hard)
        return F.mse_loss(decoder(code), x)

    loop = trial.loop(model, optimizer)
    for number in range(700):
        x = mix[torch.randint(0, 10, (64,))]
        loop.step(loss, x, max(0.2, 3 * 0.995**number), number >= 500)
    trial.expect("last loss", loop.final, below=0.6 * loop.losses[0])


@scenario
def bayes_by_backprop(trial: Trial) -> None:
    """The prior's cost is spread over an epoch as 1/2, 1/4, 1/8 ...: the first step of each costs a hundredfold."""
    mean, spread = nn.Parameter(0.1 * torch.randn(32, 9)), nn.Parameter(torch.full((32, 9), -3.0))
    out = nn.Linear(32, 1)
    model = nn.ModuleList([nn.ParameterList([mean, spread]), out])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(x: Tensor, share: float) -> Tensor:
        sigma = F.softplus(spread)
        weight = mean + sigma * torch.randn_like(mean)
        prior = (-sigma.log() + 0.5 * (sigma.square() + mean.square()) - 0.5).sum()
        fit = (out((x @ weight[:, :8].T + weight[:, 8]).tanh()) - x.sum(1, keepdim=True)).square().sum()
        return fit + share * prior

    loop = trial.loop(model, optimizer)
    for number in range(800):
        at = number % 40
        loop.step(loss, torch.randn(32, 8), 2.0 ** (40 - at - 1) / (2.0**40 - 1))
    trial.expect("last loss", loop.final, below=0.5 * loop.losses[1])


@scenario
def validated_on_its_average(trial: Trial) -> None:
    """Every 50 steps the averaged weights are copied in, validated, and the trained ones put back."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = copy.deepcopy(model).requires_grad_(False)
    trial.modules.append(average)

    def loss(x: Tensor) -> Tensor:
        return (model(x) - x.sum(1, keepdim=True) - torch.randn(len(x), 1)).square().mean()

    loop, errors = trial.loop(model, optimizer), []
    for number in range(500):
        loop.step(loss, torch.randn(32, 8))
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters()):
                slow.lerp_(fast, 0.02)
        if number % 50 == 49:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(average.state_dict())
            model.eval()
            with torch.no_grad():
                x = torch.randn(256, 8)
                errors.append((model(x) - x.sum(1, keepdim=True)).square().mean().item())
            model.train()
            model.load_state_dict(kept)
    trial.effects["errors"] = errors
    trial.expect("error of the average", errors[-1], below=0.3)
