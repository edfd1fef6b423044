"""Self-distillation as in DINO: a teacher that follows the student, cancelled gradients, a common centre."""

import json
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 12, bias=False))
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last_layer(functional.normalize(self.mlp(x), dim=-1))


class MultiCrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = Head()

    def forward(self, crops):
        crops = crops if isinstance(crops, list) else [crops]
        return self.head(torch.cat([self.backbone(crop) for crop in crops]))


class Loss(nn.Module):
    def __init__(self, crops):
        super().__init__()
        self.crops = crops
        self.register_buffer("center", torch.zeros(1, 12))

    def forward(self, student, teacher):
        students = (student / 0.1).chunk(self.crops)
        teachers = functional.softmax((teacher - self.center) / 0.04, dim=-1).detach().chunk(2)
        terms = [
            torch.sum(-q * functional.log_softmax(v, dim=-1), dim=-1).mean()
            for i, q in enumerate(teachers)
            for j, v in enumerate(students)
            if i != j
        ]
        self.update_center(teacher)
        return sum(terms) / len(terms)

    @torch.no_grad()
    def update_center(self, teacher):
        center = torch.sum(teacher, dim=0, keepdim=True)
        dist.all_reduce(center)
        self.center = self.center * 0.9 + center / (len(teacher) * dist.get_world_size()) * 0.1


def clip_gradients(model, clip):
    norms = []
    for _, p in model.named_parameters():
        if p.grad is not None:
            norm = p.grad.data.norm(2)
            norms.append(norm.item())
            if clip / (norm + 1e-6) < 1:
                p.grad.data.mul_(clip / (norm + 1e-6))
    return norms


def cancel_gradients_last_layer(epoch, model, frozen_epochs):
    if epoch < frozen_epochs:
        for name, p in model.named_parameters():
            if "last_layer" in name:
                p.grad = None


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    student, teacher = MultiCrop(), MultiCrop()
    teacher = DDP(teacher)  # it has BatchNorm
    teacher_without_ddp = teacher.module
    student = DDP(student)
    teacher_without_ddp.load_state_dict(student.module.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    loss_of = Loss(crops=4)
    decayed = [p for p in student.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in student.parameters() if p.requires_grad and p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for epoch in range(3):
        for i in range(4):
            step = 4 * epoch + i
            for n, group in enumerate(optimizer.param_groups):
                group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / 12))
                if n == 0:
                    group["weight_decay"] = 0.04 + 0.03 * step
            x = torch.randn(6, 10)
            crops = [x + 0.1 * torch.randn_like(x) for _ in range(4)]
            loss = loss_of(student(crops), teacher(crops[:2]))
            optimizer.zero_grad()
            loss.backward()
            clip_gradients(student, 0.3)
            cancel_gradients_last_layer(epoch, student, frozen_epochs=1)
            optimizer.step()
            with torch.no_grad():
                momentum = 0.9 + 0.01 * step / 12
                pairs = zip(student.module.parameters(), teacher_without_ddp.parameters(), strict=True)
                for q, k in pairs:
                    k.data.mul_(momentum).add_((1 - momentum) * q.detach().data)
            losses.append(loss.item())
    if dist.get_rank() == 0:
        total = sum(p.double().abs().sum().item() for p in teacher.parameters())
        print("result:", json.dumps({"losses": losses, "teacher": total, "center": loss_of.center.tolist()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
