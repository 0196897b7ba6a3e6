"""What the models are asked. The tasks, constraints and tagged formats are those of RMIR's appendix A; the words and
examples are ours. The wording is part of the key of every kept answer: changing it asks (and pays) anew.
"""  # noqa: D205

from collections.abc import Sequence
from typing import Any

from data_prep.rmir.arithmetic import ABSTAIN, FALSE, TRUE
from data_prep.rmir.config import CATEGORIES
from rge.calls.replies import (
    Abstained,
    BadValue,
    MissingTag,
    Reply,
    ReplyError,
    check_complete,
    one_of,
    tag,
)
from rge.calls.request import Picture, Request

GENERATE_TASK, FILTER_TASK, JUDGE_TASK = (
    "Task: write questions",
    "Task: check a question",
    "Task: judge an answer",
)

_KINDS = """FUNC (functional): which tool or object is needed to get something done.
  picture: a bicycle with a slack, hanging chain | question: What would make this part run smoothly again?
  target: a hand squeezing oil from a small bottle onto a bicycle chain
  because: a dry, slack chain is cleaned and oiled before it runs smoothly.
  picture: a cork in the neck of a bottle | question: What do you need to get to what is inside?
  target: a corkscrew with a wooden handle | because: a cork sits too tight for fingers; a corkscrew pulls it out.
CAUS (causal): why or how something comes about.
  picture: an ice-cream cone in blazing sun on a windowsill | question: What is left here after half an hour?
  target: a puddle of melted ice cream beside a soggy cone | because: the heat melts the ice cream.
  picture: a toddler with felt pens in front of a white wall | question: What might a parent come back to?
  target: a wall covered with a child's scribbles | because: toddlers draw on whatever is within reach.
TEMP (temporal): what comes before, after or at the same time.
  picture: a caterpillar on a leaf | question: What does this animal look like once it is grown?
  target: a butterfly with open wings | because: a caterpillar pupates and comes out as a butterfly.
  picture: a bride and groom cutting a cake | question: Where were these two standing some hours before?
  target: a couple before the altar of a church | because: the cake is cut at the party after the ceremony."""

_CONSTRAINTS = """1. Needs the picture. Whoever reads only the question must not be able to name the target. Do not name in the
   question what the picture shows: say "this", "it", "here".
   Bad (a kettle on a lit stove): "What comes out of a kettle when the water boils?"  Good: "What happens in a few minutes?"
2. Needs thought. One or two steps of reasoning lie between picture and target: not mere recognition, not a shared colour
   or shape, and explainable in one or two sentences.
   Bad (a green lizard): "Which apple has this colour?"  Good: "What do soldiers wear to do what this animal does?"
3. Has one answer. Given picture and question, one kind of target is right. Add what is needed to rule out the others,
   without giving the answer away.
   Bad (a pizza in the oven): "What happens next?"  Good: "What if somebody forgets about this?"
   Nor may it ask for one particular place or person at another time: no library has that very picture."""

GENERATE = f"""{GENERATE_TASK}

You see one picture. Write questions about it whose answers are other pictures, to test whether a search engine can reason.
Write one question of each kind below, and describe the target picture that answers it.

Kinds of reasoning, with examples
{_KINDS}

Constraints
{_CONSTRAINTS}

{{policy}}The question: plain, everyday English, fewer than 25 words.
The target: at most 50 words; an everyday scene or object of which a large photo library has a few pictures, not hundreds
and not none. Leave out details that do not follow from the answer (no "red umbrella" where any umbrella will do).

Write ABSTAIN in all three tags of a kind if the picture gives no good question of that kind, or if it is a screenshot or
a poster.

Answer in exactly this format, with one block for each of {{codes}}:
<input_desc>what the picture shows</input_desc>
<Example_CODE_1>
<query>the question</query>
<target_desc>the target picture</target_desc>
<reasoning>how picture and question lead to the target</reasoning>
</Example_CODE_1>

The picture:"""

CONTENT_POLICY = """If the picture shows what is politically sensitive (protests, police, conflict, politicians) or sexually explicit, write
nothing but: ABSTAIN DUE TO SENSITIVE IMAGE

"""
"""What the paper's prompt A.1 declines (``generate.content_policy``)."""

FILTER = f"""{FILTER_TASK}

Check a question that was written for a picture, with a description of the picture that shall answer it.
First describe the picture without letting the question guide your eyes: some questions were written for another picture.
Then check the constraints. The question is valid only if it breaks none of them.

{_CONSTRAINTS}
4. Reads well. A native speaker understands it at once.

The kinds of reasoning it may use, with examples
{_KINDS}

Answer in exactly this format:
<input_desc>the picture, described on its own</input_desc>
<reasoning>which constraints are kept or broken, and why</reasoning>
<is_valid>yes or no</is_valid>

The picture:"""

JUDGE = f"""{JUDGE_TASK}

You see two pictures, INPUT and TARGET, and a question about INPUT. Decide whether TARGET answers it. One or two steps of
reasoning may lie between them. Be strict: accept only what is clear.

True: TARGET follows from the question and INPUT, so clearly that most adults would see it within 30 seconds.
False: no sensible reading leads from INPUT and the question to TARGET, or TARGET lacks what the question asks for.
ABSTAIN: something needed to decide cannot be seen, or sensible people would disagree.

If either picture is politically sensitive (protests, police, conflict, politicians) or sexually explicit, answer only:
ABSTAIN DUE TO SENSITIVE IMAGE

The kinds of reasoning, with examples
{_KINDS}

Examples of decisions
INPUT a cork in a bottle, "What do you need to get to what is inside?", TARGET a corkscrew -> True
INPUT a cork in a bottle, the same question, TARGET a wine glass -> False: it holds the wine but does not open the bottle
INPUT a beach at noon, "What does this look like at night with a fire?", TARGET a dark beach, no fire -> False
INPUT a blurred animal, "What does it eat?", TARGET a bowl of bones -> ABSTAIN: the animal cannot be told

Answer in exactly this format:
<target_desc>what TARGET shows</target_desc>
<input_desc>what INPUT shows</input_desc>
<reasoning>your reasoning in short</reasoning>
<consistent>True, False or ABSTAIN</consistent>
"""


