"""Pictures for the vision tower: patches cut on tensors equal the processor's own."""

import numpy as np
import torch

from rge.scratch.pretrain_vision import augment, patches


def test_patches_equal_the_processors(embedder, picture):
    processor = embedder.processor.image_processor
    pictures = [picture(84, 84, seed) for seed in range(3)]
    expected = processor(images=pictures, return_tensors="pt")
    assert expected["image_grid_thw"].tolist() == [[1, 6, 6]] * 3
    stacked = (
        torch.from_numpy(np.stack([np.asarray(image) for image in pictures])).permute(0, 3, 1, 2).float()
        / 255
    )
    found = patches(
        stacked,
        processor.patch_size,
        processor.merge_size,
        processor.temporal_patch_size,
        processor.image_mean,
        processor.image_std,
    )
    torch.testing.assert_close(found, expected["pixel_values"], atol=1e-5, rtol=0)


def test_augmented_pictures_stay_pictures_and_repeat():
    white = torch.ones(4, 3, 28, 28)
    white[:, :, 8:20, 8:20] = torch.tensor([0.8, 0.1, 0.1])[:, None, None]
    one = augment(white, torch.Generator().manual_seed(1))
    assert torch.equal(one, augment(white, torch.Generator().manual_seed(1)))
    assert not torch.equal(one, augment(white, torch.Generator().manual_seed(2)))
    assert one.shape == white.shape
    assert one.min() >= 0
    assert one.max() <= 1
    assert not torch.equal(one[0], one[1])  # each row is moved in its own way
    assert one[:, :, 0, 0].min() > 0.5  # what moves in from outside is white, mixed in colour
