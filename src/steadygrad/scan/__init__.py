"""Foreign checkpoints: read without running their code, scanned, compared, cleaned, loaded into a model."""
