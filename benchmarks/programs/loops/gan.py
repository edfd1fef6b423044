"""Two wrappers in one loop: a generator, and a discriminator through which the generator's gradients flow."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(10, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    generator = DDP(generator, broadcast_buffers=True)
    discriminator = DDP(discriminator, broadcast_buffers=False)
    of_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(8):
        real = torch.rand(8, 10) * 0.5 + 0.25
        of_real, of_fake = torch.ones(8, 1), torch.zeros(8, 1)
        discriminator.zero_grad()
        error_real = criterion(discriminator(real), of_real)
        error_real.backward()
        fake = generator(torch.randn(8, 6))
        error_fake = criterion(discriminator(fake.detach()), of_fake)
        error_fake.backward()
        of_d.step()
        if step % 2 == 0:  # the generator learns in every second step
            generator.zero_grad()
            error_g = criterion(discriminator(fake), of_real)
            error_g.backward()
            of_g.step()
        losses.append([error_real.item(), error_fake.item(), error_g.item()])
    if dist.get_rank() == 0:
        print("result:", json.dumps({"losses": losses, "mean": generator.module[1].running_mean.tolist()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
