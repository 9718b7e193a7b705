"""Other people's checkpoints: read without running any of it, scanned, compared, cleaned, loaded into a model."""
