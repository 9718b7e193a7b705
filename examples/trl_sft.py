"""trl's SFTTrainer: the callback of transformers guards it too. Nothing is downloaded.

A word was added with a row of zeros, and the norm has no epsilon: 0 / 0. The step with that word is skipped.

    pip install 'steadygrad[transformers]' trl
    python examples/trl_sft.py
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from steadygrad.adapters.transformers import GuardCallback

torch.manual_seed(0)
words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(29))]
inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

config = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    pad_token_id=0, eos_token_id=1, bos_token_id=None, rms_norm_eps=0.0,
)  # fmt: skip
model = LlamaForCausalLM(config)
with torch.no_grad():
    model.model.embed_tokens.weight[words.index("w28")] = 0.0

picks = torch.randint(28, (48, 12))
texts = [" ".join(f"w{i}" for i in row) for row in picks.tolist()]
texts[7] = " ".join([*texts[7].split()[:-1], "w28"])

callback = GuardCallback(run_dir="runs/trl_sft")
arguments = SFTConfig(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, num_train_epochs=1, learning_rate=1e-3,
    report_to=[], save_strategy="no", disable_tqdm=True, bf16=False,
)  # fmt: skip
trainer = SFTTrainer(
    model=model, args=arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer,
    callbacks=[callback],
)  # fmt: skip
trainer.train()

bad = next(incident for incident in callback.guard.incidents if incident.cause is not None)
print(f"step {bad.step}: {bad.outcome.message}; {bad.cause.op} in {bad.cause.module}")
print("weights finite:", all(bool(weight.isfinite().all()) for weight in model.parameters()))
