"""Makes training data, small and always the same: text, digits, pictures, rows, a model. Downloads nothing.

python material.py text input.txt digits ../data ...        (pairs of kind and path)
"""

import json
import random
import struct
import sys
from pathlib import Path

WORDS = "the a one some quick slow brown red fox dog wizard tower jumps runs brews sleeps over under and then".split()  # noqa: SIM905


def write_sentences(count):
    source = random.Random(0)
    return [" ".join(source.choices(WORDS, k=source.randint(6, 16))) + "." for _ in range(count)]


def make_text(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(write_sentences(1500)))


def make_corpus(path):
    """Make text in three files, like wikitext."""
    path.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 600), ("valid", 60), ("test", 60)):
        (path / f"{name}.txt").write_text("\n".join(write_sentences(count)))


def make_digits(path):
    """Make files in the format of MNIST: a bright square in noise, whose position gives the label."""
    raw = path / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    source = random.Random(0)
    for name, count in (("train", 960), ("t10k", 128)):
        labels = bytes(source.randrange(10) for _ in range(count))
        images = bytearray()
        for label in labels:
            image = bytearray(source.choices(range(60), k=784))
            for row in range(4, 12):
                start = 28 * (row + 10 * (label % 2)) + 4 * (label // 2) + 2
                image[start : start + 6] = bytes([250] * 6)
            images += image
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + bytes(images))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels)


def make_pictures(path):
    """Make a folder for each class, like ImageNet."""
    import numpy
    from PIL import Image

    source = numpy.random.default_rng(0)
    for part, count in (("train", 40), ("validation", 10)):
        for name in ("red", "blue"):
            folder = path / part / name
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = source.integers(0, 120, (32, 32, 3), dtype="uint8")
                pixels[:, :, 0 if name == "red" else 2] += 100
                Image.fromarray(pixels).save(folder / f"{number}.png")


def make_rows(path):
    """Make a dataset with the columns `text` and `prompt`."""
    path.mkdir(parents=True, exist_ok=True)
    rows = [{"text": text} for text in write_sentences(64)]
    (path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


def make_prompts(path):
    path.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": " ".join(text.split()[:4])} for text in write_sentences(64)]
    (path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


def make_model(path):
    """Make a Llama of 20,000 weights with its tokenizer."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", ".", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", model_max_length=64
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def make_titan(path):
    """Make the files that are in torchtitan's repository but not in its wheel."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "adapters"))
    from test_torchtitan import make_assets

    make_assets(path)


MAKERS = {
    "text": make_text,
    "corpus": make_corpus,
    "digits": make_digits,
    "pictures": make_pictures,
    "rows": make_rows,
    "prompts": make_prompts,
    "model": make_model,
    "titan": make_titan,
}

if __name__ == "__main__":
    for what, where in zip(sys.argv[1::2], sys.argv[2::2]):
        MAKERS[what](Path(where))
