"""A small complete training loop on one Guard: epochs, validation, early stopping, accumulation, stages, EMA, resume.

`Trainer(model, config).train(train_loader, val_loader)`; subclasses define the loss and the evaluation.
"""

from steadygrad.config.trainer import TrainerConfig
from steadygrad.trainer.files import load_trained
from steadygrad.trainer.stages import Stage
from steadygrad.trainer.trainer import Trainer

__all__ = ["Stage", "Trainer", "TrainerConfig", "load_trained"]
