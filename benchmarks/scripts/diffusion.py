"""The Trainer of denoising-diffusion-pytorch, on a folder of pictures."""

import sys

from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

model = Unet(dim=8, dim_mults=(1, 2), flash_attn=False)
diffusion = GaussianDiffusion(model, image_size=16, timesteps=20, sampling_timesteps=4)
Trainer(
    diffusion,
    sys.argv[1],
    train_batch_size=4,
    train_num_steps=20,
    gradient_accumulate_every=4,
    save_and_sample_every=1000,
    calculate_fid=False,
    num_samples=4,
).train()
