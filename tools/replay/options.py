"""The flags of ``hicache replay``. What they do is imported when the command is called."""

import math
from pathlib import Path
from typing import Annotated

import typer

_POLICIES, _PAGES, _TIMES = "Policies", "Pages and their bytes", "Time"
_ARRIVAL, _READING, _REPORTS = "Sessions of a trace without times", "Reading", "Reports"
_SIZE = "30000p (pages), 2M (tokens), 8GB, inf or none"


def replay(  # a flag each: typer reads the signature
    trace: Annotated[str, typer.Argument(help="A trace file, plain, .gz or .xz; - is stdin.")],
    l1: Annotated[str, typer.Option(metavar="SIZE", help=f"L1: {_SIZE}.")] = "inf",
    l2: Annotated[str, typer.Option(metavar="SIZE", help="L2: likewise.")] = "none",
    l3: Annotated[str, typer.Option(metavar="SIZE", help="L3: likewise; needs an L2.")] = "none",
    eviction: Annotated[
        str,
        typer.Option(
            help="Of L1: lru, lfu, fifo, mru, filo, slru, priority, or package.module:name.",
            rich_help_panel=_POLICIES,
        ),
    ] = "lru",
    host_eviction: Annotated[
        str | None, typer.Option(help="Of L2; default: as L1.", rich_help_panel=_POLICIES)
    ] = None,
    write: Annotated[
        str,
        typer.Option(
            help="write_through, write_through_selective or write_back.", rich_help_panel=_POLICIES
        ),
    ] = "write_through",
    admission: Annotated[
        str, typer.Option(help="To L3: at first or second use.", rich_help_panel=_POLICIES)
    ] = "first",
    prefetch: Annotated[
        str, typer.Option(help="best_effort, wait_complete or timeout.", rich_help_panel=_POLICIES)
    ] = "best_effort",
    page_size: Annotated[
        int | None,
        typer.Option(help="Tokens a page; default: the trace's block.", rich_help_panel=_PAGES),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|DIR",
            help="Whose KV: a preset, or a directory with a config.json; another name lists them.",
            rich_help_panel=_PAGES,
        ),
    ] = "llama-3.1-8b",
    kv_dtype: Annotated[
        str, typer.Option(help="bf16, fp16, fp8 or fp32.", rich_help_panel=_PAGES)
    ] = "bf16",
    bytes_per_token: Annotated[
        int | None,
        typer.Option(
            min=1, help="Bytes of KV a token, instead of a model's.", rich_help_panel=_PAGES
        ),
    ] = None,
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential",
            help="Each request ends before the next; copies are free.",
            rich_help_panel=_TIMES,
        ),
    ] = False,
    outputs: Annotated[
        bool | None,
        typer.Option(
            "--outputs/--no-outputs",
            help="Keep what is generated, where the trace tells who continues whom; default: "
            "in a timed run.",
            show_default=False,
            rich_help_panel=_TIMES,
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Requests that run at once.", rich_help_panel=_TIMES)
    ] = 256,
    prefill_rate: Annotated[
        float,
        typer.Option(
            metavar="TOKENS/S", help="Of the whole engine; inf: at once.", rich_help_panel=_TIMES
        ),
    ] = math.inf,
    decode_rate: Annotated[
        float,
        typer.Option(
            metavar="TOKENS/S", help="Of one request; inf: at once.", rich_help_panel=_TIMES
        ),
    ] = math.inf,
    layer_groups: Annotated[
        int,
        typer.Option(
            help="Parts in which a load reaches the layers; 1: prefill begins when all is there.",
            rich_help_panel=_TIMES,
        ),
    ] = 4,
    low_water: Annotated[
        float | None,
        typer.Option(
            min=0, max=0.5, help="Share of L1 kept free by demoting ahead.", rich_help_panel=_TIMES
        ),
    ] = None,
    host_gbps: Annotated[
        float, typer.Option(metavar="GB/S", help="L1 to L2 and back, each.", rich_help_panel=_TIMES)
    ] = math.inf,
    host_latency_us: Annotated[
        float, typer.Option(min=0, help="A copy's, each way.", rich_help_panel=_TIMES)
    ] = 0.0,
    read_gbps: Annotated[
        float, typer.Option(metavar="GB/S", help="L3 to L2.", rich_help_panel=_TIMES)
    ] = math.inf,
    write_gbps: Annotated[
        float, typer.Option(metavar="GB/S", help="L2 to L3.", rich_help_panel=_TIMES)
    ] = math.inf,
    storage_latency_us: Annotated[
        float, typer.Option(min=0, help="A batch's, each way.", rich_help_panel=_TIMES)
    ] = 0.0,
    sessions: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sessions at once, where the trace has no times.", rich_help_panel=_ARRIVAL
        ),
    ] = None,
    arrival: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            min=0,
            help="Sessions a second, where it has no times.",
            rich_help_panel=_ARRIVAL,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of --arrival.", rich_help_panel=_ARRIVAL)] = 0,
    warm_up: Annotated[
        float,
        typer.Option(min=0, max=0.9, help="Leading share shown apart.", rich_help_panel=_REPORTS),
    ] = 0.1,
    min_: Annotated[
        bool, typer.Option("--min", help="Work out Belady's MIN, too.", rich_help_panel=_REPORTS)
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=V,V", help="l2_gb=1,2,4; eviction=lru,slru; any number."),
    ] = None,
    trace_format: Annotated[
        str | None,
        typer.Option(
            "--format", help="Instead of looking at the content.", rich_help_panel=_READING
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens a block, where the trace does not say.", rich_help_panel=_READING
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A tokenizer.json for text; else 4 bytes are a token.",
            rich_help_panel=_READING,
        ),
    ] = None,
    max_bad_lines: Annotated[
        int,
        typer.Option(
            min=0,
            help="Malformed lines that are left out before it is an error.",
            rich_help_panel=_READING,
        ),
    ] = 100,
    explain: Annotated[
        int | None,
        typer.Option(
            metavar="REQUEST", help="Tell of one request, from 0 on.", rich_help_panel=_REPORTS
        ),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(
            metavar="FORM", help="Write the references: oracle-general.", rich_help_panel=_REPORTS
        ),
    ] = None,
    export_to: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Default: the trace's name, here.", rich_help_panel=_REPORTS
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The whole report.", rich_help_panel=_REPORTS),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A line a run.", rich_help_panel=_REPORTS)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A page with plots.", rich_help_panel=_REPORTS),
    ] = None,
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
