"""Lightning starts the second rank: a new interpreter, a spawned process or a fork. Rank 1 gets a NaN."""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, number):
        (x,) = batch
        if number == 5 and self.global_rank == 1:
            x = x.clone()
            x[0] = float("nan")
        return self.net(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True)
    strategy = parser.parse_args().strategy
    L.seed_everything(0)
    loader = DataLoader(TensorDataset(torch.randn(128, 4)), batch_size=8)
    switched_off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **switched_off)
    model = Net()
    trainer.fit(model, loader)
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    print(f"finite: {finite}\n", end="", flush=True)  # in one write: two ranks write at once
