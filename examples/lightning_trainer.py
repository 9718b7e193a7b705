"""Lightning: one callback guards every optimizer step. The module stays as it is.

pip install 'steadygrad[lightning]'
python examples/lightning_trainer.py
"""

import lightning.pytorch as pl
import torch
from torch import nn

from steadygrad.adapters.lightning import GuardCallback


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


pl.seed_everything(0, verbose=False)
data = torch.randn(64, 32, 8)
data[40, 3, 2] = float("nan")
loader = torch.utils.data.DataLoader(data, batch_size=None)

callback = GuardCallback(run_dir="runs/lightning")
trainer = pl.Trainer(
    max_epochs=2, accelerator="auto", devices=1, callbacks=[callback], gradient_clip_val=1.0, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
module = Regression()
trainer.fit(module, loader)

for incident in callback.guard.incidents:
    print(f"step {incident.step}: {incident.finding.kind}, {incident.cause.samples_note}")
print("weights finite:", all(bool(weight.isfinite().all()) for weight in module.parameters()))
