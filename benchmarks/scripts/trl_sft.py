"""trl's SFTTrainer with a small random model and tokenizer."""

import tempfile

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

words = ["<pad>", "<eos>", *(f"w{i}" for i in range(30))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
rows = [{"text": " ".join(f"w{(7 * i + j * j) % 30}" for j in range(12))} for i in range(64)]
trainer = trl.SFTTrainer(
    model=transformers.LlamaForCausalLM(config),
    args=trl.SFTConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
)
trainer.train()
