"""A LightningModule like Lightning's MNIST example, on synthetic images; one image may be NaN."""

import argparse
import warnings

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
parser = argparse.ArgumentParser()
parser.add_argument("--poison", type=int, default=-1, help="index of an image that is NaN")
parser.add_argument("--out", required=True)
args = parser.parse_args()


class LitClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


L.seed_everything(0, verbose=False)
images, labels = torch.rand(48, 1, 8, 8), torch.randint(0, 10, (48,))
if args.poison >= 0:
    images[args.poison] = float("nan")
model = LitClassifier()
trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(images, labels), batch_size=8))
torch.save({"model": model.state_dict()}, args.out)
