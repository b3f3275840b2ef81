"""Two models that are trained against each other, each with its own optimizer and its own accumulation.

drivetrain launch --num_processes 2 examples/by_feature/several_models.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator, set_seed


def main() -> None:
    """A generator learns to draw numbers around 3, from a critic that tells them from real ones."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    real = 3 + 0.5 * torch.randn(256 * accelerator.num_processes, 1)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    critic = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=5e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=5e-3)
    generator, critic, generator_optimizer, critic_optimizer, loader = accelerator.prepare(
        generator, critic, generator_optimizer, critic_optimizer, DataLoader(real, batch_size=32, shuffle=True)
    )
    updates = {"generator": 0, "critic": 0}
    for _ in range(6):
        for batch in loader:
            noise = torch.randn(len(batch), 4, device=accelerator.device)
            with accelerator.accumulate(critic):  # the two blocks count their groups apart
                with torch.no_grad():
                    fake = generator(noise)
                scores = critic(torch.cat([batch, fake]))
                wanted = torch.cat([torch.ones_like(batch), torch.zeros_like(fake)])
                accelerator.backward(F.binary_cross_entropy_with_logits(scores, wanted))
                critic_optimizer.step()
                critic_optimizer.zero_grad()
                updates["critic"] += accelerator.sync_gradients
            with accelerator.accumulate(generator):
                scores = critic(generator(noise))
                accelerator.backward(F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores)))
                generator_optimizer.step()
                generator_optimizer.zero_grad()
                critic_optimizer.zero_grad()  # what the generator's loss left in the critic
                updates["generator"] += accelerator.sync_gradients
    with torch.no_grad():
        drawn = accelerator.gather(generator(torch.randn(64, 4, device=accelerator.device)))
    accelerator.print(f"updates: {updates}; mean of what is drawn: {drawn.mean().item():.2f} (3 is right)")
    assert updates == {"generator": 24, "critic": 24}
    accelerator.end_training()


if __name__ == "__main__":
    main()
