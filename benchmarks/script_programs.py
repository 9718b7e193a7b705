"""The programs of any_script.py: ours, using released packages, and scripts of public repositories, unedited.

A program of a repository runs in a copy of one of its folders, with data from scripts/material.py and settings that
make it small enough for two cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
OWN, STORIES = HERE / "scripts", HERE.parent / "tests" / "stories" / "scripts"
TITAN = HERE.parent / "tests" / "adapters" / "titan_program.py"
TWO_RANKS = ("torchrun", "--nproc-per-node", "2", "--standalone")


@dataclass(frozen=True)
class Program:
    """A script with its arguments, the packages it is about, and its launcher."""

    command: tuple[str, ...]
    packages: tuple[str, ...] = ("torch",)
    launcher: tuple[str, ...] = ()
    bad_call: int = 12
    repository: str = ""
    """Its source: owner/name on GitHub."""
    part: str = "."
    """The folder of the repository in which it runs."""
    material: tuple[str, ...] = ()
    """Its training data and where to put them: arguments of scripts/material.py."""
    setup: tuple[str, ...] = ()
    """A separate script that prepares the data."""


SMALL_RUN = ("--output_dir", "out", "--save_strategy", "no", "--report_to", "none", "--use_cpu")
SMALL_TRL = (*SMALL_RUN, "--model_name_or_path", "model", "--dataset_name", "rows", "--bf16", "false")
NANO = "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=2 --eval_interval=100 --n_layer=2"
NANO_SMALL = "--block_size=32 --batch_size=4 --n_head=2 --n_embd=32 --max_iters=30 --gradient_accumulation_steps=2"
TIMM = "--data-dir pictures --model resnet10t --device cpu --img-size 32 -b 4 --epochs 1 --warmup-epochs 0 --workers 1"
CLM = "--model_name_or_path model --train_file corpus/train.txt --do_train --per_device_train_batch_size 2"
CLM_SMALL = "--block_size 32 --max_steps 20"

PACKAGES = {
    "plain loop": Program((str(STORIES / "plain_loop.py"), "--out", "w.pt")),
    "GradScaler": Program((str(STORIES / "amp_scaler.py"), "--out", "w.pt")),
    "two optimizers (GAN)": Program((str(STORIES / "gan.py"), "--out", "w.pt"), bad_call=5),
    "LBFGS with a closure": Program((str(STORIES / "lbfgs.py"), "--out", "w.pt")),
    "Optuna sweep": Program((str(OWN / "optuna_sweep.py"),), ("optuna",)),
    "Trainer": Program((str(STORIES / "hf_trainer.py"), "--out", "w.pt"), ("transformers",), bad_call=3),
    "Trainer with LoRA": Program((str(OWN / "peft_lora.py"),), ("peft", "transformers")),
    "SFTTrainer": Program((str(OWN / "trl_sft.py"),), ("trl", "transformers")),
    "trl.scripts.sft": Program(
        ("-m", "trl.scripts.sft", *SMALL_TRL, "--max_steps", "16", "--per_device_train_batch_size", "2"),
        ("trl", "transformers"),
        material=("rows", "rows", "model", "model"),
    ),
    "GRPOTrainer": Program(
        (str(OWN / "trl_grpo.py"),),
        ("trl", "transformers"),
        bad_call=5,
        material=("prompts", "rows", "model", "model"),
    ),
    "Accelerator": Program((str(OWN / "accelerate_loop.py"),), ("accelerate",)),
    "Accelerator, accelerate launch": Program(
        (str(OWN / "accelerate_loop.py"),), ("accelerate",), ("accelerate", "launch", "--cpu")
    ),
    "Lightning": Program((str(STORIES / "lightning_mnist.py"), "--out", "w.pt"), ("lightning",), bad_call=3),
    "Lightning ddp, two processes": Program((str(OWN / "lightning_ddp.py"),), ("lightning",)),
    "DistributedDataParallel": Program((str(STORIES / "ddp.py"), "--out", "w.pt"), ("torch",), TWO_RANKS, bad_call=4),
    "FSDP2": Program((str(OWN / "fsdp2.py"),), ("torch",), TWO_RANKS),
    "averaged inside step()": Program((str(OWN / "average_in_step.py"),), ("torch",), TWO_RANKS),
    "DeepSpeed ZeRO-3": Program((str(OWN / "zero3.py"),), ("deepspeed",), TWO_RANKS),
    "torchtitan, llama3 debug model": Program(
        (str(TITAN), "plain", "-1", "."), ("torchtitan",), TWO_RANKS, bad_call=4, material=("titan", ".")
    ),
    "Ray Train, two workers": Program((str(OWN / "ray_train.py"),), ("ray",)),
    "denoising-diffusion Trainer": Program(
        (str(OWN / "diffusion.py"), "pictures"), ("denoising-diffusion-pytorch",), material=("pictures", "pictures")
    ),
}
REPOSITORIES = {
    "nanoGPT train.py": Program(
        ("train.py", *NANO.split(), *NANO_SMALL.split()),
        repository="karpathy/nanoGPT",
        material=("text", "data/shakespeare_char/input.txt"),
        setup=("data/shakespeare_char/prepare.py",),
    ),
    "minGPT adder": Program(
        ("-m", "projects.adder.adder", "--trainer.max_iters=30", "--trainer.batch_size=8", "--trainer.num_workers=0"),
        repository="karpathy/minGPT",
    ),
    "makemore": Program(
        ("makemore.py", "--max-steps", "30", "-n", "1", "--n-layer", "2", "--n-embd", "32", "--batch-size", "8"),
        repository="karpathy/makemore",
    ),
    "mnist": Program(
        ("main.py", "--epochs", "1", "--batch-size", "32", "--no-accel"),
        ("torch", "torchvision"),
        repository="pytorch/examples",
        part="mnist",
        material=("digits", "../data"),
    ),
    "vae": Program(
        ("main.py", "--epochs", "1", "--batch-size", "32", "--no-accel"),
        ("torch", "torchvision"),
        repository="pytorch/examples",
        part="vae",
        material=("digits", "../data"),
    ),
    "mnist_rnn": Program(
        ("main.py", "--epochs", "1", "--batch-size", "32"),
        ("torch", "torchvision"),
        repository="pytorch/examples",
        part="mnist_rnn",
        material=("digits", "../data"),
    ),
    "dcgan": Program(
        ("main.py", "--dataset", "fake", "--niter", "1", "--workers", "0", "--ngf", "4", "--ndf", "4"),
        ("torch", "torchvision"),
        repository="pytorch/examples",
        part="dcgan",
    ),
    "word_language_model, Transformer": Program(
        (
            *("main.py", "--data", "corpus", "--model", "Transformer", "--emsize", "32", "--nhid", "32", "--epochs"),
            *("1", "--use-optimizer", "--lr", "0.001"),
        ),
        bad_call=3,
        repository="pytorch/examples",
        part="word_language_model",
        material=("corpus", "corpus"),
    ),
    "ppo.py": Program(
        ("-m", "cleanrl.ppo", "--total-timesteps", "1024", "--num-steps", "64", "--no-cuda"),
        ("torch", "gymnasium"),
        repository="vwxyzjn/cleanrl",
    ),
    "dqn.py": Program(
        ("-m", "cleanrl.dqn", "--total-timesteps", "700", "--learning-starts", "200", "--no-cuda"),
        ("torch", "gymnasium"),
        bad_call=82,  # a batch that is trained on; most calls choose an action
        repository="vwxyzjn/cleanrl",
    ),
    "timm train.py": Program(
        ("train.py", *TIMM.split(), "--model-ema", "--clip-grad", "1.0", "--num-classes", "2", "--opt", "adamw"),
        ("timm",),
        repository="huggingface/pytorch-image-models",
        material=("pictures", "pictures"),
    ),
    "schedule-free mnist": Program(
        ("main.py", "--epochs", "1", "--batch-size", "32", "--no-cuda"),
        ("schedulefree",),
        repository="facebookresearch/schedule_free",
        part="examples/mnist",
        material=("digits", "../data"),
    ),
    "run_clm.py": Program(
        ("run_clm.py", *CLM.split(), *CLM_SMALL.split(), *SMALL_RUN),
        ("transformers",),
        repository="huggingface/transformers",
        part="examples/pytorch/language-modeling",
        material=("corpus", "corpus", "model", "model"),
    ),
    "Fabric image classifier": Program(
        ("train_fabric.py", "--epochs", "1", "--batch-size", "32"),
        ("lightning",),
        repository="Lightning-AI/pytorch-lightning",
        part="examples/fabric/image_classifier",
        material=("digits", "../../../Datasets"),
    ),
}
QUICK = ("plain loop", "Optuna sweep")
