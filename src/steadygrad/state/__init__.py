"""What measuring, capture, checkpoints and diagnosis share: trees of tensors, random state, shards, names."""
