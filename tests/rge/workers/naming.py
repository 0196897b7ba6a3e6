"""One process of several: run the naming stage whole, and interrupted and resumed.

    torchrun ... naming.py MODEL FOLDER

Rank 0 writes the weights of both to FOLDER/found.pt; FOLDER/left keeps the state of an interrupted one.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForImageTextToText, AutoProcessor

from rge.distributed import collectives as dist
from rge.small_models import naming
from rge.small_models.config import Naming

path, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
processor = AutoProcessor.from_pretrained(path)
pictures = torch.rand(4, 3, 28, 28, generator=torch.Generator().manual_seed(0))
names, labels = ["This is a key.", "This is a door."], torch.tensor([0, 1, 0, 1])
augment = naming.augment


def teach(name: str, steps: int) -> dict[str, torch.Tensor]:
    """Weights after the stage, or after the number of steps at which it is interrupted."""
    model, shown = AutoModelForImageTextToText.from_pretrained(path), []

    def counted(picture, generator):
        if len(shown) == steps:
            raise KeyboardInterrupt
        shown.append(picture)
        return augment(picture, generator)

    naming.augment = counted
    try:
        naming.teach(
            model, accelerator, processor, pictures, labels, names, folder / name,
            Naming(folder / "names.jsonl", steps=8, batch_size=8, lr=1e-2, say_from=0.5, save_every=3),
        )  # fmt: skip
    except KeyboardInterrupt:
        accelerator.free_memory()
    return model.state_dict()


whole = teach("whole", 8)
teach("resumed", 7)
resumed = teach("resumed", 2)  # steps 7 and 8
teach("left", 4)
if dist.rank() == 0:
    torch.save({"whole": whole, "resumed": resumed}, folder / "found.pt")
dist.close()
