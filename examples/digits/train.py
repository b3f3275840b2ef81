"""Recognise handwritten digits: one loop for any device, any number of processes and any backend.

    python examples/digits/train.py
    drivetrain launch --num_processes 2 examples/digits/train.py
    torchrun --nproc-per-node 2 examples/digits/train.py

The data is scikit-learn's bundled set: 1797 images of 8 x 8 pixels, ten classes.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from drivetrain import Accelerator, set_seed


def load_data(test_share: float = 0.2) -> tuple[TensorDataset, TensorDataset]:
    """Train and test set; pixels from 0 to 1, shape (1, 8, 8)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test = int(len(order) * test_share)
    parts = order[test:], order[:test]
    return tuple(TensorDataset(images[part], labels[part]) for part in parts)


def build_model(width: int) -> nn.Module:
    """A small convolutional network: images (n, 1, 8, 8) to logits (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 10),
    )


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Accuracy over the whole test set, each image counted once whatever the number of processes."""
    model.eval()
    right, seen = 0, 0
    for images, labels in loader:
        with torch.no_grad():
            predictions = model(images).argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        right += int((predictions == labels).sum())
        seen += len(labels)
    model.train()
    assert seen == len(loader.dataset), f"{seen} of {len(loader.dataset)} test images were counted"
    return right / seen


def weights_are_equal(accelerator: Accelerator, model: nn.Module, images: torch.Tensor) -> bool:
    """Whether every process ended with the same model: one that gives the same answers, to the last bit.

    Asked of what the model computes, since a backend may keep only a part of the weights on each process.
    """
    model.eval()
    with torch.no_grad():
        answers = model(images.to(accelerator.device))
    everyone = accelerator.gather(answers.unsqueeze(0))
    return bool((everyone == everyone[0]).all())


def main() -> None:
    """Train, evaluate after every epoch, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training set")
    parser.add_argument("--batch_size", type=int, default=32, help="images in a batch of one process")
    parser.add_argument("--lr", type=float, default=1e-2, help="peak learning rate")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(args.seed)
    train_set, test_set = load_data()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    model = build_model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=len(train_loader) * args.epochs)

    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    accuracy = 0.0
    for epoch in range(args.epochs):
        progress = tqdm(train_loader, desc=f"epoch {epoch + 1}", disable=not accelerator.is_local_main_process)
        for images, labels in progress:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.set_postfix(loss=f"{loss.item():.3f}")
        accuracy = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch + 1}: test accuracy {accuracy:.4f}")

    equal = weights_are_equal(accelerator, model, test_set.tensors[0][:32])
    accelerator.print(f"processes: {accelerator.num_processes}, weights equal on all of them: {equal}")
    if not equal:
        raise SystemExit("the processes ended with different weights")
    accelerator.print(f"test accuracy: {accuracy:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
