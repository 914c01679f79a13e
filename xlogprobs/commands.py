"""The commands `score`, `info` and `parity`: options, tables and exit codes.

Exit code 2 means that the call or its input has to be changed, 1 that the run failed; both come with one line on
standard error.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import xlogprobs
from xlogprobs import parity as parity_matrix
from xlogprobs.accurate import Array
from xlogprobs.api import WANTED
from xlogprobs.scoring import Library, Scores, check_output, write_scores
from xlogprobs.scoring import score as score_stored
from xlogprobs.stored import InputError, open_logits

app = typer.Typer(
    help="Log-probabilities of tokens, exact to 1e-6, on NumPy, torch, JAX and any array-API library.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"xlogprobs {xlogprobs.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Version.")
    ] = False,
) -> None:
    pass


@app.command()
def score(
    file: Annotated[
        Path, typer.Argument(help="A .safetensors or .npz file with `logits` (..., V) and `ids` (...), or logits.npy.")
    ],
    ids: Annotated[Path | None, typer.Option(help="The .npy file of the ids that go with logits.npy.")] = None,
    want: Annotated[
        str, typer.Option(help="Statistics, with commas between them: logprob, entropy, lse, rank.")
    ] = "logprob",
    top_k: Annotated[int, typer.Option(help="How many of the likeliest ids to add for each position.")] = 0,
    backend: Annotated[Library, typer.Option(help="The array library that computes.")] = Library.NUMPY,
    temperature: Annotated[float, typer.Option(help="Divides the logits, after scale and softcap.")] = 1.0,
    scale: Annotated[float, typer.Option(help="Multiplies the logits.")] = 1.0,
    softcap: Annotated[
        float | None, typer.Option(help="Caps them: softcap * tanh(scale * logits / softcap).", show_default="none")
    ] = None,
    ignore_index: Annotated[
        int | None, typer.Option(help="The id of positions to leave out, such as -100.", show_default="none")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write ids and statistics to a .safetensors, .npz, .csv or .jsonl file."),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=0, help="How many positions to show: of more, the first and last ones.")
    ] = 64,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress bar (there is none either outside a terminal).")
    ] = False,
) -> None:
    """Log-probability, and other statistics, of each id under stored logits, and what they come to.

    The logits are memory-mapped and read in pieces, so a file may be larger than the memory. A compressed .npz member
    cannot be mapped: it is decompressed in pieces.
    """
    with _one_line_errors():
        stored = open_logits(file, ids)
        if output is not None:
            check_output(output, *filter(None, (file, ids)))
        start = time.perf_counter()
        with _progress("scoring", quiet) as progress:
            task = progress.add_task("", total=stored.ids.size)
            scores = score_stored(
                stored,
                want=[name.strip() for name in want.split(",")],
                top_k=top_k,
                backend=backend,
                temperature=temperature,
                scale=scale,
                softcap=softcap,
                ignore_index=ignore_index,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
        seconds = time.perf_counter() - start
        if output is not None:
            write_scores(output, scores)
    console = Console()
    if rows and scores.ids.size:
        head, tail = _ends(scores.ids.size, rows)
        console.print(_positions(scores, head, tail, console))
        if left_out := scores.ids.size - head - tail:
            console.print(
                f"{left_out:,} positions after the first {head:,} left out; --rows {scores.ids.size} shows all",
                highlight=False,
            )
    console.print(_totals(scores, seconds, output))


@app.command()
def info() -> None:
    """Which backends are installed, the devices each sees, and how it would run."""
    table = Table("backend", "version", "devices", "runs as", "why not")
    for backend in xlogprobs.backends():
        table.add_row(
            *map(
                Text,
                (
                    backend.name,
                    backend.version or ("-" if backend.installed else "not installed"),
                    ", ".join(backend.devices) or "-",
                    backend.execution or "-",
                    backend.why_not or "",
                ),
            )
        )
    Console().print(table)


@app.command()
def parity(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rows and vocabularies.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Measure every backend that runs here against float64 and against each other.

    The exit code is 1 if any result is outside the bound.
    """
    with _progress("measuring", quiet) as progress:
        task = progress.add_task("", total=None)
        cells = parity_matrix.measure(
            quick, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    if as_json:
        typer.echo(parity_matrix.to_json(cells))
    else:
        Console().print(parity_matrix.table(cells))
    if any(cell.status == "FAIL" for cell in cells):
        raise typer.Exit(1)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        _fail(error, 2)
    except (ImportError, OSError, MemoryError) as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    message = " ".join(str(error).split()) or type(error).__name__
    typer.echo(f"xlogprobs: {message}", err=True)
    raise typer.Exit(code) from error


def _progress(what: str, quiet: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )


def _positions(scores: Scores, head: int, tail: int, console: Console) -> Table:
    """A row for each position, and below it a row for each of its likeliest ids."""
    shape, size, tokens = scores.ids.shape, scores.ids.size, scores.tokens
    stats: Any = scores.stats
    alternatives = 0 if stats.top_ids is None else stats.top_ids.shape[-1]
    columns = {name: getattr(stats, name) for name in WANTED}
    columns = {name: a for name, a in columns.items() if a is not None or (name == "logprob" and alternatives)}
    table = Table("position", "id", *(["token"] if tokens else []), *columns)
    for column in table.columns:
        column.justify, column.no_wrap = ("left", False) if column.header == "token" else ("right", True)
    shown = repr if console.encoding.startswith("utf") else ascii
    for i in (*range(head), *range(size - tail, size)):
        token = [Text(shown(tokens[i]), overflow="fold")] if tokens else []
        ignored = scores.ignored.flat[i]
        values = ["" if a is None else statistic_text(a.flat[i]) for a in columns.values()]
        table.add_row(_position(i, shape), str(scores.ids.flat[i]), *token, *(["ignored"] if ignored else values))
        for k in range(0 if ignored else alternatives):
            likely, logprob = (a.flat[i * alternatives + k] for a in (stats.top_ids, stats.top_logprobs))
            table.add_row(f"top {k + 1}", str(likely), *[""] * len(token), statistic_text(logprob), style="dim")
        if i == head - 1 and tail:
            table.add_section()
    return table


def _ends(size: int, rows: int) -> tuple[int, int]:
    """How many positions of ``size`` to show at the head and at the tail to make ``rows``."""
    return (size, 0) if size <= rows else (rows - rows // 2, rows // 2)


def _position(index: int, shape: tuple[int, ...]) -> str:
    if len(shape) < 2:
        return str(index)
    place = []
    for length in reversed(shape):
        index, rest = divmod(index, length)
        place.append(str(rest))
    return f"({', '.join(reversed(place))})"


def statistic_text(value: Array) -> str:
    """A rank as it is; nats with 6 decimals, or with 4 digits and an exponent where decimals would hide them.

    >>> statistic_text(-12.25), statistic_text(-7.5e-05), statistic_text(0.0), statistic_text(12)
    ('-12.250000', '-7.500e-05', '0.000000', '12')
    """
    if isinstance(value, Integral):
        return str(value)
    return f"{value:.6f}" if value == 0 or 1e-3 <= abs(value) < 1e6 or abs(value) == float("inf") else f"{value:.3e}"


def _totals(scores: Scores, seconds: float, output: Path | None) -> Table:
    ignored = scores.ids.size - scores.positions
    figures = {
        "sum": (scores.sum, statistic_text),
        "mean": (scores.mean, statistic_text),
        "perplexity": (scores.perplexity, "{:.6g}".format),
        "mean entropy": (scores.mean_entropy, statistic_text),
        "rank 1": (scores.greedy_share, "{:.1%}".format),
    }
    table = Table.grid(padding=(0, 2))
    for name, (value, text) in figures.items():
        if value is not None:
            table.add_row(name, text(value))
    table.add_row("positions", f"{scores.positions:,}" + (f" ({ignored:,} ignored)" if ignored else ""))
    table.add_row("time", f"{seconds:.3f} s")
    if output is not None:
        table.add_row("written to", Text(str(output), overflow="fold"))
    return table
