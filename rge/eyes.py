"""Teach the eyes of a backbone that is built from nothing: name the pictured thing, for the vision tower alone.

A pretrained backbone sees; one built by `rge.scratch` does not, and the joint objective is a slow teacher of vision.
This stage trains the vision tower and its merger as a classifier over the concepts of naming records, several
hundred pictures a second on two CPU cores, and throws the classifier away.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from rge import dist
from rge.images import load_image
from rge.optim import learning_rate, make_optimizer, set_learning_rate
from rge.sources import RecordFile


def naming_pictures(path: str | Path, side_px: int) -> tuple[Tensor, Tensor, int]:
    """Every distinct picture of the queries of a record file, labelled by the identity of what it shows.

    Args:
        path: records whose queries are one picture and whose positives show the same thing.
        side_px: pictures are resized to this square.

    Returns:
        (N, 3, side, side) float pictures in [0, 1], (N,) int64 labels, and the number of labels.
    """
    records = RecordFile(path)
    pictures: dict[str, str] = {}
    for index in range(len(records)):
        record = records[index]
        target = record.positives[0]
        for image in record.query.images:
            pictures.setdefault(image, target.identity or target.id)
    names = sorted(set(pictures.values()))
    label = {name: number for number, name in enumerate(names)}
    arrays = [
        np.asarray(load_image(image).resize((side_px, side_px), Image.Resampling.BICUBIC)) for image in pictures
    ]
    stacked = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255
    return stacked, torch.tensor([label[name] for name in pictures.values()]), len(names)


def augment(picture_B3HW: Tensor, generator: torch.Generator) -> Tensor:
    """Random affine map, mirror and colour mix of a batch of drawings on white, all rows at once."""
    B = picture_B3HW.shape[0]

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(B, *shape, generator=generator) * (high - low) + low

    zoom, angle, stretch = uniform(0.7, 1.15), uniform(-0.35, 0.35), uniform(0.85, 1.18)
    mirror = torch.where(torch.rand(B, generator=generator) < 0.5, -1.0, 1.0)
    theta = torch.zeros(B, 2, 3)
    theta[:, 0, 0] = angle.cos() / zoom * mirror * stretch
    theta[:, 0, 1] = -angle.sin() / zoom
    theta[:, 1, 0] = angle.sin() / zoom * mirror
    theta[:, 1, 1] = angle.cos() / zoom / stretch
    theta[:, :, 2] = uniform(-0.2, 0.2, 2)
    grid = F.affine_grid(theta, list(picture_B3HW.shape), align_corners=False)
    moved = 1 - F.grid_sample(1 - picture_B3HW, grid, align_corners=False)  # zero padding becomes white
    mix = torch.eye(3) + torch.randn(B, 3, 3, generator=generator) * 0.1
    mixed = torch.einsum("bij,bjhw->bihw", mix, moved - 0.5)
    contrast, brightness = uniform(0.7, 1.3, 1, 1, 1), uniform(-0.1, 0.1, 1, 1, 1)
    return (mixed * contrast + 0.5 + brightness).clamp(0, 1)


def patches(picture_B3HW: Tensor, patch: int, merge: int, temporal: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalise and cut pictures into patches in the order of Qwen's image processor: (B * patches, patch dimension).

    Done here for whole batches on tensors; a test holds it against the processor's own result.
    """
    B, channels, height, width = picture_B3HW.shape
    normalised = (picture_B3HW - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    rows, columns = height // patch // merge, width // patch // merge
    cut = normalised.reshape(B, channels, rows, merge, patch, columns, merge, patch).permute(0, 2, 5, 3, 6, 1, 4, 7)
    flat = cut.reshape(B * rows * columns * merge * merge, channels, 1, patch, patch)
    return flat.expand(-1, -1, temporal, -1, -1).reshape(flat.shape[0], -1)


class _Namer(nn.Module):
    def __init__(self, visual: nn.Module, num_labels: int):
        super().__init__()
        self.visual, self.width = visual, visual.config.out_hidden_size
        self.head = nn.Linear(self.width, num_labels)

    def forward(self, values: Tensor, grid: Tensor) -> Tensor:
        features = self.visual(values, grid_thw=grid).pooler_output
        return self.head(features.reshape(grid.shape[0], -1, self.width).mean(dim=1))


def teach(
    visual: nn.Module,
    accelerator: Accelerator,
    image_processor,
    pictures: Tensor,
    labels: Tensor,
    num_labels: int,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
) -> float:
    """Train a Qwen vision tower to name pictures.

    Args:
        visual: the tower with its merger, changed in place, on every process alike.
        accelerator: the processes that share each batch.
        image_processor: gives patch sizes, mean and standard deviation.
        pictures: (N, 3, side, side) in [0, 1].
        labels: (N,) int64.
        num_labels: number of classes.
        steps: optimizer steps.
        batch_size: pictures a step, all processes together.
        lr: peak learning rate, cosine schedule; Muon needs a third of AdamW's steps here.
        seed: of batches, augmentation and classifier.

    Returns:
        Accuracy on this process's augmented training pictures over the last tenth of the steps.
    """
    generator = torch.Generator().manual_seed(seed * 1000 + dist.rank())
    torch.manual_seed(seed)
    namer = _Namer(visual, num_labels)
    optimizer: torch.optim.Optimizer = make_optimizer(
        namer, name="muon", lr=lr, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.05
    )
    model, optimizer = accelerator.prepare(namer, optimizer)
    share = batch_size // dist.world_size()
    side = pictures.shape[-1] // image_processor.patch_size
    grid = torch.tensor([[1, side, side]] * share, device=accelerator.device)
    correct = counted = 0
    bar = tqdm(range(steps), desc="eyes", unit="step", dynamic_ncols=True, disable=not accelerator.is_main_process)
    for step in bar:
        rate = learning_rate(step, num_steps=steps, lr=lr, warmup_steps=50, schedule="cosine", min_lr_ratio=0.0)
        set_learning_rate(optimizer, rate)
        rows = torch.randint(len(pictures), (share,), generator=generator)
        values = patches(
            augment(pictures[rows], generator),
            image_processor.patch_size,
            image_processor.merge_size,
            image_processor.temporal_patch_size,
            image_processor.image_mean,
            image_processor.image_std,
        ).to(accelerator.device)
        label = labels[rows].to(accelerator.device)
        logits = model(values, grid)
        loss = F.cross_entropy(logits, label, label_smoothing=0.1)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= steps - max(1, steps // 10):
            correct += int((logits.argmax(dim=1) == label).sum())
            counted += share
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3g}")
    accelerator.free_memory()
    return correct / counted
