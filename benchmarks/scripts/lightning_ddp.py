"""Lightning starts the second rank itself."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch):
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    L.seed_everything(0)
    loader = DataLoader(TensorDataset(torch.randn(480, 4)), batch_size=8)
    switched_off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **switched_off)
    trainer.fit(Net(), loader)
