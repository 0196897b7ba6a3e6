"""Options of ``rge data negatives``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rge.calls.model_config import ModelConfig
from rge.common.errors import UserError
from rge.common.modes import Mode
from rge.common.options import AtLeastOne, Count
from rge.common.registry import PluginOptions
from rge.embedders.registry import ModelOptions
from rge.mining.config import MiningRules


@dataclass(kw_only=True)
class NegativesOptions(MiningRules, ModelOptions, PluginOptions):
    """Mine hard negatives for training records with a checkpoint or any other embedder."""

    records: Path
    """Training records, JSON lines; or a folder of such files, each of which is mined by itself."""
    out: Path
    """Training records with negatives; a folder if ``records`` is one. Pictures are referenced, not copied."""
    pool: Path | None = None
    """Candidates to mine from: training records, a retrieval set or its corpus.parquet, or a folder of pictures. null: all
    targets of the records' own file."""
    query_mode: Mode | None = None
    """Query state to mine with: reasoning (after a rationale), direct or auto; null: the one that is served."""
    keep: bool = True
    """Keep the negatives that records have, and add to them; false: replace them."""
    judge: str | None = None
    """Vision-language model that is asked whether a candidate is right, and scores every target: a directory or an id
    on the hub."""
    judge_endpoint: ModelConfig | None = None
    """Or one behind an OpenAI-compatible endpoint with top_logprobs, with the same keys as a model of ``rge data rmir``."""
    ask: str = "yes_no"
    """What the judge is asked: yes_no, description, or your own scorer (docs/extending.md)."""
    max_judged: float = 0.5
    """A candidate with this score or more counts as right."""
    judge_batch_size: AtLeastOne = 16
    """Pairs per forward pass of the judge."""
    cache: Path | None = None
    """Cache of embeddings and of a judge's scores; null: ``<out>.cache``. Any number of runs can share one."""
    memory_mb: Annotated[float, Field(gt=0)] = 2048.0
    """Memory for the candidates' embeddings, MB; more are read block by block from a file in the cache."""
    examples: Count = 24
    """Queries on the report page."""

    @property
    def root(self) -> Path:
        """Folder of cached embeddings and scores."""
        return self.cache or self.out.with_name(f"{self.out.name}.cache")

    @property
    def judges(self) -> bool:
        """Whether a judge is asked."""
        return self.judge is not None or self.judge_endpoint is not None

    def check_all(self) -> None:
        """Raise a `UserError` for options that contradict each other, before anything is read."""
        self.check()
        self.check_model()
        if self.judge is not None and self.judge_endpoint is not None:
            raise UserError("give either judge=MODEL or judge_endpoint.name=NAME, not both").about(
                "judge", "judge_endpoint"
            )
        if self.num == 0 and not self.judges:
            raise UserError(
                "0 mines nothing: it only lets a judge score the targets that are there, so give judge=",
                key="num",
            )
