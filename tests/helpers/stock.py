"""A step's definition, slowly: ordinary passes of stock transformers, labels by hand, InfoNCE in loops."""

import torch
from family_models import counted_positions, stock_inputs

TEMPERATURE = 0.07


def stock_forward(embedder, prompts, continuations, padding_side):
    """One ordinary pass over prompt + continuation, as a user of plain transformers would run it.

    Returns:
        Last-layer states, logits, and each row's first column.
    """
    model = embedder.model
    rows = [
        torch.cat([prompt.input_ids, torch.tensor(ids)])
        for prompt, ids in zip(prompts, continuations, strict=True)
    ]
    longest = max(len(row) for row in rows)
    input_ids = torch.full((len(rows), longest), model.config.get_text_config().pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    starts = []
    for number, row in enumerate(rows):
        start = 0 if padding_side == "right" else longest - len(row)
        starts.append(start)
        input_ids[number, start : start + len(row)] = row
        attention_mask[number, start : start + len(row)] = 1
    inputs = stock_inputs(embedder, prompts, input_ids, attention_mask)
    if "mm_token_type_ids" not in inputs:
        # Without a picture transformers counts positions from the first padding token; rounding would differ.
        inputs["position_ids"] = counted_positions(model, attention_mask)
    output = model(**inputs, output_hidden_states=True, use_cache=False)
    return output.hidden_states[-1], output.logits, starts


def state_at_end(hidden, starts, prompts, continuations):
    rows = []
    for row, start in enumerate(starts):
        end = start + len(prompts[row]) + len(continuations[row]) - 1
        rows.append(hidden[row, end] / hidden[row, end].norm())
    return rows


def nll_of(logits, starts, prompts, continuations):
    total, count = 0.0, 0
    for row, ids in enumerate(continuations):
        for place, token in enumerate(ids):
            column = starts[row] + len(prompts[row]) + place
            total = total - torch.log_softmax(logits[row, column - 1], dim=-1)[token]
            count += 1
    return total, count


def naive_info_nce(q, c, batch):
    """Per query: -log of the positive's share among itself and everything that may count as a negative."""
    total = 0.0
    for row in range(len(q)):
        terms, positive = [], None
        for column in range(len(c)):
            term = torch.exp(q[row] @ c[column] / TEMPERATURE - 1 / TEMPERATURE)  # at most 1: no overflow
            if column == batch.positive[row]:
                positive = term
            elif (
                column in batch.negatives[row]
                or batch.candidate_identity[column] not in batch.right_answers[row]
            ):
                terms.append(term)
        total = total - torch.log(positive / (positive + sum(terms)))
    return total / len(q)


def gradients(embedder):
    found = {
        name: parameter.grad.clone()
        for name, parameter in embedder.named_parameters()
        if parameter.grad is not None
    }
    embedder.zero_grad(set_to_none=True)
    return found


def worst_gradient_error(found, expected):
    """Largest relative error of any parameter's gradient (norm of the difference over norm), and its name."""
    # Where no row has a picture the reference leaves the vision tower out, and ours runs it behind a mask.
    assert all(not found[name].any() for name in found.keys() - expected.keys())
    assert all(expected[name].norm() > 0 for name in expected)
    # A softmax does not see a shift of all keys: the true gradient of their bias is zero, and what is left is rounding.
    whole = sum(float(gradient.norm()) ** 2 for gradient in expected.values()) ** 0.5
    shifts = {name for name in expected if "vision" in name and name.endswith("k_proj.bias")}
    assert all(max(found[name].norm(), expected[name].norm()) < 1e-5 * whole for name in shifts)
    errors = {
        name: float((found[name] - expected[name]).norm() / expected[name].norm())
        for name in expected.keys() - shifts
    }
    name = max(errors, key=errors.get)
    return errors[name], name
