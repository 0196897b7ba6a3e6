r"""Printed manuals: the entries of a manual's index find the pages that it names.

The index at the end of a manual is a set of judgements that its authors made. ``src`` is a PDF, or a folder of PDFs that are searched
together; each needs bookmarks, which say where its indexes are, and page labels, if printed and counted pages differ. In Debian,
r-doc-pdf has such manuals::

    apt-get download r-doc-pdf && dpkg -x r-doc-pdf_*.deb r-doc-pdf
    rge eval import manual src=r-doc-pdf/usr/share/R/doc/manual "manuals=R-intro,R-lang,R-exts,R-admin" out=manuals
    rge eval bm25 set=manuals out=runs/manuals/bm25

A query is an entry as printed, its right answers are all pages that any of the manuals names for it, and the pool is every page outside
the indexes. Pages are parts of the set (``{"pdf": ..., "pages": [n]}``): embedders see them as pictures, BM25 reads their text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.benchmarks.release_files import Draft, ReleaseError, ReleaseOptions, content_id
from eval.scoring.protocol import Protocol
from eval.sets.retrieval_set import RetrievalSet
from eval.sets.write_set import Candidate, Query
from rge.common.parts import PdfPart
from rge.common.schema import safe_id
from rge.content import pdf
from rge.content.references import page_reference

INSTRUCTION = "Find the pages of the manual that explain this entry of its index."
_LEADERS = re.compile(r"^(?P<words>\.\.\.(?=[ .])|.*?\S)\s*(?:\.\s*){2,}(?P<pages>\d[\d\s,\u2013-]*)$")
_COMMA = re.compile(r"^(?P<words>.*?[^\s\d,].*?),\s*(?P<pages>\d[\d\s,\u2013-]*)$")
_PAGES = re.compile(r"(\d+)(?:\s*[\u2013-]\s*(\d+))?")
_HYPHEN = "\ufffe"
"""What PDFium reports for a hyphen at the end of a line."""
MIN_ENTRIES = 10
"""With fewer entries, the bookmark called index leads to something else."""


@dataclass
class ManualOptions(ReleaseOptions):
    """Make a retrieval set from the printed indexes of manuals."""

    manuals: tuple[str, ...] = ()
    """Names of the PDFs of the folder that are used, without their ending; by default all that have an index."""
    instruction: str = INSTRUCTION
    """Task instruction of every query. '': none."""


@dataclass
class _Manual:
    """A document, its index pages, and what they say."""

    path: Path
    indexes: dict[int, str] = field(default_factory=dict)  # number of an index page -> title of the index
    entries: list[tuple[str, str, list[int]]] = field(
        default_factory=list
    )  # words, title of the index, pages
    unread: int = 0  # lines of an index that are no entry

    @property
    def num_pages(self) -> int:
        """Number of all pages."""
        return pdf.num_pages(str(self.path))

    def name(self, page: int) -> str:
        """The candidate's id."""
        return safe_id(page_reference(self.path.name, page))


def import_manual(options: ManualOptions) -> RetrievalSet:
    """Read the indexes and write a retrieval set."""
    manuals = list(_manuals(options))
    pages_of: dict[str, list[str]] = {}
    kinds: dict[str, str] = {}
    for manual in manuals:
        for words, title, pages in manual.entries:
            listed = [manual.name(page) for page in pages]
            pages_of.setdefault(words, []).extend(listed)
            kinds.setdefault(words, title)
    pool = {
        manual.name(page): Candidate(manual.name(page), content=(PdfPart(str(manual.path), (page,)),))
        for manual in manuals
        for page in range(1, manual.num_pages + 1)
        if page not in manual.indexes
    }
    draft = Draft(pool)
    for words, right in pages_of.items():
        name = content_id(words)
        query = Query(name, words, category=kinds[words], instruction=options.instruction or None)
        draft.add(query, (options.src, f"entry {words}"), dict.fromkeys(right, 1))
    draft.refuse_lost("the manuals' pages outside their indexes", allowed=False)
    return options.write(
        meta={
            "name": ", ".join(manual.path.stem for manual in manuals),
            "benchmark": "manual",
            "source": f"the printed indexes of {len(manuals)} manuals, read by eval.benchmarks.releases.manual",
            "lines_without_entry": sum(manual.unread for manual in manuals),
        },
        queries=draft.queries,
        corpus=pool.values(),
        qrels=draft.qrels,
    )


