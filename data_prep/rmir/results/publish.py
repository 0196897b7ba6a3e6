"""The command line: ``rge data publish run=DIR repo=NAME``: upload a finished data set to the Hugging Face hub."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rge.common.errors import UserError
from rge.common.options import parse_options

LOCAL_ONLY = ("train.jsonl", "images/*")
"""What ``train.parquet`` holds too: a hub wants a few large files, not a file a picture."""


@dataclass
class PublishOptions:
    """Send a finished data set to the Hugging Face hub, with its card."""

    run: Path
    """Folder of a finished run."""
    repo: str
    """Name on the hub, such as me/mine; created if there is none. Log in first: hf auth login."""
    private: bool = False
    """Create it as a private one."""


def main(words: Sequence[str]) -> None:
    """Upload ``dataset/``.

    Raises:
        UserError: a word is wrong, the run is not finished, or the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    options = parse_options(PublishOptions, words, "rge data publish")
    folder = options.run / "dataset"
    if not (options.run / "report.json").is_file() or not folder.is_dir():
        raise UserError(
            f"{options.run} has no finished data set: run python -m data_prep rmir to its end first"
        )
    api = HfApi()
    try:
        address = api.create_repo(options.repo, repo_type="dataset", private=options.private, exist_ok=True)
        api.upload_folder(
            repo_id=options.repo, repo_type="dataset", folder_path=folder, ignore_patterns=list(LOCAL_ONLY),
            delete_patterns=["*.parquet", "test/*"], commit_message="python -m data_prep publish",
        )  # fmt: skip
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(f"repo={options.repo}: the hub did not take the data set: {error}") from None
    print(f"{address}\nload it: datasets.load_dataset({options.repo!r}, 'train')")
