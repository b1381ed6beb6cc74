"""Text from a trained model."""

from __future__ import annotations

import torch
from torch import Tensor

import portable as pt
from gpt.model import GPT


@torch.no_grad()
def generate(model: GPT, prompt: Tensor, count: int, temperature: float, seed: int) -> Tensor:
    """Draw characters one by one, each from the distribution after the last ``context`` characters.

    The draw is made on the CPU in float32, so that a seed means the same draws on every device.

    Args:
        model: on `pt.device()`.
        prompt: int64 of shape (n,), n >= 1.
        count: characters to add.
        temperature: divides the logits; towards 0 the likeliest character wins always.
        seed: of the draws.

    Returns:
        Prompt and continuation, int64 of shape (n + count,) on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    context = model.config.context
    numbers = prompt.tolist()
    was_training = model.training
    model.eval()
    for _ in range(count):
        window = torch.tensor([numbers[-context:]], device=pt.device())
        with pt.autocast():
            logits = model(window)[0, -1]
        probabilities = torch.softmax(logits.float().cpu() / temperature, dim=0)
        numbers.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    model.train(was_training)
    return torch.tensor(numbers)
