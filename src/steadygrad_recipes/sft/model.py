"""A model folder, or nothing -> a causal language model with LoRA and its tokenizer. Nothing is downloaded.

A folder is read with transformers, weights from safetensors only: no pickle, and no code from the folder. Without one,
a small Llama with random weights and a byte-level tokenizer, trained on the rows, are built and kept in the run
directory, so that a resumed run and a later answer use exactly the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from steadygrad.act.precision import DTYPES
from steadygrad.config import Precision
from steadygrad.errors import ConfigError
from steadygrad.extras import import_extra
from steadygrad_recipes.sft.config import SftConfig, TinyModel
from steadygrad_recipes.sft.data import Example

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries below are imported: nothing is fetched
_transformers = import_extra("transformers", "transformers", what="the recipe sft")

BASE = "base"
"""Folder of the built model, inside the run directory."""
PAD, EOS = "<pad>", "<eos>"
TINY_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
"""Every matrix of the built model: nothing in it has been learned yet, so every one must be adapted."""


def open_model(config: SftConfig, run_dir: Path, examples: Iterable[Example]) -> tuple[Any, Any]:
    """Return (model without LoRA, tokenizer): from the folder, from an earlier start of this run, or built now."""
    if config.model is not None:
        return load_folder(Path(config.model), choose_base_dtype(config), hub=config.hub, **_quantize(config))
    folder = run_dir / BASE
    if not (folder / "config.json").is_file():
        tokenizer = make_tokenizer(examples, config.tiny.vocab_size)
        model = make_model(config.tiny, tokenizer, config.max_length + config.max_new_tokens, config.seed)
        aside = run_dir / f"{BASE}.tmp"  # renamed once complete: a process killed meanwhile leaves no half model
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        aside.replace(folder)
    return load_folder(folder, choose_base_dtype(config))


def choose_base_dtype(config: SftConfig) -> torch.dtype | str:
    """Return the dtype asked for; else as saved where the weights are frozen, and fp32 where they are trained."""
    if config.base_precision is not None:
        return DTYPES[config.base_precision]
    return "auto" if config.lora_rank else DTYPES[Precision.FP32]


def _quantize(config: SftConfig) -> dict[str, Any]:
    """Return what `from_pretrained` needs for weights in 4 bits; empty without them."""
    if not config.load_in_4bit:
        return {}
    import_extra("qlora", "bitsandbytes", what="load_in_4bit", error=ConfigError)
    if not torch.cuda.is_available():
        raise ConfigError("SftConfig.load_in_4bit needs a GPU, and torch sees none here. Leave it out.")
    settings = _transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    # The whole model on this rank's GPU: "auto" would spread it over all of them
    return {"quantization_config": settings, "device_map": {"": torch.cuda.current_device()}}


def load_folder(
    folder: Path, dtype: torch.dtype | str = "auto", *, hub: bool = False, **settings: Any
) -> tuple[Any, Any]:
    """Load model and tokenizer from a folder as transformers saves it, or with `hub` by their name there."""
    is_remote = hub and not folder.exists()
    if not is_remote and not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise ConfigError(
            f"SftConfig.model: {folder} {what}. Give the folder of a model saved by save_pretrained, or --hub for a "
            "name on the hub."
        )
    safely: dict[str, Any] = {"local_files_only": not is_remote, "trust_remote_code": False}  # no code of a model runs
    try:
        # use_safetensors: a .bin file is a pickle
        model = _transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, **safely, **settings
        )
        tokenizer = _transformers.AutoTokenizer.from_pretrained(folder, **safely)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".: ")
        raise ConfigError(
            f"SftConfig.model: {folder} cannot be read as a causal language model with its tokenizer: {reason}. "
            "Save both into it with save_pretrained, the weights as safetensors."
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"SftConfig.model: the tokenizer of {folder} has no end-of-sequence token, so that no answer would end. "
            "Set tokenizer.eos_token and save it again."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is neither attended to nor learned
    return model, tokenizer


def add_lora(model: Any, config: SftConfig) -> Any:
    """Return the model with LoRA matrices, all else frozen; the model itself with `lora_rank=0`."""
    if config.lora_rank == 0:
        return model
    peft = import_extra("transformers", "peft", what="LoRA")
    if config.load_in_4bit:
        model = peft.prepare_model_for_kbit_training(model)
    targets: Any = config.lora_targets
    if targets == ("all-linear",):
        targets = "all-linear" if config.model is not None else list(TINY_TARGETS)
    # LoRA's matrices are drawn next: the same for the same seed, whatever was drawn while the model was opened
    torch.manual_seed(config.seed)
    try:
        return peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                lora_dropout=config.lora_dropout,
                target_modules=targets if isinstance(targets, str) else list(targets),
                task_type="CAUSAL_LM",
            ),
        )
    except ValueError as error:
        raise ConfigError(
            f"SftConfig.lora_targets: {config.lora_targets!r} does not fit {type(model).__name__}: {error} "
            'Name layers that it has, or use ("all-linear",).'
        ) from error


def load_trained(folder: Path, config: SftConfig, run_dir: Path) -> tuple[Any, Any]:
    """Load what `train` left in `folder`: all weights, or LoRA matrices on the model that they were trained on."""
    if not (folder / "adapter_config.json").is_file():
        return load_folder(folder)
    base = Path(config.model) if config.model is not None else run_dir / BASE
    model, tokenizer = load_folder(base, choose_base_dtype(config), hub=config.hub)
    peft = import_extra("transformers", "peft", what="LoRA")
    return peft.PeftModel.from_pretrained(model, folder), tokenizer


# --- built here -----------------------------------------------------------------------------------------------------


def make_tokenizer(examples: Iterable[Example], vocab_size: int) -> Any:
    """Train a byte-level BPE on the rows: no text is unknown to it, and each digit is a token."""
    tokenizers = import_extra("transformers", "tokenizers", what="the recipe sft")
    parts = tokenizers.pre_tokenizers
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = parts.Sequence([parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)])
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = parts.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator((text for example in examples for text in _texts_of(example)), trainer)
    return _transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD, eos_token=EOS)


def _texts_of(example: Example) -> list[str]:
    prompt = [example.prompt] if isinstance(example.prompt, str) else [part["content"] for part in example.prompt]
    return [*prompt, example.completion]


def make_model(sizes: TinyModel, tokenizer: Any, max_length: int, seed: int) -> Any:
    """Build a Llama of these sizes with random weights."""
    torch.manual_seed(seed)
    return _transformers.LlamaForCausalLM(
        _transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=sizes.width,
            intermediate_size=2 * sizes.width,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_heads,
            max_position_embeddings=max_length,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            tie_word_embeddings=False,
            initializer_range=sizes.width**-0.5,  # 0.02 is for large models: here it would hide the prompt
        )
    )
