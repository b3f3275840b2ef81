"""Learn to write like the Python manual: a small transformer that predicts the next character.

    python examples/text/train.py
    drivetrain launch --num_processes 2 --mixed_precision bf16 examples/text/train.py --project_dir runs/text
    drivetrain launch --num_processes 2 examples/text/train.py --project_dir runs/text --resume

The text is the language reference that comes with every Python, as `help()` shows it: about 700 000 characters.
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator, ProjectConfiguration, set_seed
from drivetrain.utils import tqdm


class Passages(Dataset[Tensor]):
    """Passages of ``length`` + 1 characters each, as numbers; the last one begins the next passage."""

    def __init__(self, codes: Tensor, length: int) -> None:
        self.codes = codes
        self.length = length

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.codes[start : start + self.length + 1]


class Writer(nn.Module):
    """A transformer decoder: characters (n, t) to logits of the next ones (n, t, characters)."""

    def __init__(self, characters: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(characters, width)
        self.place = nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, characters, bias=False)
        self.head.weight = self.embed.weight  # tied, as in most language models
        for table in (self.embed, self.place):  # small, and alike: places must not drown the characters
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        hidden = self.embed(characters) + self.place(places)
        later = nn.Transformer.generate_square_subsequent_mask(len(places), device=characters.device)
        return self.head(self.blocks(hidden, mask=later, is_causal=True))

    @torch.no_grad()
    def write(self, start: Tensor, length: int) -> Tensor:
        """Go on from ``start`` (1, t) by ``length`` characters."""
        text = start
        for _ in range(length):
            logits = self(text[:, -self.context :])[:, -1]
            text = torch.cat([text, torch.multinomial(F.softmax(logits.float(), dim=-1), 1)], dim=1)
        return text


def loss_of(model: nn.Module, passages: Tensor) -> Tensor:
    """Mean cross-entropy of the next character, in nats, for each passage: (n,)."""
    logits = model(passages[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), passages[:, 1:], reduction="none").mean(dim=1)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Mean loss over all held-out passages, each counted once whatever the number of processes."""
    model.eval()
    losses = torch.cat([accelerator.gather_for_metrics(loss_of(model, passages)) for passages in loader])
    model.train()
    assert len(losses) == len(loader.dataset)
    return losses.mean().item()


def arguments() -> argparse.Namespace:
    """What can be chosen on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2, help="passes over the text")
    parser.add_argument("--characters", type=int, default=None, help="use only so much of the text")
    parser.add_argument("--context", type=int, default=64, help="characters the model sees")
    parser.add_argument("--batch_size", type=int, default=32, help="passages in a batch of one process")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--project_dir", default=None, help="keep checkpoints, metrics and the model here")
    parser.add_argument("--resume", action="store_true", help="go on from the project's latest checkpoint")
    return parser.parse_args()


def main() -> None:
    """Train, evaluate and save after every epoch, and write a few lines."""
    args = arguments()
    project = ProjectConfiguration(args.project_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project, log_with=None if args.project_dir is None else "jsonl")
    set_seed(args.seed)
    accelerator.init_trackers("metrics", config=vars(args))

    text = "\n".join(topics[name] for name in sorted(topics))[: args.characters]
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(character) for character in text])
    held_out = max(len(codes) // 10, args.context + 1)
    loader = DataLoader(Passages(codes[:-held_out], args.context), args.batch_size, shuffle=True)
    test_loader = DataLoader(Passages(codes[-held_out:], args.context), args.batch_size)

    model = Writer(len(alphabet), args.width, args.layers, heads=4, context=args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    total = len(loader) * args.epochs
    # Warm up over a tenth of the run, then decay; in batches of the loader as it is here, whatever the processes.
    warm = max(total // 10, 1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / warm, max(1 - n / total, 0.05)))
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )
    if args.resume:
        accelerator.load_state()

    loss = evaluate(accelerator, model, test_loader)
    accelerator.print(f"before: {loss:.3f} nats a character ({math.log(len(alphabet)):.3f} is chance)")
    for epoch in range(loader.epoch, args.epochs):
        for passages in tqdm(loader, desc=f"epoch {epoch + 1}"):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, passages).mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        loss = evaluate(accelerator, model, test_loader)
        accelerator.log({"test loss": loss}, step=epoch + 1)
        accelerator.print(f"epoch {epoch + 1}: {loss:.3f} nats a character")
        if args.project_dir is not None:
            accelerator.save_state()

    if args.project_dir is not None:
        accelerator.save_model(model, f"{args.project_dir}/model")
    writer = accelerator.unwrap_model(model).eval()
    if not accelerator.run.capabilities.shards_params and accelerator.is_main_process:
        start = torch.tensor([[alphabet.index("T")]], device=accelerator.device)
        written = writer.write(start, 80)[0]
        print("".join(alphabet[code] for code in written))
    accelerator.end_training()


if __name__ == "__main__":
    main()
