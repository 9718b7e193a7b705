"""A classifier as in torch's quickstart: dataset, model, train loop, test loop. One sample may be NaN."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--poison", type=int, default=-1, help="index of a sample that is NaN")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--start", default=None, help="how workers are started")
parser.add_argument("--clip", type=float, default=None)
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
x = torch.randn(64, 8)
y = (x.sum(1) > 0).long()
if args.poison >= 0:
    x[args.poison] = float("nan")


class NeuralNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))

    def forward(self, x):
        return self.stack(x)


def main():
    data = TensorDataset(x, y)
    loader = DataLoader(data, batch_size=8, num_workers=args.workers, multiprocessing_context=args.start)
    model = NeuralNetwork()
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
    for epoch in range(args.epochs):
        model.train()
        for batch, target in loader:
            loss = loss_fn(model(batch), target)
            loss.backward()
            if args.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        print(f"epoch {epoch} done")
    torch.save(model, args.out + ".whole")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out)


if __name__ == "__main__":
    main()
