"""Accelerate's loop: accumulation, clipping, gathered metrics, an unwrapped model, a state to resume from."""

import json
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
set_seed(11)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
inputs = torch.randn(44, 6)
labels = (inputs.sum(1) > 0).long()
batches = DataLoader(TensorDataset(inputs, labels), batch_size=4, shuffle=True)
held_out = DataLoader(TensorDataset(inputs[:13], labels[:13]), batch_size=4)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
model, optimizer, batches, held_out, scheduler = accelerator.prepare(
    model, optimizer, batches, held_out, scheduler
)
folder = broadcast_object_list([tempfile.mkdtemp()])[0]
accuracies = []
for epoch in range(3):
    model.train()
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right, seen = 0, 0
    for x, y in held_out:
        with torch.no_grad():
            found, wanted = accelerator.gather_for_metrics((model(x).argmax(1), y))
        right, seen = right + int((found == wanted).sum()), seen + len(wanted)
    accuracies.append([right, seen])
    if epoch == 0:
        accelerator.save_state(folder)
    if epoch == 1:
        accelerator.load_state(folder)
accelerator.wait_for_everyone()
plain = accelerator.unwrap_model(model)
if accelerator.is_main_process:
    result = {
        "accuracies": accuracies,
        "type": type(plain).__name__,
        "saved": sorted(accelerator.get_state_dict(model)),
    }
    print("result:", json.dumps(result))
dist.destroy_process_group()
