"""Train a small transformer that several processes share, and recover the decay of AdamW.

    torchrun --nproc-per-node 2 examples/sharded.py  # 15 seconds on two CPU cores, or on two GPUs

Each process has its own sequences, and some rows of every parameter (`fully_shard`, FSDP2).
"""

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import tacit

VOCABULARY, WIDTH, HEADS, BLOCKS, LENGTH, SEQUENCES = 32, 16, 2, 2, 12, 251
DECAY, EPOCHS, STEPS = 0.5, 40, 8


class Block(nn.Module):
    """Attention to earlier tokens, then two layers for each token; both after a layer norm."""

    def __init__(self):
        super().__init__()
        sizes = WIDTH, HEADS, 4 * WIDTH
        self.layer = nn.TransformerEncoderLayer(*sizes, 0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """From (sequences, tokens, width) to the same shape."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        return self.layer(x, mask, is_causal=True)


def transformer() -> nn.Sequential:
    """Log-probabilities of the next token at every position."""
    blocks, norm = (Block() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH)
    last = nn.Linear(WIDTH, VOCABULARY)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, norm, last, nn.LogSoftmax(-1))


def token_losses(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """The loss of every token but the first, given those before it."""
    (tokens,) = batch
    predictions = model(tokens[:, :-1])
    return F.nll_loss(predictions.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")


def main() -> None:
    """Train, estimate, and print the answer in process 0."""
    torch.set_num_threads(1)
    distributed.init_process_group()
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    device = "cuda" if torch.cuda.device_count() >= processes else "cpu"
    mesh = init_device_mesh(device, (processes,))
    start = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=torch.Generator().manual_seed(0))
    tokens = (start + torch.arange(LENGTH) * (1 + start % 3)) % VOCABULARY  # three ways to count
    own = tokens[rank::processes].to(device)

    torch.manual_seed(0)  # the same first weights in every process
    model = transformer().double().to(device)
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * STEPS, eta_min=3e-5)
    averages = tacit.average_epochs(model, optimizer, epochs=5)
    weight = processes * STEPS / (SEQUENCES * (LENGTH - 1))  # fully_shard averages gradients
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(own)).tensor_split(STEPS):
            optimizer.zero_grad()
            (weight * token_losses(model, (own[rows],)).sum()).backward()
            optimizer.step()
            schedule.step()
        averages.end_epoch()

    objective = tacit.Objective.from_batch_loss(model, token_losses, (own,), batch_size=64)
    penalties = tacit.optimizer_penalties(optimizer, model)
    fit = tacit.fit(averages.equations(objective, [*penalties]))
    if rank == 0:
        ((penalty, applied),) = penalties.items()
        low, high = fit.intervals()["training"][penalty.name]
        print(f"{processes} processes, {fit.explained:.1%} explained, {len(fit.problems)} problems")
        print(f"applied {applied:g}, recovered {fit.strengths[penalty.name]:.5f}", end=", ")
        print(f"between {low:.5f} and {high:.5f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
