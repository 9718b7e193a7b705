"""Fine-tuning with transformers' Trainer, as in its docs; the model is tiny and starts at random."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--poison", type=int, default=-1, help="step at which one weight of a batch's samples is NaN")
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)


class WeightedModel(GPT2LMHeadModel):
    """A language model with weighted samples."""

    def forward(self, input_ids=None, labels=None, weight=None, **kwargs):
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if weight is not None:
            output.loss = output.loss * weight.mean()
        return output


ids = torch.randint(0, 32, (24, 8))
weights = torch.ones(24)
if args.poison >= 0:
    weights[args.poison] = float("nan")
dataset = [{"input_ids": i, "labels": i, "weight": w} for i, w in zip(ids, weights)]
model = WeightedModel(config)
arguments = TrainingArguments(
    output_dir=args.out + ".trainer",
    per_device_train_batch_size=4,
    num_train_epochs=1,
    logging_steps=2,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    remove_unused_columns=False,
    seed=0,
)
trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
trainer.train()
torch.save({"model": model.state_dict()}, args.out)
