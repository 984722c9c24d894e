"""Finds and judges layer plans for a model, without a server: the model's own arithmetic in plain PyTorch."""
