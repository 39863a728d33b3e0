"""The flags of ``hicache replay``. What they do is imported when the command is called."""

import math
from pathlib import Path
from typing import Annotated

import typer

_SIZE = "30000p (pages), 2M (tokens), 8GB, inf or none"


def replay(  # a flag each: typer reads the signature
    trace: Annotated[str, typer.Argument(help="A trace file, plain, .gz or .xz; - is stdin.")],
    l1: Annotated[str, typer.Option(metavar="SIZE", help=f"L1: {_SIZE}.")] = "inf",
    l2: Annotated[str, typer.Option(metavar="SIZE", help="L2.")] = "none",
    l3: Annotated[str, typer.Option(metavar="SIZE", help="L3.")] = "none",
    eviction: Annotated[str, typer.Option(help="Of L1; a name or package.module:name.")] = "lru",
    host_eviction: Annotated[str | None, typer.Option(help="Of L2; default: as L1.")] = None,
    write: Annotated[str, typer.Option(help="Write policy.")] = "write_through",
    admission: Annotated[str, typer.Option(help="To L3: at first or second use.")] = "first",
    prefetch: Annotated[str, typer.Option(help="Prefetch policy.")] = "best_effort",
    page_size: Annotated[
        int | None, typer.Option(help="Tokens a page; default: the trace's block.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|DIR",
            help="Whose KV: a preset, or a directory with a config.json; another name lists them.",
        ),
    ] = "llama-3.1-8b",
    kv_dtype: Annotated[str, typer.Option(help="bf16, fp16, fp8 or fp32.")] = "bf16",
    bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="Bytes of KV a token, instead of a model's.")
    ] = None,
    sequential: Annotated[
        bool,
        typer.Option("--sequential", help="Each request ends before the next; copies are free."),
    ] = False,
    outputs: Annotated[
        bool | None,
        typer.Option(
            "--outputs/--no-outputs",
            help="Keep what is generated, where the trace tells who continues whom; default: "
            "in a timed run.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests that run at once.")] = 256,
    prefill_rate: Annotated[
        float, typer.Option(metavar="TOKENS/S", help="Of the whole engine; inf: at once.")
    ] = math.inf,
    decode_rate: Annotated[
        float, typer.Option(metavar="TOKENS/S", help="Of one request; inf: at once.")
    ] = math.inf,
    layer_groups: Annotated[
        int,
        typer.Option(
            help="Parts in which a load reaches the layers; 1: prefill begins when all is there."
        ),
    ] = 4,
    low_water: Annotated[
        float | None,
        typer.Option(min=0, max=0.5, help="Share of L1 kept free by demoting ahead."),
    ] = None,
    host_gbps: Annotated[
        float, typer.Option(metavar="GB/S", help="L1 to L2 and back, each.")
    ] = math.inf,
    host_latency_us: Annotated[float, typer.Option(min=0, help="A copy's, each way.")] = 0.0,
    read_gbps: Annotated[float, typer.Option(metavar="GB/S", help="L3 to L2.")] = math.inf,
    write_gbps: Annotated[float, typer.Option(metavar="GB/S", help="L2 to L3.")] = math.inf,
    storage_latency_us: Annotated[float, typer.Option(min=0, help="A batch's, each way.")] = 0.0,
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Sessions at once, where the trace has no times.")
    ] = None,
    arrival: Annotated[
        float | None,
        typer.Option(metavar="RATE", min=0, help="Sessions a second, where it has no times."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of --arrival.")] = 0,
    warm_up: Annotated[
        float, typer.Option(min=0, max=0.9, help="Leading share shown apart.")
    ] = 0.1,
    min_: Annotated[bool, typer.Option("--min", help="Work out Belady's MIN, too.")] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=V,V", help="l2_gb=1,2,4; eviction=lru,slru; any number."),
    ] = None,
    trace_format: Annotated[
        str | None, typer.Option("--format", help="Instead of looking at the content.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens a block, where the trace does not say.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A tokenizer.json for text; else 4 bytes are a token."),
    ] = None,
    max_bad_lines: Annotated[
        int, typer.Option(min=0, help="Malformed lines that are left out before it is an error.")
    ] = 100,
    explain: Annotated[
        int | None, typer.Option(metavar="REQUEST", help="Tell of one request, from 0 on.")
    ] = None,
    export: Annotated[
        str | None, typer.Option(metavar="FORM", help="Write the references: oracle-general.")
    ] = None,
    export_to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: the trace's name, here.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="The whole report.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="A line a run.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="A page with plots.")] = None,
) -> int:
    """Size a cache for a trace: replay it through the server's planner, in virtual time."""
    from hicache.tools.replay.command import Outputs, Source, run
    from hicache.tools.replay.models import token_nbytes
    from hicache.tools.replay.settings import DEFAULT_LOW_WATER, Hop, Hops, Settings
    from hicache.tools.replay.workload import Pace

    host = Hop(host_gbps * 1e9, host_latency_us / 1e6)
    latency_s = storage_latency_us / 1e6
    settings = Settings(
        l1=l1, l2=l2, l3=l3, eviction=eviction, host_eviction=host_eviction, write=write,
        admission=admission, prefetch=prefetch, page_size=page_size,
        token_nbytes=bytes_per_token or token_nbytes(model, kv_dtype),
        model="" if bytes_per_token else f"{model} {kv_dtype}",
        is_sequential=sequential, outputs=outputs, concurrency=concurrency,
        prefill_tokens_per_s=prefill_rate, decode_tokens_per_s=decode_rate,
        layer_groups=layer_groups,
        low_water=DEFAULT_LOW_WATER if low_water is None else low_water,
        hops=Hops(host, host, Hop(read_gbps * 1e9, latency_s), Hop(write_gbps * 1e9, latency_s)),
        warm_up=warm_up, has_min=min_,
    )  # fmt: skip
    source = Source(trace, trace_format, block_size, tokenizer, max_bad_lines)
    outputs_to = Outputs(json, csv, html, explain, export, export_to)
    return run(source, settings, sweep or (), Pace(sessions, arrival, seed), outputs_to)
