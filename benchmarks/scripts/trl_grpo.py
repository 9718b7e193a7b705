"""trl's GRPOTrainer with a reward for long words."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def reward_long_words(completions, **_columns):
    return [len(text) / (1 + len(text.split())) for text in completions]


trainer = GRPOTrainer(
    model="model",
    reward_funcs=reward_long_words,
    args=GRPOConfig(
        output_dir="out",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=10,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=load_dataset("rows", split="train"),
)
trainer.train()
