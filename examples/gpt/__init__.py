"""The parts of the demo: text, model, training loop, checkpoints, loss curve."""
