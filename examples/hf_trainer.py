"""transformers' Trainer: one callback. A tiny Llama learns from texts made here; one batch has every label masked.

The plain Trainer logs that batch as a loss of 0 and continues. With the callback the log shows the NaN, the step is
skipped, and the record says why.

    pip install 'steadygrad[transformers]'
    python examples/hf_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from steadygrad.adapters.transformers import GuardCallback

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
)
texts = [torch.randint(1, 64, (16,)) for _ in range(64)]
rows = [{"input_ids": ids, "labels": ids.clone()} for ids in texts]
for row in rows[:4]:
    row["labels"][:] = -100  # as if an overlong prompt left no room for the answer


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


callback = GuardCallback(run_dir="runs/hf_trainer")
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, num_train_epochs=2, learning_rate=1e-3,
    logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
)  # fmt: skip
trainer = InOrder(model=LlamaForCausalLM(config), args=arguments, train_dataset=rows, callbacks=[callback])
trainer.train()

guard = callback.guard
print([(incident.step, incident.finding.kind) for incident in guard.incidents])
print(f"{guard.stats()['num_skipped']} of {guard.stats()['num_steps']} steps skipped")