WORDING = {"generate": [GENERATE, CONTENT_POLICY], "filter": [FILTER], "judge": [JUDGE]}
"""What each stage asks: another wording redoes the stage."""
FORM = "Answer in exactly this format"
"""With this the format of each prompt begins; it is said again where an answer could not be read."""
_JUDGED = f"{JUDGE}\nINPUT:"
_GENERATED = (("query", None), ("target_desc", None), ("reasoning", None))


def generate_request(
    model: str, picture: Picture, categories: Sequence[str], *, content_policy: bool, **settings: Any
) -> Request:
    """Ask for one question of each category.

    Args:
        model: of the config.
        picture: asked about.
        categories: of `CATEGORIES`.
        content_policy: have the model decline what `CONTENT_POLICY` names.
        settings: of `rge.calls.request.Request`.
    """
    codes = [CATEGORIES[category] for category in categories]
    text = GENERATE.format(codes=", ".join(codes), policy=CONTENT_POLICY if content_policy else "")
    fields = (("input_desc", None), *((f"Example_{code}_1", _GENERATED) for code in codes))
    return Request(model, (text, picture), shared_parts=1, form=_form(text), fields=fields, **settings)


def filter_request(model: str, picture: Picture, query: str, target: str, **settings: Any) -> Request:
    """Ask whether a question is valid; see `generate_request`."""
    fields = (("input_desc", None), ("reasoning", None), ("is_valid", ("yes", "no")))
    parts = (FILTER, picture, f"<query>{query}</query>\n<target_desc>{target}</target_desc>")
    return Request(model, parts, shared_parts=2, form=_form(FILTER), fields=fields, **settings)


def judge_request(model: str, picture: Picture, query: str, target: Picture, **settings: Any) -> Request:
    """Ask whether a target answers a question; see `generate_request`."""
    fields = (
        ("target_desc", None),
        ("input_desc", None),
        ("reasoning", None),
        ("consistent", ("True", "False", "ABSTAIN")),
    )
    # What all candidates of a query share comes first, its picture included, so that a provider's prompt cache holds it.
    parts = (_JUDGED, picture, f"<query>{query}</query>\nTARGET:", target)
    return Request(model, parts, shared_parts=3, form=_form(JUDGE), fields=fields, **settings)


def _form(prompt: str) -> str:
    _, _, form = prompt.partition(FORM)
    return form.partition(":\n")[2].partition("\n\n")[0].strip()


def check_generated(
    reply: Reply, categories: Sequence[str], max_query_words: int, max_target_words: int
) -> None:
    """Check that something of an answer can be used: a question or an abstention.

    Raises:
        ReplyError: of the first category, where every one has one.
    """
    errors = []
    for category in categories:
        try:
            read_generated(reply, category, max_query_words, max_target_words)
            return
        except Abstained:
            return
        except ReplyError as error:
            errors.append(error)
    raise errors[0]


def read_generated(
    reply: Reply, category: str, max_query_words: int, max_target_words: int
) -> dict[str, str]:
    """The question of a category: ``query``, ``target_desc``, ``reasoning``, ``input_desc``.

    Raises:
        ReplyError: it is missing, abstained from, or against the limits.
    """
    name = f"Example_{CATEGORIES[category]}_1"
    check_complete(reply, name)
    block = _block(reply.text, name)
    found = {key: tag(block, key) for key in ("query", "target_desc", "reasoning")}
    if any(value.upper().startswith("ABSTAIN") for value in found.values()):
        raise Abstained(f"{category}: the writer abstains")
    for key, limit in (("query", max_query_words), ("target_desc", max_target_words)):
        if len(found[key].split()) > limit:
            raise BadValue(f"<{key}> has {len(found[key].split())} words, more than {limit}")
    return {**found, "input_desc": _optional(reply.text, "input_desc")}


def read_filtered(reply: Reply) -> tuple[bool, str, str]:
    """Whether the question is valid, the reasoning, and the description of the picture.

    Raises:
        ReplyError: the answer cannot be read.
    """
    check_complete(reply, "is_valid")
    valid = one_of(reply.text, "is_valid", {"yes": True, "no": False})
    return valid, _optional(reply.text, "reasoning"), _optional(reply.text, "input_desc")


def read_judged(reply: Reply) -> tuple[str, str]:
    """Verdict and reasoning; an abstention of the whole answer is a verdict too.

    Raises:
        ReplyError: the answer cannot be read.
    """
    try:
        check_complete(reply, "consistent")
    except Abstained as error:
        return ABSTAIN, str(error)
    verdict = one_of(reply.text, "consistent", {"true": TRUE, "false": FALSE, "abstain": ABSTAIN})
    return verdict, _optional(reply.text, "reasoning")


def _block(text: str, name: str) -> str:
    # tag() would fold the nested tags' white space only; the block itself is what is wanted.
    try:
        return tag(text, name)
    except MissingTag:
        raise MissingTag(f"no block <{name}>") from None


def _optional(text: str, name: str) -> str:
    try:
        return tag(text, name)
    except ReplyError:
        return ""
