"""Write a page as one self-contained file with embedded styles and script, which works offline."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval.pages.wording import LONG_QUESTION, LONG_RATIONALE, cut_at, number, percent, signed
from rge.common.files import write_text

TEMPLATES = Path(__file__).with_name("templates")


def write_page(out: Path, template: str, styles: Sequence[str], content: Mapping[str, Any]) -> Path:
    """Render a template, write it atomically and return ``out``.

    The template gets ``style``, ``script``, and ``script_hash`` for its content security policy; later style sheets
    override earlier ones.
    """
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    page = (
        _environment()
        .get_template(template)
        .render(
            style=Markup("".join((TEMPLATES / name).read_text(encoding="utf-8") for name in styles)),
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            **content,
        )
    )
    write_text(out, page)
    return out


@cache
def _environment() -> Environment:
    """One for all pages of a process, so that a template is compiled once."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "signed": signed,
        "number": number,
        "count": lambda n: f"{n:,}",
    }
    environment.globals |= {
        "cut_at": cut_at,
        "long_question": LONG_QUESTION,
        "long_rationale": LONG_RATIONALE,
    }
    return environment
