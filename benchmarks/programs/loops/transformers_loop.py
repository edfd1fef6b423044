"""Transformers' Trainer on a small GPT-2 made from its configuration: accumulation, evaluation, a checkpoint."""

import json
import tempfile

import torch
import torch.distributed as dist
import transformers

dist.init_process_group("gloo")
transformers.set_seed(5)
configuration = transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2)
model = transformers.GPT2LMHeadModel(configuration)
texts = (torch.arange(16) + torch.randint(30, (36, 1), generator=torch.Generator().manual_seed(2))) % 30
data = [{"input_ids": text, "labels": text} for text in texts]
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
arguments = transformers.TrainingArguments(
    output_dir=folder[0],
    per_device_train_batch_size=3,
    gradient_accumulation_steps=2,
    max_steps=6,
    learning_rate=1e-2,
    logging_steps=2,
    save_steps=4,
    eval_strategy="steps",
    eval_steps=3,
    report_to=[],
    use_cpu=True,
    ddp_backend="gloo",
    disable_tqdm=True,
)
trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:7])
trainer.train()
if trainer.is_world_process_zero():
    losses = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history]
    print("result:", json.dumps({"losses": losses[:-1], "steps": trainer.state.global_step}))
dist.destroy_process_group()
