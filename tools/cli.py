"""The command ``hicache``: its flags, its exit codes, and the one line that an error gets.

Results go to stdout, messages to stderr; 0 fine, 1 found problems, 2 could not run. Each command
is a function of its own module, ``run(...) -> int``, imported when it is called: ``hicache
--help`` loads no GPU stack.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

import hicache
from hicache.config import load
from hicache.errors import ConfigError, HiCacheError
from hicache.tools.replay.options import replay
from hicache.tools.store import command as store_command
from hicache.tools.traces import command as trace_command

ENGINE = ("fastapi", "jinja2", "safetensors", "torch", "transformers", "uvicorn")
"""What the extra ``engine`` installs, and only those need who run a model."""

app = typer.Typer(
    help="A hierarchical KV cache for LLM servers: GPU memory, host memory, storage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure, and hold the figures to their bars.", no_args_is_help=True)
backends = typer.Typer(help="Look at storage backends.", no_args_is_help=True)
app.command()(replay)
app.add_typer(bench, name="bench")
app.add_typer(backends, name="backends")
app.add_typer(trace_command.app, name="trace")
app.add_typer(store_command.app, name="store")

Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file too.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Smaller sizes: shows that it runs.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names, by default the process's; return its exit code."""
    try:
        return int(app(argv, prog_name="hicache", standalone_mode=False) or 0)
    except TyperException as error:
        # ``hicache bench`` alone prints its help and has nothing more to say.
        if message := error.format_message():
            print(f"hicache: {message}", file=sys.stderr)
        return 2
    except HiCacheError as error:
        print(f"hicache: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ENGINE:
            raise
        print(f"hicache: {error.name} is missing: pip install 'hicache[engine]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(hicache.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Take the options that every command shares."""


@app.command()
def demo(
    json: Json = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the store there, not nowhere.")
    ] = None,
) -> int:
    """Watch the cache at work: chats that outgrow L1, are evicted, reloaded, and restarted."""
    from hicache.tools import demo

    return demo.run(json, keep=keep)


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings; see configs/.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A directory with a HF model, or smollm2.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind to.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any setting: cache.host.size=8GB."),
    ] = None,
) -> int:
    """Serve a model over HTTP, as OpenAI's and SGLang's clients expect it."""
    flags = {"engine.model": model, "server.host": host, "server.port": port}
    given = {name: flag for name, flag in flags.items() if flag is not None}
    loaded = load(config, overrides={**assignments(settings or ()), **given})

    from hicache.tools import serve

    return serve.run(loaded)


def assignments(texts: Sequence[str]) -> dict[str, str]:
    """Return ``name=value`` texts as a mapping; raise ``ConfigError`` for one that is none."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"command line: --set {text}: write --set NAME=VALUE")
        found[name.strip()] = value.strip()
    return found


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the server's first.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer. Default: as the server says.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="0 always takes the likeliest token.")
    ] = 0.2,
) -> int:
    """Chat with a server, and see after each turn which tier its tokens came from."""
    from hicache.tools import chat

    return chat.run(url, model, system, max_tokens, temperature)


# ---------------------------------------------------------------- bench


@bench.command("tree")
def bench_tree(json: Json = None, quick: Quick = False) -> int:
    """The radix tree: match, insert, lease, evict, memory."""
    from hicache.tools import bench_tree

    return bench_tree.run(json, is_quick=quick)


@bench.command("keys")
def bench_keys(json: Json = None, quick: Quick = False) -> int:
    """Page keys."""
    from hicache.tools import bench_keys

    return bench_keys.run(json, is_quick=quick)


@bench.command("transfer")
def bench_transfer(json: Json = None, quick: Quick = False) -> int:
    """Copies between L1 and L2, against memcpy of the same pages."""
    from hicache.tools import bench_transfer

    return bench_transfer.run(json, is_quick=quick)


@bench.command("storage")
def bench_storage(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Name of a backend, or package.module:Class; may be given again. "
            "Default: lmdb and file.",
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="PATH", help="Where to measure.")
    ] = None,
    json: Json = None,
    quick: Quick = False,
) -> int:
    """A storage backend: batches of pages written and read, against memcpy and plain files."""
    from hicache.tools import bench_storage

    backends = backend or bench_storage.BACKENDS
    return bench_storage.run(json, is_quick=quick, backends=backends, folder=folder)


@bench.command("codec")
def bench_codec(json: Json = None, quick: Quick = False) -> int:
    """How much smaller keys and values of the small model get in storage, and what that costs."""
    from hicache.tools import bench_codec

    return bench_codec.run(json, is_quick=quick)


@bench.command("reuse")
def bench_reuse(json: Json = None, quick: Quick = False) -> int:
    """Time to first token of a prompt found in L1, L2, L3, or nowhere."""
    from hicache.tools import bench_reuse

    return bench_reuse.run(json, is_quick=quick)


@bench.command("overhead")
def bench_overhead(json: Json = None, quick: Quick = False) -> int:
    """What the cache costs when nothing hits."""
    from hicache.tools import bench_overhead

    return bench_overhead.run(json, is_quick=quick)


@bench.command("chat")
def bench_chat(json: Json = None, quick: Quick = False) -> int:
    """Many chats whose turns outgrow L1, with all tiers and with L1 alone."""
    from hicache.tools import bench_chat

    return bench_chat.run(json, is_quick=quick)


# ---------------------------------------------------------------- backends


@backends.command("list")
def list_backends(json: Json = None) -> int:
    """Which backends are installed, and whether they can be used."""
    from hicache.tools import backends

    return backends.run(json)


@backends.command("check")
def check_backend(
    backend: Annotated[
        str, typer.Argument(metavar="SPEC", help="Name of a backend, or package.module:Class.")
    ],
    options: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="As in [cache.storage.options]."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--path", metavar="DIR", help="Where the stores are made.")
    ] = None,
    json: Json = None,
) -> int:
    """Whether a backend keeps the storage contract: every promise is tried, on empty stores."""
    from hicache.tools import backend_check

    return backend_check.run(backend, options or (), folder, json)


if __name__ == "__main__":
    sys.exit(main())
