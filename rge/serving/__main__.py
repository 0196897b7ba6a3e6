"""``rge serve checkpoint=DIR [key=value ...]``; see `rge.serving.options`."""

from importlib.util import find_spec

from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.options import parse_options
from rge.serving.address import bound
from rge.serving.options import ServeOptions


def main(words: list[str]) -> int:
    """Serve until a signal ends it."""
    options = parse_options(ServeOptions, words, "rge serve")
    needed = ("fastapi", "uvicorn", "prometheus_client", "asgi_correlation_id")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise UserError(
            "rge serve needs them: pip install -e '.[serve]'", key=", ".join(missing), kind="package"
        )
    with bound(options.host, options.port) as listener:
        from rge.serving.process import serve  # after --help, which needs none of it

        return serve(options, listener)


if __name__ == "__main__":
    start(main)