def _manuals(options: ManualOptions) -> Iterator[_Manual]:
    if options.src.is_file():
        paths = [options.src]
    else:
        paths = sorted(options.src.glob("*.pdf"))
        if options.manuals:
            by_name = {path.stem: path for path in paths}
            if missing := [name for name in options.manuals if name not in by_name]:
                raise ReleaseError(
                    f"it is missing; there are {', '.join(by_name) or 'no PDFs'}",
                    options.src / f"{missing[0]}.pdf",
                    kind="missing",
                )
            paths = [by_name[name] for name in options.manuals]
    found = 0
    for path in paths:
        manual = read_manual(path)
        if len(manual.entries) >= MIN_ENTRIES:
            found += 1
            yield manual
        elif options.src.is_file() or options.manuals:
            raise ReleaseError(
                f"it has no printed index: no bookmark with the word index leads to {MIN_ENTRIES} entries or more",
                path,
            )
    if not found:
        raise ReleaseError("it has no PDF with a printed index", options.src)


def read_manual(path: Path) -> _Manual:
    """Find a document's indexes by its bookmarks, and read them. A `ReleaseError` if they name a page that does not exist."""
    about = pdf.outline(str(path))
    manual = _Manual(path, _index_pages(about))
    if not manual.indexes:
        return manual
    number_of = {label: number for number, label in enumerate(about.labels, start=1)}
    texts = pdf.texts(str(path), list(manual.indexes))
    for (page, title), text in zip(manual.indexes.items(), texts, strict=True):
        for words, printed in _entries(text, title, manual):
            pages = [number_of.get(str(one)) for one in printed]
            if None in pages:
                raise ReleaseError(
                    f"it is said to be on page {printed[pages.index(None)]}, which does not exist",
                    path,
                    f"page {page}",
                    words,
                )
            manual.entries.append((words, title, [one for one in pages if one is not None]))
    return manual


def _index_pages(about: pdf.Outline) -> dict[int, str]:
    """Pages of the indexes, each from its bookmark to the next; of two on one page, the first names it."""
    tops = [mark for mark in about.bookmarks if mark.page is not None]
    indexes: dict[int, str] = {}
    for place, mark in enumerate(tops):
        title = re.sub(r"^(Appendix )?[A-Z\d]+(\.\d+)*\s+(?=\S)", "", mark.title).strip()
        if re.search(r"(?:^|\s)index$", title, re.IGNORECASE) is None:
            continue
        following = next((other.page for other in tops[place + 1 :] if other.level <= mark.level), None)
        assert mark.page is not None
        last = len(about.labels) if following is None else max(mark.page, following - 1)
        for page in range(mark.page, last + 1):
            indexes.setdefault(page, title.lower())
    return indexes


def _entries(text: str, title: str, manual: _Manual) -> Iterator[tuple[str, list[int]]]:
    """Entries of a page of an index, and the printed numbers of their pages; an entry may take several lines."""
    pending = ""
    for line in filter(None, map(str.strip, text.replace(_HYPHEN, "-").splitlines())):
        heading = line.lower().rstrip(" 0123456789").endswith(title)
        if not pending and (len(line) == 1 or line.isdigit() or heading or line[0] in "*\u2217"):
            continue  # a letter, a page number, a running title, a topic
        glued = pending.endswith(("_", "/", "-")) or not pending
        pending = f"{pending}{'' if glued else ' '}{line}"
        if line.endswith(",") and any(map(str.isdigit, line)):
            continue
        if found := _LEADERS.match(pending) or _COMMA.match(pending):
            yield found["words"], _numbers(found["pages"])
            pending = ""
        elif len(pending) > 200:
            manual.unread += 1
            pending = ""
    manual.unread += bool(pending)


def _numbers(text: str) -> list[int]:
    pages: list[int] = []
    for first, last in _PAGES.findall(text):
        pages += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(pages))


def _protocol(profile: str, statements: Sequence[str]) -> Protocol:
    return Protocol("manual", profile, ("ndcg@10", "recall@10", "hit@1"), tuple(statements))


register_benchmark(
    Benchmark(
        "manual", import_manual, (_protocol("clean", ("a page is right if a manual's index names it",)),)
    )
)
