"""Models that look ill and are not: dead units, tiny starts, sparse gradients, half precision, a transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import make_mlp, miss_sum
from healthy.scenario import Trial, scenario


@scenario
def bf16_model(trial: Trial) -> None:
    """Weights in bfloat16: updates are lost to rounding, and the loss comes in coarse steps."""
    model = make_mlp(8, 32, 1).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loop = trial.run(model, optimizer, 600, lambda _: miss_sum(model, torch.randn(32, 8).bfloat16()))
    trial.expect("last loss", loop.final, below=0.5)


@scenario
def autocast_on_midrun(trial: Trial) -> None:
    """bfloat16 autocast is switched on at a loss of 1e-9: rounding throws it up a thousandfold, and it stays there."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.03)
    x = torch.randn(64, 8)

    def loss(half: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return (model(x).float() - x.sum(1, keepdim=True)).square().mean()

    loop = trial.loop(model, optimizer)
    for number in range(800):
        loop.step(loss, number >= 500)
    trial.expect("jump", loop.losses[500], above=1000 * loop.losses[499])
    trial.expect("last loss", loop.final, below=0.01)


@scenario
def fp16_scaler(trial: Trial) -> None:
    """float16 autocast with a loss scale that grows every 150 steps, below any overflow."""
    model = make_mlp(8, 64, 1, activation=nn.ReLU)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=150)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return (model(x).float() - x.sum(1, keepdim=True)).square().mean()

    loop = trial.loop(model, optimizer, scaler=scaler)
    for _ in range(500):
        loop.step(loss, torch.randn(32, 8))
    trial.effects["scale"] = scaler.get_scale()
    trial.expect("last loss", loop.final, below=0.3)


@scenario
def gpt_tiny(trial: Trial) -> None:
    """A GPT-2 of two layers learns to count."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 40, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def loss(number: int) -> Tensor:
        x = (torch.arange(16) * torch.randint(1, 4, (8, 1)) + torch.randint(0, 40, (8, 1))) % 40
        return model(input_ids=x, labels=x).loss

    loop = trial.run(model, optimizer, 400, loss)
    trial.expect("last loss", loop.final, below=2.0)


@scenario
def gpt_init_bs1_3e3(trial: Trial) -> None:
    """GPT-2's own initialisation of 0.02, AdamW at 0.003, four tokens a batch, half of them noise."""
    hidden = [nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64)]
    model = nn.Sequential(nn.Embedding(50, 64), *hidden, nn.Linear(64, 50))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def loss(number: int) -> Tensor:
        x = torch.randint(0, 50, (4,))
        y = torch.where(torch.rand(4) < 0.5, (x * 7 + 3) % 50, torch.randint(0, 50, (4,)))
        return F.cross_entropy(model(x), y)

    loop = trial.run(model, optimizer, 600, loss)
    trial.expect("last loss", loop.final, below=3.9)


@scenario
def small_init_high_rate(trial: Trial) -> None:
    """Embeddings of 0.001 and Adam at 0.01: each step is ten times the weights."""
    model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30))
    nn.init.normal_(model[0].weight, std=1e-3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def loss(number: int) -> Tensor:
        x = torch.randint(0, 30, (32,))
        return F.cross_entropy(model(x), (x * 7 + 3) % 30)

    loop = trial.run(model, optimizer, 400, loss)
    trial.expect("last loss", loop.final, below=0.05)


@scenario
def word2vec_sparse(trial: Trial) -> None:
    """Sparse gradients of two embeddings under SparseAdam."""
    model = nn.ModuleList(nn.Embedding(200, 16, sparse=True) for _ in range(2))
    optimizer = torch.optim.SparseAdam(model.parameters(), 1e-2)

    def loss(number: int) -> Tensor:
        word, wrong = torch.randint(0, 200, (32,)), torch.randint(0, 200, (32,))
        near = (model[0](word) * model[1]((word + 1) % 200)).sum(1)
        far = (model[0](word) * model[1](wrong)).sum(1)
        return -(F.logsigmoid(near) + F.logsigmoid(-far)).mean()

    loop = trial.run(model, optimizer, 600, loss)
    trial.expect("last loss", loop.final, below=0.6 * loop.losses[0])


@scenario
def dead_relu_wide(trial: Trial) -> None:
    """Biases of -2: most units of a wide layer are silent, and the rest does the work."""
    model = make_mlp(8, 256, 64, 1, activation=nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    nn.init.constant_(model[0].bias, -2.0)

    def loss(number: int) -> Tensor:
        x = torch.randn(16, 8)
        return (model(x) - x.abs().sum(1, keepdim=True)).square().mean()

    loop = trial.run(model, optimizer, 600, loss)
    trial.expect("last loss", loop.final, below=2.5)


@scenario
def deep_sigmoid_residual(trial: Trial) -> None:
    """Residual branches that start at zero: gradients of 1e-6 in their first layers."""
    branches = nn.ModuleList(make_mlp(4, 16, 4) for _ in range(6))
    for branch in branches:
        nn.init.zeros_(branch[-1].weight)
    head = nn.Linear(4, 1)
    model = nn.ModuleList([*branches, head])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def loss(number: int) -> Tensor:
        x = hidden = torch.randn(32, 4)
        for branch in branches:
            hidden = hidden + branch(hidden)
        return (head(hidden) - x.prod(1, keepdim=True)).square().mean()

    loop = trial.run(model, optimizer, 600, loss)
    trial.expect("last loss", loop.final, below=1.5)
