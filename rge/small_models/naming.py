"""Pretraining of a small backbone's vision tower and merger: naming what a picture shows.

The vision tower of a backbone built by `rge.small_models.build` is untrained, its text model cannot read the features, and the joint
objective teaches both only slowly. This stage has two losses over augmented pictures:

* choosing: among all names, the right one's summed token embeddings must have the largest inner product with the features,
  averaged over a picture's placeholders.
* saying: the text model writes the name after the picture, in a row of two dozen tokens without a chat template.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn

from rge.checkpoints.training_state import States
from rge.common.images import load_image
from rge.data.sources import RecordError, RecordFile
from rge.distributed import collectives as dist
from rge.distributed.stop_signals import exit_after, received_by_any
from rge.identity.run_identity import Identity, differences, in_words
from rge.logs import Logs
from rge.model.backbone import vision_parameters
from rge.model.families import family_of
from rge.model.hub_model import HubModel
from rge.optim.config import OptimConfig, StageConfig
from rge.optim.optimizers import learning_rate, make_optimizer, set_learning_rate
from rge.small_models.config import Naming


def naming_pictures(path: str | Path, side_px: int) -> tuple[Tensor, Tensor, list[str]]:
    """The distinct query pictures of a record file, whose oracle rationales name them ("This is a padlock.").

    Returns:
        (N, 3, side, side) float pictures in [0, 1], resized to `side_px`; (N,) int64 labels; and the labels' names.
    """
    records = RecordFile(path, need_rationale=True)
    named: dict[str, str] = {}
    for record in map(records.__getitem__, range(len(records))):
        for image in record.query.pictures:
            named.setdefault(str(image), record.positives[0].rationale or "")
    if not named:
        raise RecordError("no query shows a picture", path).about("naming.records")
    side = (side_px, side_px)
    arrays = [np.asarray(load_image(image).resize(side, Image.Resampling.BICUBIC)) for image in named]
    names = sorted({*named.values()})
    label = {name: number for number, name in enumerate(names)}
    stacked = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255
    return stacked, torch.tensor([label[name] for name in named.values()]), names


def augment(picture_B3HW: Tensor, generator: torch.Generator) -> Tensor:
    """Random affine map, mirror and colour mix of a batch of drawings on white."""
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


def restyle(picture_B3HW: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Augment the properties in which families of drawings differ: palette, tone, line width, sharpness, background.

    Each change applies to each picture independently, with a likelihood that grows with `share`, from 0 (never) to 1. Pictures
    are in [0, 1].
    """
    picture_B3HW = picture_B3HW.clone()

    def change(likelihood: float, how: Callable[[Tensor], Tensor]) -> None:
        struck = (torch.rand(len(picture_B3HW), generator=generator) < likelihood * share).nonzero().flatten()
        if len(struck):
            picture_B3HW[struck] = how(picture_B3HW[struck]).clamp(0, 1)

    def random(picture: Tensor, channels: int) -> Tensor:
        return torch.rand(len(picture), channels, 1, 1, generator=generator)

    def palette(picture: Tensor) -> Tensor:
        mix = torch.eye(3) + 0.4 * torch.randn(len(picture), 3, 3, generator=generator)
        mix = mix / mix.sum(dim=2, keepdim=True).clamp(min=0.3)  # rows that sum to one keep white white
        return torch.einsum("bij,bjhw->bihw", mix, picture)

    def darkest(picture: Tensor) -> Tensor:
        return -F.max_pool2d(-picture, 3, 1, 1)

    def lightest(picture: Tensor) -> Tensor:
        return F.max_pool2d(picture, 3, 1, 1)

    def posterised(picture: Tensor) -> Tensor:
        levels = 2 + 3 * random(picture, 1)
        return (picture * levels).round() / levels

    change(0.5, palette)
    change(0.3, lambda picture: picture.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1))
    change(0.4, lambda picture: picture.clamp(min=1e-3) ** (2.4 * random(picture, 3) - 1.2).exp())
    change(0.3, darkest)  # strokes grow
    change(0.3, lightest)  # strokes shrink
    change(0.3, lambda picture: F.avg_pool2d(picture, 5, 1, 2, count_include_pad=False))
    change(0.3, posterised)
    change(0.2, lambda picture: 1 - 1.5 * (lightest(picture) - darkest(picture)))  # outlines alone
    change(0.2, lambda picture: 1 - picture)
    change(0.3, lambda picture: picture * (0.4 + 0.6 * random(picture, 3)))  # a coloured ground
    return picture_B3HW


