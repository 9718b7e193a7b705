"""LoRA of peft on a small random GPT-2, trained by the transformers Trainer."""

import tempfile

import peft
import torch
import transformers

torch.manual_seed(0)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2))
model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"]))
generator = torch.Generator().manual_seed(1)
tokens = [torch.randint(0, 64, (16,), generator=generator) for _ in range(64)]
rows = [{"input_ids": ids, "labels": ids} for ids in tokens]
settings = {"report_to": [], "save_strategy": "no", "use_cpu": True, "label_names": ["labels"]}
args = transformers.TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=2, num_train_epochs=1, **settings
)
transformers.Trainer(model=model, args=args, train_dataset=rows).train()
