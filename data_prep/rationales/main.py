"""The command ``rge data rationales``.

A model that sees query and target writes a rationale for every positive of every record. Rationales that fail a check are
left out and counted by reason, as are records without any rationale. Answers are stored next to the result, so the command
resumes. With ``candidates=N`` several are written, and ``select=CHECKPOINT`` lets an embedder choose among those that pass.
``records=FOLDER out=FOLDER`` processes every file of a folder, such as ``rge data mmeb`` writes, under one budget.
"""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from data_prep.rationales.options import RationaleOptions
from data_prep.rationales.pairs import replies_of, request_for, sources_of, task_of
from data_prep.rationales.writing import Writing
from rge.calls.model_config import check_model
from rge.calls.prices import confirm, fill_prices
from rge.calls.store import AnswerStore
from rge.common.errors import UserError
from rge.common.options import parse_options


def main(words: Sequence[str]) -> None:
    """Write rationales, or estimate their cost (``dry_run=true``)."""
    options = parse_options(RationaleOptions, words, "rge data rationales")
    options = replace(options, model=fill_prices({"model": options.model}, options.prices)["model"])
    check_model("model", options.model)
    if options.candidates > 1 and options.temperature == 0:
        raise UserError(
            "0 writes the same rationale every time: candidates needs a temperature above 0",
            key="temperature",
        )
    if options.min_gain is not None and options.select is None:
        raise UserError("it needs select=CHECKPOINT: the embedder that measures it", key="min_gain")
    if options.dry_run:
        print(estimate(options))
        return
    options.model.key()  # if it is missing, said before any work
    if options.model.paid():
        confirm(estimate(options), yes=options.yes)
    print(json.dumps(Writing(options).run(), indent=1))


def estimate(options: RationaleOptions) -> str:
    """Estimate calls, tokens and cost from the real prompts, without making a call or writing a file."""
    model, path = options.model, replies_of(options)
    with closing(AnswerStore(path if path.is_file() else None, read_only=True)) as store:
        stats = {kind: store.billing_stats(model.endpoint, kind) for kind in (False, True)}
        kept = store.num_replies()
    num_calls = -(-options.candidates // model.draws_a_call)  # of a pair
    tasks: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for source in sources_of(options):
        for pair in source.pairs():
            request = request_for(pair, options, look=False)
            bills = stats[bool(request.num_pictures())]
            given, answered = model.estimate(request)
            most_in, most_out = model.estimate(request, bills)
            total.update(
                {
                    "calls": num_calls,
                    "in": round(num_calls * given * bills.mean_input),
                    "most in": num_calls * most_in,
                    "out": options.candidates * answered,
                    "most out": options.candidates * most_out,
                }
            )
            tasks[task_of(pair, options)] += 1
    batch = model.mode == "batch"
    least = model.cost(total["in"], 0, batch=batch)
    most = model.cost(total["most in"], total["most out"], batch=batch)
    cost = f"from {least:,.2f} (input alone) to at most {most:,.2f}"
    if not model.has_price():
        cost = (
            f"the cost is not known, since no price is given for {model.name}: set model.input_price and model.output_price (0 if it "
            "costs nothing), or prices=FILE"
        )
    rows = "\n".join(f"| {task} | {number:,} |" for task, number in tasks.most_common())
    text = (
        f"| task | pairs |\n|---|---:|\n{rows}\n\n{total['calls']:,} calls, {total['in']:,} input tokens, at most "
        f"{total['out']:,} output tokens: {cost}. No calls were made yet."
    )
    if kept:
        text += f" {kept:,} answers are stored from before and not paid for again."
    if options.leak == "rewrite":
        text += " Rewrites cost extra: one call for each rationale that copies too much."
    return text
