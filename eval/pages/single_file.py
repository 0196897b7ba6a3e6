"""A page as one file: template, styles and script in it, opens offline, and nothing outside can change it."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rge.common.files import write_bytes

TEMPLATES = Path(__file__).with_name("templates")


def write_page(
    out: Path,
    template: str,
    styles: Sequence[str],
    filters: Mapping[str, Callable[..., Any]],
    content: Mapping[str, Any],
) -> Path:
    """Render a template and replace the file in one go.

    Args:
        out: the HTML file; its directory is created.
        template: in ``eval/pages/templates``; it gets ``style``, ``script`` and ``script_hash`` for its security policy.
        styles: style sheets there, later ones override earlier ones.
        filters: of the template.
        content: what it shows.

    Returns:
        ``out``.
    """
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= dict(filters)
    page = environment.get_template(template).render(
        style=Markup("".join((TEMPLATES / name).read_text(encoding="utf-8") for name in styles)),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **content,
    )
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, page.encode())
    return out
