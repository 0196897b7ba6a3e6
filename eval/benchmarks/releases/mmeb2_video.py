"""MMEB-V2's 18 video sets: texts, clips, candidates and right answers of the released code.

Layout, as ``src/data/eval_dataset`` of github.com/TIGER-AI-Lab/VLM2Vec (6e1e1d4) reads it: a folder per set with its table (a copy of
its repository on the hub, by the leaderboard's name, so ``K700`` for ``VLM2Vec/Kinetics-700``), and frames in a folder per clip below
``video-tasks/frames`` of ``TIGER-Lab/MMEB-V2``, as its archives are unpacked by ``experiments/public/data/download_data.sh``; that of
the sets for retrieval has them in ``data/ziyan/video_retrieval/NAME/frames``. Where these are missing, its videos below ``video-tasks/videos`` serve: as in the
release, up to 64 of their frames are saved, and of those eight are shown, evenly from the first to the last.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.benchmarks.release_files import ReleaseError, Row, content_id, read_rows
from eval.benchmarks.releases.uvrb import FRAME_ENDINGS, NUM_FRAMES, sampled
from eval.sets.write_set import Candidate, Query
from rge.common.parts import Content, ImagePart, Part, TextPart, VideoPart
from rge.content import video
from rge.tables.rows import TABLES

SHOWN = "Understand the content of the provided video"
ASKED = (
    "Given a video and a question, select the most accurate answer from the provided candidates. "
    "Return only the exact text of your chosen answer. Question: "
)
NUM_SAVED = 64
"""Most frames of a video that the release saves."""
MVBENCH = (
    "episodic_reasoning", "action_sequence", "action_prediction", "action_antonym", "fine_grained_action", "unexpected_action",
    "object_existence", "object_interaction", "object_shuffle", "moving_direction", "action_localization", "scene_transition",
    "action_count", "moving_count", "moving_attribute", "state_change", "fine_grained_pose", "character_order",
    "egocentric_navigation", "counterfactual_inference",
)  # fmt: skip
_LABELS = Path(__file__).with_name("mmeb2_labels.tsv").read_text(encoding="utf-8").splitlines()
LABELS = {name: labels for name, *labels in (line.split("\t") for line in _LABELS)}
"""Classes of the sets whose candidates are all of them."""


@dataclass(frozen=True)
class _Target:
    """A candidate; of those with the same name, only the first is embedded."""

    name: str
    text: str
    clip: VideoPart | None = None


@dataclass(frozen=True)
class _Example:
    """A query with its candidates and the names of the right ones."""

    text: str
    shown: Part | None
    targets: Sequence[_Target]
    right: Sequence[str]


@dataclass
class Clips:
    """The clips of a set: a folder of frames each, or a video, whose frames are saved below `saved`."""

    frames: Path
    videos: Path
    saved: Path

    def find(self, row: Row, name: str, file: str = "", most: int | None = NUM_FRAMES) -> VideoPart:
        """The frames that are shown of a clip; a `ReleaseError` if there are none.

        `file`: its video; "": there are only frames. `most`: frames that are shown; None: all.
        """
        folder = self.frames / name
        found = _frames(folder)
        if not found and file:
            found = _frames(self.saved / name) or self._save(row, self.videos / file, self.saved / name)
        if not found:
            also = f", nor a video {self.videos / file}" if file else ""
            raise row.error(f"it holds no frames ({', '.join(FRAME_ENDINGS)}){also}", str(folder))
        chosen = range(len(found)) if most is None else sampled(len(found), most)
        return VideoPart(tuple(str(found[place]) for place in chosen))

    def _save(self, row: Row, file: Path, folder: Path) -> list[Path]:
        """The shown ones of the frames that the release would save of a video."""
        if not file.is_file():
            return []
        try:
            total = video.num_frames(str(file))
            step = max(1, total // NUM_SAVED) if self.videos.parent.name == "video_qa" else total / NUM_SAVED
            saved = list(range(total)) if total <= NUM_SAVED else [int(i * step) for i in range(NUM_SAVED)]
            numbers = [saved[place] for place in sampled(len(saved), NUM_FRAMES)]
            folder.mkdir(parents=True)
            for number, picture in video.numbered(str(file), numbers):
                picture.save(folder / f"{number}.jpg", quality=95)
        except video.VideoError as error:
            raise row.error(str(error), str(file)) from None
        return _frames(folder)


def _frames(folder: Path) -> list[Path]:
    """Frames in the order of the numbers in their names."""
    found = folder.iterdir() if folder.is_dir() else ()
    frames = [path for path in found if path.suffix.lower() in FRAME_ENDINGS]
    return sorted(
        frames,
        key=lambda path: [(int(digits or 0), words.lower()) for digits, words in _WORDS.findall(path.name)],
    )


_WORDS = re.compile(r"(\d+)|(\D+)")


def _lettered(options: Sequence[str]) -> list[str]:
    return [f"({chr(ord('A') + place)}) {option}" for place, option in enumerate(options)]


def _listed(question: str, options: Sequence[str]) -> str:
    return "\n".join([f"{ASKED} {question}", "Options:", *_lettered(options)])


def _unlettered(option: str) -> str:
    """An option of ``A. red`` without its letter, as the release cuts it: without a full stop and a blank, its last character is left."""
    return option[option.find(". ") :].strip(". ")


def _classified(question: str) -> Callable[[Row, Clips], _Example]:
    def read(row: Row, clips: Clips) -> _Example:
        name, label = str(row.value("video_id")), row.text("pos_text")
        options = row.texts("neg_text") if "neg_text" in row else [label]
        return _Example(
            question, clips.find(row, name, f"{name}.mp4"), [_Target(o, o) for o in options], [label]
        )

    return read


def _retrieved(request: str, name: str, file: str, caption: str) -> Callable[[Row, Clips], _Example]:
    def read(row: Row, clips: Clips) -> _Example:
        words = row.value(caption)
        path = Path(row.text(file)) if file else Path(f"{row.text(name)}.mp4")
        clip = row.text(name) if name else path.stem
        target = _Target(clip, f"{SHOWN}.", clips.find(row, clip, path.name))
        return _Example(f"{request} {words if isinstance(words, str) else words[0]}", None, [target], [clip])

    return read


def _found_within(row: Row, clips: Clips) -> _Example:
    clip = Path(row.text("video_path")).stem
    folders = sorted(
        path.name for path in (clips.frames / clip).glob("*") if path.is_dir() and path.name != "query"
    )
    targets = [_Target(f"{clip}/{name}", f"{SHOWN}.", clips.find(row, f"{clip}/{name}")) for name in folders]
    right = [f"{clip}/{name}" for name in folders if name.startswith("positive")]
    request = "Find the clip that corresponds to the described scene in the given video:"
    return _Example(f"{request} {row.text('query')}", clips.find(row, f"{clip}/query"), targets, right[-1:])


def _sought(row: Row, clips: Clips) -> _Example:
    def find(path: str) -> VideoPart:
        return clips.find(row, name_of(path), most=None)

    def name_of(path: str) -> str:
        return "video_frames/" + path.replace("/", "_").split(".mp4")[0]

    given = row.text("input_frames")
    shown: Part | None = None
    request = "Find the clip that corresponds to the given text:"
    if given.endswith(".mp4"):
        shown, request = (
            find(given),
            "Find the clip that corresponds to the given sentence and video segment:",
        )
    elif given.endswith(".jpg"):
        shown = ImagePart(str(clips.frames / f"query_{given}"))
        request = "Select the video clip that aligns with the given text and image:"
    paths = {
        kind: [cell["output_path"] for cell in row.value(f"{kind}_frames")]
        for kind in ("positive", "negative")
    }
    targets = [
        _Target(name_of(path), f"{SHOWN} clip.", find(path))
        for path in (*paths["positive"], *paths["negative"])
    ]
    return _Example(f"{request} {row.text('query')}", shown, targets, list(map(name_of, paths["positive"])))


def _asked_mme(row: Row, clips: Clips) -> _Example:
    name, options = row.text("videoID"), row.texts("options")
    question = "\n".join([f"{ASKED} {row.text('question')}", *options])
    targets = [_Target(option, _unlettered(option)) for option in options]
    return _Example(
        question, clips.find(row, name, f"{name}.mp4"), targets, [options["ABCD".index(row.text("answer"))]]
    )


def _asked_next(row: Row, clips: Clips) -> _Example:
    name, options = str(row.value("video")), [row.text(f"a{place}") for place in range(5)]
    clip = clips.find(row, name, f"{name}.mp4")
    return _Example(
        _listed(row.text("question"), options),
        clip,
        [_Target(o, o) for o in options],
        [options[int(row.value("answer"))]],
    )


def _asked_ego(row: Row, clips: Clips) -> _Example:
    name, options = row.text("video_idx"), row.texts("option")
    targets = [_Target(option, _unlettered(option)) for option in options]
    question = f"{ASKED} {row.text('question')}{' '.join(options)}"
    return _Example(
        question, clips.find(row, name, f"{name}.mp4"), targets, [options[int(row.value("answer"))]]
    )


def _asked_mvbench(row: Row, clips: Clips) -> _Example:
    options = row.texts("candidates")
    lettered = _lettered(options)
    right = dict(zip(options, lettered, strict=True)).get(row.text("answer"), "")
    clip = clips.find(row, f"{row['subset']}/{row.text('video')}")
    return _Example(_listed(row.text("question"), options), clip, [_Target(o, o) for o in lettered], [right])


def _asked_activity(row: Row, clips: Clips) -> _Example:
    name = f"v_{row.text('video_name')}"
    question = f"{ASKED} {row.text('question')}? (A) yes; (B) no."
    targets = [_Target(option, option) for option in ("yes", "no")]
    return _Example(question, clips.find(row, name, f"{name}.mp4"), targets, [row.text("answer")])


@dataclass(frozen=True)
class Member:
    """A set: how a row is read, and where its table and clips are."""

    meta_task: str
    folder: str  # of its clips, below frames
    num_queries: int  # as its released scorer counts them, in docs/mmebv2_reproduction/scores
    read: Callable[[Row, Clips], _Example]
    tables: tuple[str, ...] = ("test",)  # words in the names of its tables
    most: int | None = None  # queries

    def frames(self, root: Path) -> Path | None:
        """The folder of its clips below `root`, or below what its archive unpacks to; None if there is none."""
        kind, name = self.folder.split("/")
        places = (root / kind / name, root / kind / "data/ziyan/video_retrieval" / name / "frames")
        return next((place for place in places if place.is_dir()), None)


MEMBERS = {
    "K700": Member("CLS", "video_cls/K700", 1000, _classified("Recognize the category of the video content.")),
    "SmthSmthV2": Member("CLS", "video_cls/SSv2", 1000, _classified(
        "What actions or object interactions are being performed by the person in the video?"
    ), most=1000),
    "HMDB51": Member("CLS", "video_cls/HMDB51", 1000, _classified(
        "What actions or objects interactions are the person in the video doing?"
    )),
    "UCF101": Member("CLS", "video_cls/UCF101", 1000, _classified(
        "What activities or sports are being performed by the person in the video?"
    )),
    "Breakfast": Member("CLS", "video_cls/Breakfast", 433, _classified(
        "Recognize the breakfast type that the person is cooking in the video."
    )),
    "MVBench": Member("QA", "video_qa/MVBench", 4000, _asked_mvbench, MVBENCH),
    "Video-MME": Member("QA", "video_qa/Video-MME", 2700, _asked_mme),
    "NExTQA": Member("QA", "video_qa/NExTQA", 8564, _asked_next, ("MC",)),
    "EgoSchema": Member("QA", "video_qa/EgoSchema", 500, _asked_ego, ("Subset",)),
    "ActivityNetQA": Member("QA", "video_qa/ActivityNetQA", 1000, _asked_activity),
    "DiDeMo": Member("RET", "video_ret/DiDeMo", 1004, _retrieved(
        "Find a video that includes the following described scenes:", "", "video", "caption"
    )),
    "MSR-VTT": Member("RET", "video_ret/MSR-VTT", 1000, _retrieved(
        "Find a video that contains the following visual content:", "video_id", "video", "caption"
    ), ("test_1k",)),
    "MSVD": Member("RET", "video_ret/MSVD", 670, _retrieved(
        "Find the video snippet that corresponds to the given summary:", "video_id", "video", "caption"
    )),
    "VATEX": Member("RET", "video_ret/VATEX", 4478, _retrieved(
        "Select a video that fits the description provided:", "videoID", "", "enCap"
    )),
    "YouCook2": Member("RET", "video_ret/YouCook2", 3179, _retrieved(
        "Find a video that demonstrates the following action while making a recipe:", "id", "video_path", "sentence"
    ), ("val",)),
    "QVHighlight": Member("MRET", "video_mret/QVHighlight", 1083, _found_within),
    "Charades-STA": Member("MRET", "video_mret/Charades_STA", 727, _found_within),
    "MomentSeeker": Member("MRET", "video_mret/MomentSeeker", 1602, _sought),
}  # fmt: skip
"""The 18 sets of the leaderboard."""


@dataclass
class Draft:
    """Collects the queries of a set."""

    name: str
    queries: list[Query] = field(default_factory=list)
    qrels: list[tuple[str, str, int]] = field(default_factory=list)
    candidates: list[tuple[str, str]] = field(default_factory=list)
    targets: dict[str, _Target] = field(default_factory=dict)
    num_hidden: int = 0  # candidates not embedded because another one has their name

    def add(self, example: _Example, row: Row) -> None:
        """Add a query; a `ReleaseError` if no right candidate is among its candidates."""
        known = {target.name: content_id(target.name) for target in example.targets}
        if not example.right or not set(example.right) <= known.keys():
            raise row.error(
                f"the right answer is not among the candidates {', '.join(known)}", ", ".join(example.right)
            )
        for target in example.targets:
            self.num_hidden += self.targets.setdefault(known[target.name], target) != target
        query = f"{self.name}-{len(self.queries):05d}"
        shown = () if example.shown is None else (example.shown,)
        group = content_id(str(shown[0] if shown else query))
        self.queries.append(Query(query, group=group, content=(*shown, TextPart(example.text.strip()))))
        self.qrels += [(query, known[name], 1) for name in dict.fromkeys(example.right)]
        self.candidates += [(query, one) for one in known.values()]

    def parts(self) -> dict[str, Any]:
        """Arguments of `ReleaseOptions.write`."""
        is_pooled = self.name in LABELS or MEMBERS[self.name].meta_task == "RET"
        lists = {"qrels": self.qrels, "candidates": None if is_pooled else self.candidates}
        return {"queries": self.queries, "corpus": self.corpus(), **lists}

    def corpus(self) -> Iterator[Candidate]:
        """Distinct candidates, sorted by id."""
        for name, target in sorted(self.targets.items()):
            content: Content = (*([target.clip] if target.clip else []), TextPart(target.text))
            yield Candidate(name, content=content)


def read(name: str, src: Path, frames: Path | None, saved: Path) -> Draft:
    """Read a set. `saved`: a folder for the frames of videos."""
    member = MEMBERS[name]
    roots = [frames] if frames else [src / "video-tasks" / "frames", src]
    found = [(one, place) for one in roots if (place := member.frames(one)) is not None]
    root, folder = found[0] if found else (roots[0], roots[0] / member.folder)
    clips = Clips(folder, root.parent / "videos" / member.folder, saved)
    draft = Draft(name, targets={content_id(label): _Target(label, label) for label in LABELS.get(name, ())})
    for row in rows_of(src / name, member):
        draft.add(member.read(row, clips), row)
    return draft


def rows_of(folder: Path, member: Member) -> Iterator[Row]:
    """The rows of a set's tables, a query each; a `ReleaseError` if a table is missing."""
    tables = sorted(path for path in folder.rglob("*") if path.suffix in TABLES)
    number = 0
    for word in member.tables:
        named = re.compile(rf"(^|[/._-]){re.escape(word)}([/._-]|$)")
        files = [path for path in tables if named.search(path.relative_to(folder).as_posix())]
        if not files and len(member.tables) == len(tables) == 1:
            files = tables
        if not files:
            raise ReleaseError(
                "it has no table with this in its name: src must be a copy of the release", folder, key=word
            )
        for row in read_rows(files):
            if number == member.most:
                return
            number += 1
            yield Row(row | {"subset": word}, row.where)
