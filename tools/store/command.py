"""``hicache store``: its flags. What they do is imported when a command is called."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hicache.errors import InputError

if TYPE_CHECKING:
    from hicache.storage import StorageBackend
    from hicache.tools.store.opening import Place
    from hicache.tools.store.survey import Survey
    from hicache.tools.store.texts import Decoder, Prefix

app = typer.Typer(
    help="Look into a store on disk, verify it, move it, clean it; also while servers use it.",
    no_args_is_help=True,
)

Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The server's settings; see configs/.")
]
StorePath = Annotated[
    Path | None,
    typer.Option("--path", metavar="DIR", help="Where it is. Default: as the server's."),
]
Backend = Annotated[
    str | None,
    typer.Option(metavar="SPEC", help="Default: what the directory says that it is."),
]
Json = Annotated[bool, typer.Option("--json", help="For machines.")]
Which = Annotated[
    str | None,
    typer.Option("--namespace", metavar="DIGEST", help="Its first digits, as `stat` shows them."),
]
Prefixed = Annotated[
    str | None,
    typer.Option("--prefix", metavar="TEXT", help="What begins with it; needs --tokenizer."),
]
Tokens = Annotated[
    str | None, typer.Option(metavar="IDS", help="What begins with these token ids: 1,2,3.")
]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="A tokenizer.json, a model's directory, or smollm2."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without it only say what would go.")]


@app.command()
def stat(
    config: Config = None, path: StorePath = None, backend: Backend = None, json: Json = False
) -> int:
    """What is there: namespaces in words, pages, bytes, ages, and how much was used again."""
    from hicache.tools.store import stat

    return _on_store(
        config, path, backend, lambda store, place: stat.run(store, place, is_json=json)
    )


@app.command()
def verify(
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is bad.")] = False,
    aside: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --repair: keep what could be read of it there."),
    ] = None,
    config: Config = None,
    path: StorePath = None,
    backend: Backend = None,
    json: Json = False,
) -> int:
    """Read and prove every record. Exits with 1 if something is bad."""
    from hicache.tools.store import verify

    if aside is not None and not repair:
        raise InputError("--aside: only with --repair")
    return _on_store(
        config,
        path,
        backend,
        lambda store, place: verify.run(
            store, place.keyring, repairs=repair, aside=aside, is_json=json
        ),
    )


@app.command()
def ls(
    depth: Annotated[int, typer.Option(min=1, help="Forks to follow.")] = 3,
    width: Annotated[int, typer.Option(min=1, help="Branches to show at a fork.")] = 8,
    namespace: Which = None,
    prefix: Prefixed = None,
    tokens: Tokens = None,
    tokenizer: Tokenizer = None,
    config: Config = None,
    path: StorePath = None,
    backend: Backend = None,
    json: Json = False,
) -> int:
    """Prompts as a tree of prefixes, the largest first; as text where there is a tokenizer."""
    from hicache.tools.store import ls

    decoder, wanted = _prefix(prefix, tokens, tokenizer)

    async def run(store: "StorageBackend", place: "Place") -> int:
        found = await _survey(store)
        names = [found.select(namespace)] if namespace else list(found.names.values())
        limits = ls.Limits(depth, width)
        return await ls.run(
            store,
            names,
            limits,
            prefix=wanted,
            decoder=decoder,
            keyring=place.keyring,
            is_json=json,
        )

    return _on_store(config, path, backend, run)


@app.command()
def gc(
    yes: Yes = False,
    unused_for: Annotated[
        float,
        typer.Option(
            "--unused-for", metavar="MINUTES", min=0, help="Leave what was used since then."
        ),
    ] = 60.0,
    config: Config = None,
    path: StorePath = None,
    backend: Backend = None,
    json: Json = False,
) -> int:
    """What nothing can use: pages without their ancestors, older formats, what a crash left."""
    from hicache.tools.store import removing

    return _on_store(
        config,
        path,
        backend,
        lambda store, _: removing.collect(
            store, unused_s=unused_for * 60, is_meant=yes, is_json=json
        ),
    )


@app.command()
def export(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: stdout.")
    ] = None,
    namespace: Which = None,
    config: Config = None,
    path: StorePath = None,
    backend: Backend = None,
    json: Json = False,
) -> int:
    """Write a namespace as one file, to be imported on another machine."""
    from hicache.tools.store import exporting

    async def run(store: "StorageBackend", place: "Place") -> int:
        found = await _survey(store)
        named = found.select(namespace) if namespace else found.only()
        return await exporting.run(store, named, output, is_json=json)

    return _on_store(config, path, backend, run)


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Of `export`; - is stdin.")] = "-",
    create: Annotated[
        bool, typer.Option("--create", help="Make the store where there is none.")
    ] = False,
    config: Config = None,
    path: StorePath = None,
    backend: Backend = None,
    json: Json = False,
) -> int:
    """Store what a file of `export` holds; each record is proved before."""
    from hicache.tools.store import importing
    from hicache.tools.store.opening import locate

    source = None if file == "-" else Path(file)
    place = locate(config, path, backend)
    return asyncio.run(importing.run(place, source, may_make=create, is_json=json))


@app.command()
def rm(
    namespace: Which = None,
    tenant: Annotated[
        str | None,
        typer.Option(metavar="SALT", help="All of a tenant's; - reads the salt from stdin."),
    ] = None,
    prefix: Prefixed = None,
    tokens: Tokens = None,
    tokenizer: Tokenizer = None,
    yes: Yes = False,
    config: Config = None,
    path: StorePath = None,
    backend: Backend = None,
    json: Json = False,
) -> int:
    """Remove pages: of a namespace, of a tenant, or of all that begins with a prefix."""
    from hicache.tools.store import naming, removing

    _, wanted = _prefix(prefix, tokens, tokenizer)
    if namespace is None and tenant is None and wanted is None:
        raise InputError("say what: --namespace, --tenant, --prefix or --tokens")
    salt = sys.stdin.readline().rstrip("\n") if tenant == "-" else tenant

    async def run(store: "StorageBackend", place: "Place") -> int:
        found = await _survey(store)
        names = list(found.names.values())
        if salt is not None:
            names = naming.of_tenant(names, salt)
        if namespace is not None:
            names = [naming.select(names, namespace)]
        if wanted is None:
            return await removing.remove_namespaces(store, names, is_meant=yes, is_json=json)
        return await removing.remove_prefix(
            store, names, wanted, place.keyring, is_meant=yes, is_json=json
        )

    return _on_store(config, path, backend, run)


def _on_store(
    config: Path | None,
    path: Path | None,
    backend: str | None,
    run: "Callable[[StorageBackend, Place], Awaitable[int]]",
) -> int:
    """Run a command on the store that is meant; return its exit code."""
    from hicache.tools.store.opening import locate, opened

    async def opened_and_run() -> int:
        async with opened(place) as store:
            return await run(store, place)

    place = locate(config, path, backend)
    return asyncio.run(opened_and_run())


async def _survey(store: "StorageBackend") -> "Survey":
    from hicache.tools.store.survey import survey

    return await survey(store)


def _prefix(
    text: str | None, tokens: str | None, tokenizer: str | None
) -> "tuple[Decoder | None, Prefix | None]":
    """Return the tokenizer and the prefix that flags name."""
    from hicache.keys import pack
    from hicache.tools.store.texts import TextPrefix, TokenPrefix, load_decoder

    decoder = None if tokenizer is None else load_decoder(tokenizer)
    if text is not None and tokens is not None:
        raise InputError("say --prefix or --tokens, not both")
    if tokens is not None:
        try:
            return decoder, TokenPrefix(pack(int(one) for one in tokens.split(",")))
        except (ValueError, OverflowError):
            raise InputError(f"--tokens {tokens}: write ids, as 1,2,3") from None
    if text is None:
        return decoder, None
    if not text:
        raise InputError("--prefix: it is empty")
    if decoder is None:
        raise InputError("--prefix: say --tokenizer PATH, or give --tokens")
    return decoder, TextPrefix(text, decoder)
