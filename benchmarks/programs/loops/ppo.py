"""Reinforcement learning with gradients averaged by hand: one flat allreduce a minibatch, as in CleanRL's PPO."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical

local_rank, world_size = int(os.getenv("LOCAL_RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
if world_size > 1:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=world_size)
    assert dist.get_world_size() == world_size


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def value_of(self, x):
        return self.critic(self.network(x))

    def act(self, x, action=None):
        hidden = self.network(x)
        chosen = Categorical(logits=self.actor(hidden))
        action = chosen.sample() if action is None else action
        return action, chosen.log_prob(action), chosen.entropy(), self.critic(hidden)


class Poles:
    """A small environment: push the state back to zero."""

    def __init__(self, n, generator):
        self.generator, self.state = generator, torch.randn(n, 4, generator=generator)

    def step(self, action):
        push = (2.0 * action - 1.0).unsqueeze(1) * torch.tensor([0.0, 0.2, 0.0, -0.1])
        self.state = 0.95 * self.state + push + 0.05 * torch.randn(self.state.shape, generator=self.generator)
        return self.state, -self.state.square().mean(1)


torch.manual_seed(1)
agent = Agent()
torch.manual_seed(1 + local_rank)
optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3, eps=1e-5)
environments, steps = 6, 8
poles = Poles(environments, torch.Generator().manual_seed(9 + local_rank))
observation, rewards_of = poles.state, []
for _ in range(3):
    seen, actions, old_logs, rewards, values = [], [], [], [], []
    for _ in range(steps):
        with torch.no_grad():
            action, log, _, value = agent.act(observation)
        seen.append(observation)
        observation, reward = poles.step(action)
        actions.append(action), old_logs.append(log), rewards.append(reward), values.append(value.flatten())
    with torch.no_grad():
        following, advantages = agent.value_of(observation).flatten(), []
        last = torch.zeros(environments)
        for reward, value in zip(reversed(rewards), reversed(values), strict=True):
            last = reward + 0.99 * following - value + 0.99 * 0.95 * last
            advantages.insert(0, last)
            following = value
    batch = [torch.stack(part).flatten(0, 1) for part in (seen, actions, old_logs, advantages, values)]
    for _ in range(2):
        for chosen in torch.randperm(environments * steps).chunk(3):
            x, action, old_log, advantage, value = (part[chosen] for part in batch)
            _, log, entropy, new_value = agent.act(x, action)
            ratio = (log - old_log).exp()
            advantage_scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            policy = torch.max(-advantage_scaled * ratio, -advantage_scaled * ratio.clamp(0.8, 1.2)).mean()
            loss = (
                policy + 0.25 * (new_value.flatten() - advantage - value).square().mean() - 0.01 * entropy.mean()
            )
            optimizer.zero_grad()
            loss.backward()
            if world_size > 1:
                gathered = [p.grad.view(-1) for p in agent.parameters() if p.grad is not None]
                summed = torch.cat(gathered)
                dist.all_reduce(summed, op=dist.ReduceOp.SUM)
                offset = 0
                for p in agent.parameters():
                    if p.grad is not None:
                        p.grad.data.copy_(summed[offset : offset + p.numel()].view_as(p.grad.data) / world_size)
                        offset += p.numel()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    rewards_of.append(torch.stack(rewards).mean().item())

if local_rank == 0:
    print("result:", json.dumps({"rewards": rewards_of}))
if world_size > 1:
    dist.destroy_process_group()