def patches(picture_B3HW: Tensor, image_processor: Any) -> Tensor:
    """Normalise and cut pictures into patches in the order of Qwen's image processor: (B * patches, patch dimension)."""
    B, channels, height, width = picture_B3HW.shape
    patch, merge = image_processor.patch_size, image_processor.merge_size
    mean, std = (
        torch.tensor(values).view(1, 3, 1, 1)
        for values in (image_processor.image_mean, image_processor.image_std)
    )
    normalised = (picture_B3HW - mean) / std
    rows, columns = height // patch // merge, width // patch // merge
    cut = normalised.reshape(B, channels, rows, merge, patch, columns, merge, patch).permute(
        0, 2, 5, 3, 6, 1, 4, 7
    )
    flat = cut.reshape(B * rows * columns * merge * merge, channels, 1, patch, patch)
    frames = image_processor.temporal_patch_size
    return flat.expand(-1, -1, frames, -1, -1).reshape(flat.shape[0], -1)


class _Namer(nn.Module):
    """Both losses in one forward. K = names, B = pictures, P = tokens of a picture, T = tokens of the longest name."""

    name_KT: Tensor
    real_KT: Tensor
    picture_P: Tensor
    position_31T: Tensor

    def __init__(self, model: HubModel, processor: Any, name_ids: list[list[int]], grid: Tensor):
        super().__init__()
        self.model, config = model, model.config
        self.width = config.get_text_config().hidden_size
        longest = max(map(len, name_ids))
        pad_id = processor.tokenizer.pad_token_id
        rows = [ids + [pad_id] * (longest - len(ids)) for ids in name_ids]
        lengths = torch.tensor([len(ids) for ids in name_ids])
        self.register_buffer("name_KT", torch.tensor(rows), persistent=False)
        self.register_buffer("real_KT", torch.arange(longest) < lengths[:, None], persistent=False)
        placeholders = int(grid.prod()) // config.vision_config.spatial_merge_size**2
        picture = [
            config.vision_start_token_id,
            *[config.image_token_id] * placeholders,
            config.vision_end_token_id,
        ]
        self.register_buffer("picture_P", torch.tensor(picture), persistent=False)
        ids = torch.cat([self.picture_P, self.name_KT[0]])
        types = torch.eq(ids, config.image_token_id).long()
        positions = family_of(model).positions(processor.image_processor, ids, types, grid)
        self.register_buffer("position_31T", positions[:, None], persistent=False)
        # Token embeddings start small (0.02); without a scale the logits would start, and stay, flat.
        self.log_scale = nn.Parameter(torch.tensor(3.0))

    def forward(
        self, values: Tensor, grid: Tensor, label_B: Tensor, write: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses of choosing and, with `write`, saying, and which rows (B) were chosen correctly."""
        B = len(label_B)
        family = family_of(self.model)
        features = family.features(self.model, values, grid)
        words = self.model.get_input_embeddings().weight
        name_KD = (words[self.name_KT] * self.real_KT[..., None]).sum(dim=1)
        choice_BK = features.reshape(B, -1, self.width).mean(dim=1) @ name_KD.T * self.log_scale.exp()
        choosing = F.cross_entropy(choice_BK, label_B, label_smoothing=0.1)
        chosen_B = choice_BK.argmax(dim=1) == label_B
        if not write:
            return choosing, choosing.new_zeros(()), chosen_B

        # A causal model needs no mask for padding after the name.
        name_BT, real_BT = self.name_KT[label_B], self.real_KT[label_B]
        input_ids = torch.cat([self.picture_P.expand(B, -1), name_BT], dim=1)
        # A picture's placeholders are between its first and last token.
        place = torch.arange(input_ids.numel(), device=input_ids.device).view_as(input_ids)
        inputs = {
            "input_ids": input_ids,
            "position_ids": self.position_31T.expand(-1, B, -1),
            "attention_mask": None,
        }
        shown_F = place[:, 1 : len(self.picture_P) - 1].flatten()
        hidden = family.states(self.model, features, shown_F, inputs)
        before_name = hidden[:, len(self.picture_P) - 1 : -1][real_BT]
        logits = self.model.get_output_embeddings()(before_name)
        return choosing, F.cross_entropy(logits, name_BT[real_BT]), chosen_B


@dataclass
class _Progress:
    """States and logs of `teach`; all processes call every method."""

    accelerator: Accelerator
    namer: _Namer
    generator: torch.Generator
    folder: Path
    config: Naming
    identity: Identity | None

    def __post_init__(self) -> None:
        self.states = States(
            self.accelerator, self.namer, None, self.folder / "state", keep_last=2, background=False,
            generators=[self.generator],
        )  # fmt: skip
        self.first_step = self.correct = self.counted = 0
        if (found := self.states.latest()) is not None:
            self._path, done = found
            self.first_step, self.correct, self.counted = done["step"], done["correct"], done["counted"]
            changed = in_words(differences(done["identity"] or {}, self.identity or {}))
            self.states.announce("naming", self.first_step, self._path, changed)
        steps, every = self.config.steps, self.config.log_every
        self.logs = Logs(self.accelerator, self.folder, "naming", self.first_step, steps, every)

    def begin(self, phase: range, optimizer: torch.optim.Optimizer) -> range:
        """The phase's unfinished steps, of which there is at least one."""
        self.states.optimizer = optimizer
        rest = phase[max(self.first_step - phase.start, 0) :]
        if rest.start > phase.start:
            self.states.load(self._path)
        self._last_step = phase.stop
        return rest

    def after_step(self, step: int, chosen_B: Tensor, report: dict[str, float]) -> None:
        """Count and log a step, counted from one; save every so often, and exit after a signal."""
        if step > self.config.steps - max(1, self.config.steps // 10):
            self.correct += int(chosen_B.sum())
            self.counted += len(chosen_B)
        self.logs.step(step, report)
        with self.logs.saving():
            self._save(step)

    def _save(self, step: int) -> None:
        self.states.check()
        received = received_by_any(self.accelerator.device)
        # A phase ends without a state: its optimizer is not the next one's.
        if step == self._last_step or not (received or step % self.config.save_every == 0):
            return
        counts = {"correct": self.correct, "counted": self.counted}
        self.states.save(step, counts | {"identity": self.identity})
        if received:
            self.states.wait()
            exit_after(received, self.accelerator, "naming", step, self.config.steps, self.states.folder)


def teach(
    model: HubModel,
    accelerator: Accelerator,
    processor,
    pictures: Tensor,
    labels: Tensor,
    names: Sequence[str],
    folder: Path,
    config: Naming,
    *,
    seed: int = 0,
    train_text: bool = True,
    identity: Identity | None = None,
) -> float:
    """Train a backbone in place to name pictures, with Muon, which needs a third of AdamW's steps here, and a cosine schedule.

    Writes ``metrics.jsonl`` and ``state/`` into `folder`. Called again after an interruption, with the same arguments and as many
    processes, it resumes; on one process, the result is that of an uninterrupted run, bit for bit. Without `train_text`, the
    text model is frozen, and the merger learns its representation. `pictures`, `labels` and `names` are those of `naming_pictures`; `identity`
    is kept with each state.

    Returns:
        Accuracy of choosing on this process's augmented pictures, over the last tenth of the steps.

    Raises:
        CheckpointError: a state could not be written or read, or another number of processes saved it.
        SystemExit: a signal has been received (`stop_after_this_step_at_signals`) and a state is saved.
    """
    generator = torch.Generator().manual_seed(seed * 1000 + dist.rank())
    namer, grid = _namer(model, processor, names, pictures.shape[-1])
    steps, lr = config.steps, config.lr
    progress = _Progress(accelerator, namer, generator, folder, config, identity)
    schedule = StageConfig(lr=lr, warmup_steps=50)
    settings = OptimConfig(name="muon", betas=(0.9, 0.98), weight_decay=0.05)
    share = config.batch_size // dist.world_size()
    grid = grid.repeat(share, 1)
    first_write = round(config.say_from * steps)
    decoder = family_of(model).decoder(model)
    for write, phase in ((False, range(first_write)), (True, range(first_write, steps))):
        if phase.stop <= max(progress.first_step, phase.start):
            continue
        # DDP waits for the gradient of every trained weight, which the text model's lack unless something is written.
        decoder.layers.requires_grad_(write and train_text)
        decoder.norm.requires_grad_(write and train_text)
        model.get_input_embeddings().requires_grad_(train_text)
        began, num_steps = 0, steps
        parts: dict[str, list[torch.nn.Parameter]] = {}
        if write and first_write:
            # The text model starts here, at the full rate; the tower continues at its current rate.
            began, num_steps = first_write, steps - first_write
            parts = {"vision": vision_parameters(model)}
            settings.lr_scale.vision = learning_rate(first_write, steps, schedule) / lr
        optimizer: torch.optim.Optimizer = make_optimizer(namer, settings, lr, parts)
        wrapped, optimizer = accelerator.prepare(namer.train(), optimizer)
        for step in progress.begin(phase, optimizer):
            times = [time.perf_counter()]
            set_learning_rate(optimizer, learning_rate(step - began, num_steps, schedule))
            rows = torch.randint(len(pictures), (share,), generator=generator)
            shown = augment(pictures[rows], generator)
            if config.style:
                shown = restyle(shown, config.style, generator)
            values = patches(shown, processor.image_processor).to(accelerator.device)
            label = labels[rows].to(accelerator.device)
            times.append(time.perf_counter())
            choosing, saying, chosen_B = wrapped(values, grid, label, write)
            accelerator.backward(choosing + saying)
            accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())
            report = {"wait_s": times[1] - times[0], "step_s": times[2] - times[1]}
            if progress.logs.is_due(step + 1):
                losses = {"loss_choosing": choosing.item(), "loss_saying": saying.item()}
                report |= losses | {"loss": sum(losses.values())}
            progress.after_step(step + 1, chosen_B, report)
        progress.states.wait()
        accelerator.free_memory()
    progress.logs.close()
    model.requires_grad_(True)
    return progress.correct / progress.counted


@torch.no_grad()
def named(model: HubModel, processor, pictures: Tensor, labels: Tensor, names: Sequence[str]) -> Tensor:
    """Which pictures (N,) a backbone names correctly, by choosing among all names."""
    namer, grid = _namer(model, processor, names, pictures.shape[-1])
    namer.eval()
    chosen = []
    for shown, label in zip(pictures.split(64), labels.split(64), strict=True):
        values = patches(shown, processor.image_processor)
        chosen.append(namer(values, grid.repeat(len(label), 1), label, False)[2])
    return torch.cat(chosen)


def _namer(model: HubModel, processor, names: Sequence[str], side_px: int) -> tuple[_Namer, Tensor]:
    name_ids = [processor.tokenizer(name, add_special_tokens=False).input_ids for name in names]
    side = side_px // processor.image_processor.patch_size
    grid = torch.tensor([[1, side, side]])
    return _Namer(model, processor, name_ids, grid), grid
