"""``hicache trace``: its flags. What they do is imported when a command is called."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hicache.errors import InputError

app = typer.Typer(help="Look at request traces, and generate them.", no_args_is_help=True)

Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the counts to this file too.")
]


@app.command()
def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Plain, .gz, .xz; - is stdin.")],
    format: Annotated[  # noqa: A002
        str | None, typer.Option(help="Its format, where the content misleads.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens a block, where the trace does not say.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A tokenizer.json for text; else 4 bytes are a token."),
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many sessions.")
    ] = None,
    max_bad_lines: Annotated[
        int, typer.Option(min=0, help="Malformed lines that are left out before it is an error.")
    ] = 100,
    json: Json = None,
) -> int:
    """Say what a trace is and holds, and what an infinite cache would save of it."""
    from hicache.tools.traces import showing
    from hicache.tools.traces.opening import open_trace
    from hicache.tools.traces.tokenizing import load_tokenizer

    trace = open_trace(
        file,
        format=format,
        block_size=block_size,
        max_bad_lines=max_bad_lines,
        tokenizer=None if tokenizer is None else load_tokenizer(tokenizer),
        sessions=sessions,
    )
    return showing.show(trace, "stdin" if file == "-" else file, json)


@app.command()
def generate(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="chat, system-prompts, rag, agents or tree.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Default: stdout; .gz compresses."),
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="How many chats, questions, agents.")] = 100,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal traces.")] = 0,
    rate: Annotated[float, typer.Option(help="Sessions that start a second.")] = 1.0,
    arrivals: Annotated[
        Literal["poisson", "even"], typer.Option(help="How they are spread.")
    ] = "poisson",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block.")] = 64,
    numbers: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A number of the kind: turns=20."),
    ] = None,
    json: Json = None,
) -> int:
    """Generate a trace: seeded, in the normal form, and say what an infinite cache would save."""
    from hicache.tools.cli import assignments
    from hicache.tools.traces import showing
    from hicache.tools.traces.generating import Load

    if not 0 < rate < float("inf"):
        raise InputError(f"--rate {rate:g}: it must be above 0")
    shape = showing.shape_of(kind, assignments(numbers or ()))
    load = Load(shape, sessions, seed, rate, arrivals, block_size)
    return showing.write_load(load, output, json)
